"""Flat storage for named blocks: one tensor holds every block, so that a step needs few kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class BlockTable:
    """PUBLIC. Ordered block names with their shapes and places in one flat row.

    Attributes:
        shapes: payload name to shape (without the leading axis), in storage order.
        offsets: first element of each block in the row.
        size: numbers in one row.

    Example:
        >>> table = BlockTable.of({"a|lora_B": (2, 3), "b|lora_B": (1, 3)})
        >>> table.size, table.offsets["b|lora_B"]
        (9, 6)
    """

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> BlockTable:
        """Lay the blocks out one after the other."""
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += math.prod(shape)
        return cls(dict(shapes), offsets, end)

    def span(self, name: str) -> tuple[int, int]:
        """Return (first, end) of a block in the row."""
        first = self.offsets[name]
        return first, first + math.prod(self.shapes[name])

    def spans(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return the merged, ordered ranges that the named blocks cover."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted(self.span(name) for name in names):
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((first, end))
        return merged

    def only(self, names: Sequence[str]) -> BlockTable:
        """Return a new table of some of the blocks, in this table's order."""
        chosen = set(names)
        return BlockTable.of({name: shape for name, shape in self.shapes.items() if name in chosen})


@dataclass(frozen=True)
class FlatBlocks(Mapping[str, torch.Tensor]):
    """Named views into one tensor (lead, table.size); the leading axis is records or clients.

    Attributes:
        table: names, shapes and offsets.
        flat: (lead, table.size).
    """

    table: BlockTable
    flat: torch.Tensor
    _views: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the view (lead, *shape) of one block."""
        if name not in self._views:
            self._views[name] = self._view(self.table.offsets[name], self.table.shapes[name])
        return self._views[name]

    def together(self, names: Sequence[str]) -> torch.Tensor:
        """Return one view (lead, len(names), *shape) of blocks of one shape that lie one after the other.

        Raises:
            KeyError: if they do not lie so.
        """
        first, shape = self.table.offsets[names[0]], self.table.shapes[names[0]]
        for place, name in enumerate(names):
            at = first + place * math.prod(shape)
            if self.table.shapes[name] != shape or self.table.offsets[name] != at:
                raise KeyError(f"block {name}: not beside {names[0]} in one shape")
        return self._view(first, (len(names), *shape))

    def _view(self, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """View a stretch of every row in one call (a slice and a view cost two for each of hundreds of blocks)."""
        step = self.flat.stride(1)
        strides, width = [0] * len(shape), step
        for axis in range(len(shape) - 1, -1, -1):
            strides[axis] = width
            width *= shape[axis]
        place = self.flat.storage_offset() + first * step
        return self.flat.as_strided((self.flat.shape[0], *shape), (self.flat.stride(0), *strides), place)

    def __iter__(self) -> Iterator[str]:
        """Iterate over block names in storage order."""
        return iter(self.table.shapes)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.table.shapes)

    def like(self, flat: torch.Tensor) -> FlatBlocks:
        """Return the same names over another flat tensor."""
        return FlatBlocks(self.table, flat)

    @classmethod
    def pack(cls, table: BlockTable, blocks: Mapping[str, torch.Tensor]) -> FlatBlocks:
        """Copy (lead, *shape) tensors into one flat tensor in the table's order."""
        rows = [blocks[name].reshape(blocks[name].shape[0], -1) for name in table.shapes]
        return cls(table, torch.cat(rows, dim=1))
