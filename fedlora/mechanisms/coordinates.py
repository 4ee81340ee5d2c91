"""Which per-record blocks a mechanism collects, and how they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

from fedlora.adapters.blocks import BlockTable
from fedlora.adapters.views import ViewKind, view_blocks
from fedlora.geometry import check_rank
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD, TANGENT_IN, TANGENT_OUT, block_name, split_block_name
from fedlora.wire.payload import AdapterLayout


@dataclass(frozen=True)
class Coordinates:
    """PUBLIC. Blocks of one mechanism on one layout.

    Attributes:
        kind: what the adapted layers collect (see `fedlora.adapters.views`).
        table: every block of a clipped sum: adapters, small extras (biases, norms), then matrices of extras.
        stored: the part of `table` that is kept per record (a prefix of it).
        adapters: names of adapter blocks.
        extras: names of trained extra parameters.
    """

    kind: ViewKind
    table: BlockTable
    stored: BlockTable
    adapters: tuple[str, ...]
    extras: tuple[str, ...]

    @classmethod
    def of(cls, layout: AdapterLayout, kind: ViewKind) -> Coordinates:
        """Lay out the blocks of a layout in one view kind."""
        adapters: dict[str, tuple[int, ...]] = {}
        for module, spec in layout.modules.items():
            adapters |= view_blocks(kind, module, spec)
        if (
            kind == "tangent"
        ):  # blocks of one shape side by side, so that their small linear algebra needs no copies
            order = [
                block_name(module, key)
                for modules in shape_groups(layout)
                for key in (TANGENT_OUT, TANGENT_IN)
                for module in modules
            ]
            adapters = {name: adapters[name] for name in order}
        small = {name: shape for name, shape in layout.extra.items() if len(shape) == 1}
        large = {name: shape for name, shape in layout.extra.items() if len(shape) != 1}
        return cls(
            kind,
            BlockTable.of(adapters | small | large),
            BlockTable.of(adapters | small),
            tuple(adapters),
            tuple(small | large),
        )

    def two_groups(self) -> dict[str, str]:
        """Return the usual grouping: every adapter block in one group, every extra parameter in the head's."""
        return dict.fromkeys(self.adapters, GROUP_ADAPTERS) | dict.fromkeys(self.extras, GROUP_HEAD)

    def module_groups(self) -> dict[str, str]:
        """Return one group per module, for per-layer clipping."""
        return {name: split_block_name(name)[0] for name in self.table.shapes}


def shape_groups(layout: AdapterLayout) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each (out, in, rank), in order of first appearance.

    Raises:
        RankMismatchError: if a module's rank is above its smaller side.
    """
    groups: dict[tuple[int, int, int], list[str]] = {}
    for module, spec in layout.modules.items():
        check_rank(spec.out_features, spec.in_features, spec.rank)
        groups.setdefault((spec.out_features, spec.in_features, spec.rank), []).append(module)
    return tuple(tuple(names) for names in groups.values())
