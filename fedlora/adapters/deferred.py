"""Per-record gradients that stay factored until the clip factors are known.

A trained Linear of shape (out, in) has the per-record gradient sum_t g_t x_t^T. Its norm and its
clipped sum need only g and x; nothing of size records x out x in is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fedlora.adapters.records import RecordAxis


class DeferredGradient(Protocol):
    """SENSITIVE. Per-record gradients of one parameter, not materialised."""

    def squared_norms(self) -> torch.Tensor:
        """Return (records,) squared Frobenius norms."""
        ...

    def masked(self, keep: torch.Tensor) -> DeferredGradient:
        """Return the same with the records where `keep` is False set to zero (NaN included)."""
        ...

    def weighted_sum(self, weights: torch.Tensor, records: RecordAxis) -> torch.Tensor:
        """Return (K, *shape): each client's sum of weight times gradient."""
        ...

    def per_record(self) -> torch.Tensor:
        """Materialise (records, *shape); for tests and small heads only."""
        ...


def gram_squared_norms(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ||sum_t g_t x_t^T||_F^2 per record from token Gram matrices.

    Where tokens cancel, the rounding of Gram matrices in float32 is as large as what is left, on either side: they are
    formed in float64. A margin of one rounding unit times the sum of all |g|^2 |x|^2 stands for the rounding of the
    sum that is released.

    Args:
        g: (records, tokens, out) SENSITIVE, float32 or float64.
        x: (records, tokens, in) SENSITIVE, same dtype.

    Returns: (records,) SENSITIVE.
    """
    if g.shape[1] == 1:
        return g.square().sum((1, 2)) * x.square().sum((1, 2))
    of_g, of_x = _gram(g), _gram(x)
    exact = (of_g * of_x).sum((1, 2))
    traces = of_g.diagonal(dim1=1, dim2=2).sum(1) * of_x.diagonal(dim1=1, dim2=2).sum(1)
    return (exact.clamp_min(0.0) + 0.5 * torch.finfo(g.dtype).eps * traces).to(g.dtype)


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Return (records, tokens, tokens) float64 products of rows (records, tokens, width)."""
    wide = rows.double()
    return torch.bmm(wide, wide.transpose(1, 2))


def _keep(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.where(keep.view(-1, *([1] * (values.dim() - 1))), values, 0.0)


@dataclass(frozen=True)
class OuterGradient:
    """Gradient of a Linear's weight (out, in), or of a Conv1D's (in, out) if `transposed`.

    Attributes:
        g: (records, tokens, out), float32 or better.
        x: (records, tokens, in), same dtype.
        transposed: the parameter is stored (in, out).
    """

    g: torch.Tensor
    x: torch.Tensor
    transposed: bool = False

    def squared_norms(self) -> torch.Tensor:
        """Return (records,) squared Frobenius norms."""
        return gram_squared_norms(self.g, self.x)

    def masked(self, keep: torch.Tensor) -> OuterGradient:
        """Return the same with dropped records at zero."""
        return OuterGradient(_keep(self.g, keep), _keep(self.x, keep), self.transposed)

    def weighted_sum(self, weights: torch.Tensor, records: RecordAxis) -> torch.Tensor:
        """Return (K, *shape)."""
        g = self.g * weights.view(-1, 1, 1)
        left, right = (self.x, g) if self.transposed else (g, self.x)
        if records.num_clients == 1:
            return (left.flatten(0, 1).t() @ right.flatten(0, 1)).unsqueeze(0)
        present = records.present.view(*records.present.shape, 1, 1)
        rows = torch.where(present, records.pad(left), 0.0).flatten(1, 2)
        return torch.bmm(rows.transpose(1, 2), records.pad(right).flatten(1, 2))

    def per_record(self) -> torch.Tensor:
        """Materialise (records, *shape)."""
        left, right = (self.x, self.g) if self.transposed else (self.g, self.x)
        return torch.bmm(left.transpose(1, 2), right)


@dataclass(frozen=True)
class LookupGradient:
    """Gradient of an embedding table (rows, width): row `ids` receives g.

    Attributes:
        g: (records, tokens, width), zero where the id is the padding id.
        ids: (records, tokens) int64.
        num_rows: rows of the table.
    """

    g: torch.Tensor
    ids: torch.Tensor
    num_rows: int

    def squared_norms(self) -> torch.Tensor:
        """Return (records,): tokens of one id are summed before the norm; as in `gram_squared_norms`."""
        same = self.ids.unsqueeze(2) == self.ids.unsqueeze(1)
        gram = _gram(self.g)
        exact = torch.where(same, gram, 0.0).sum((1, 2)).clamp_min(0.0)
        trace = gram.diagonal(dim1=1, dim2=2).sum(1)
        return (exact + 0.5 * torch.finfo(self.g.dtype).eps * trace).to(self.g.dtype)

    def masked(self, keep: torch.Tensor) -> LookupGradient:
        """Return the same with dropped records at zero."""
        return LookupGradient(_keep(self.g, keep), self.ids, self.num_rows)

    def weighted_sum(self, weights: torch.Tensor, records: RecordAxis) -> torch.Tensor:
        """Return (K, rows, width)."""
        width = self.g.shape[2]
        rows = self.ids + (records.client * self.num_rows).unsqueeze(1)
        out = self.g.new_zeros(records.num_clients * self.num_rows, width)
        out.index_add_(0, rows.reshape(-1), (self.g * weights.view(-1, 1, 1)).reshape(-1, width))
        return out.view(records.num_clients, self.num_rows, width)

    def per_record(self) -> torch.Tensor:
        """Materialise (records, rows, width)."""
        out = self.g.new_zeros(self.g.shape[0], self.num_rows, self.g.shape[2])
        return out.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.g), self.g)
