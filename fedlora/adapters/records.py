"""The record axis of one batch: whose each record is, and sums of records per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedlora.errors import RankMismatchError


def to_device(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor without waiting for the device (page-locked memory for a GPU)."""
    target = torch.device(device)
    if target.type == "cuda" and not host.is_cuda:
        return host.pin_memory().to(target, non_blocking=True)
    return host.to(target)


def batch_to_device(batch: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return a collated batch with its tensors on the device; other values stay as they are."""
    return {
        name: to_device(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def to_host(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host (through page-locked memory from a GPU); waits for it."""
    if not value.is_cuda:
        return value.clone()
    held = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    held.copy_(value)
    return held


@dataclass(frozen=True)
class RecordAxis:
    """Records of several clients in one batch, sorted by client.

    Counts are known on the host, so nothing here waits for the device.

    Attributes:
        counts: SENSITIVE. Records of each client, 0 allowed; its length is K.
        client: (records,) int64, which client owns each record.
        padded: (K, longest) int64, record numbers per client; places beyond a client's count hold 0.
        present: (K, longest) bool, False where `padded` is only filling.
        slot: (records,) int64, place of each record in the flattened `padded`.
    """

    counts: tuple[int, ...]
    client: torch.Tensor
    padded: torch.Tensor
    present: torch.Tensor
    slot: torch.Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str = "cpu") -> RecordAxis:
        """Build the axis from per-client counts.

        Example:
            >>> RecordAxis.of([2, 0, 1]).client.tolist()
            [0, 0, 2]
        """
        if not counts or any(count < 0 for count in counts):
            raise RankMismatchError(
                "records: need one count >= 0 for each client; got none or a negative one"
            )
        sizes = np.asarray(counts, dtype=np.int64)
        longest = max(int(sizes.max()), 1)
        client = np.repeat(np.arange(len(sizes)), sizes)
        first = np.cumsum(sizes) - sizes
        slot = np.arange(len(client)) - first[client] + client * longest
        places = np.arange(longest)
        present = places < sizes[:, None]
        padded = np.where(present, first[:, None] + places, 0)
        parts = (client, slot, padded.reshape(-1), present.reshape(-1).astype(np.int64))
        moved = to_device(torch.from_numpy(np.concatenate(parts)), device)  # one transfer
        owners, slots, table, there = torch.split(moved, [len(part) for part in parts])
        shape = (len(sizes), longest)
        return cls(tuple(counts), owners, table.view(shape), there.view(shape).bool(), slots)

    @property
    def num_records(self) -> int:
        """SENSITIVE. Number of records of all clients."""
        return sum(self.counts)

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.counts)

    def gather(self, per_client: torch.Tensor) -> torch.Tensor:
        """Spread per-client values (K, *shape) over records.

        Returns:
            (*shape) where there is one client, else (records, *shape).
        """
        if self.num_clients == 1:
            return per_client[0]
        return per_client.index_select(0, self.client)

    def sum(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return each client's weighted sum of its records.

        Args:
            weights: (records,).
            values: (records, size).

        Returns:
            (K, size) in the dtype of `values`.
        """
        if self.num_clients == 1:
            return (weights @ values).unsqueeze(0)
        if values.is_cuda:
            hot = torch.zeros(self.num_clients, self.num_records, dtype=values.dtype, device=values.device)
            hot.scatter_(0, self.client.unsqueeze(0), weights.unsqueeze(0))
            return hot @ values
        out = values.new_zeros(self.num_clients, values.shape[1])
        first = 0
        for number, count in enumerate(self.counts):
            if count > 0:
                out[number] = weights[first : first + count] @ values[first : first + count]
            first += count
        return out

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Arrange (records, *shape) as (K, longest, *shape); filling places repeat record 0."""
        return values.index_select(0, self.padded.reshape(-1)).view(*self.padded.shape, *values.shape[1:])

    def unpad(self, values: torch.Tensor) -> torch.Tensor:
        """Inverse of `pad`: (K, longest, *shape) to (records, *shape)."""
        return values.flatten(0, 1).index_select(0, self.slot)
