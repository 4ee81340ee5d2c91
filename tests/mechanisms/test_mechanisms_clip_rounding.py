"""The clip in single precision: rounding never takes a record beyond C, and no undefined norm passes."""

from __future__ import annotations

import math

import pytest
import torch

from fedlora.adapters import BlockTable, FlatBlocks, RecordAxis
from fedlora.mechanisms.clip import clip_and_sum, clip_factors
from fedlora.mechanisms.per_record import _sum_squares
from fedlora.mechanisms.stages import Metric, PerRecordGradients


@pytest.mark.parametrize("size", [2, 37, 5000])
@pytest.mark.parametrize("scale", [1.0, 3e-5, 7e6])
def test_rounding_in_float32_never_takes_a_clipped_record_beyond_c(size: int, scale: float) -> None:
    table = BlockTable.of({"a|lora_B": (size,)})
    metric = Metric("euclidean", {"adapters": 1.0}, {"a|lora_B": "adapters"}, False)
    rows = 400
    flat = scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    bound = 0.1 * scale * math.sqrt(size)
    norms = {"adapters": _sum_squares(flat)}
    each = PerRecordGradients(FlatBlocks(table, flat), norms, RecordAxis.of([1] * rows))
    clipped = clip_and_sum(each, table, metric, bound).blocks.flat.double()
    lengths = clipped.square().sum(1).sqrt()
    assert float((flat.double().square().sum(1).sqrt() > bound).double().mean()) > 0.8
    assert float(lengths.max()) <= bound
    assert float(lengths.max()) > bound * (1 - 1e-5)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_no_number_gives_factor_zero(bad: float, per_layer: bool) -> None:
    metric = Metric(
        "euclidean", {"adapters": 1.0, "head": 1.0}, {"a|lora_B": "adapters", "h|bias": "head"}, per_layer
    )
    norms = {"adapters": torch.tensor([bad, 0.04]), "head": torch.tensor([bad, 0.04])}
    for factor in clip_factors(norms, metric, 1.0).values():
        assert factor.tolist() == [0.0, 1.0]
