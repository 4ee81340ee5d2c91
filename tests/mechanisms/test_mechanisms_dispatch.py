"""Calls into torch's dispatcher for each adapted layer: a small step on a GPU is bound by launching."""

from __future__ import annotations

import pytest
import torch
from engine_zoo import ZooTask, adapted_model, base_model, records
from test_mechanisms_views import set_peft, tangent_views
from torch.utils._python_dispatch import TorchDispatchMode

from fedlora.adapters import LayerView, RecordAxis
from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.per_record import per_record_gradients
from fedlora.mechanisms.stages import Metric
from fedlora.names import LORA_A, LORA_B, block_name


class Counted(TorchDispatchMode):
    """Counts every operation, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def views_of(kind, adapted):
    if kind == "tangent":
        views, frames = tangent_views(adapted, torch.Generator().manual_seed(1))
        set_peft(adapted, frames)
        return views
    factors = adapted.write_factors().blocks
    return {
        name: LayerView(
            kind,
            spec.scaling,
            down=torch.from_numpy(factors[block_name(name, LORA_A)]).double(),
            up=torch.from_numpy(factors[block_name(name, LORA_B)]).double(),
        )
        for name, spec in adapted.layout.modules.items()
    }


def calls(kind, adapted, views):
    """Operations of one forward and backward with some of the layers adapted."""
    task = ZooTask("llama")
    coordinates = Coordinates.of(adapted.layout, kind)
    metric = Metric(kind, {"adapters": 1.0}, dict.fromkeys(coordinates.table.shapes, "adapters"))
    rows = records("llama")[:2]
    batch = task.collate(rows)
    with Counted() as counted:
        per_record_gradients(
            adapted, coordinates, metric, views, {}, RecordAxis.of([len(rows)]),
            lambda: task.per_record_loss(adapted.model, batch),
        )  # fmt: skip
    return counted.count


@pytest.mark.parametrize(("kind", "limit"), [("lora_b", 12), ("factors", 17), ("tangent", 17)])
def test_an_adapted_layer_costs_few_calls(kind, limit):
    adapted = adapted_model("llama")
    views = views_of(kind, adapted)
    taken = calls(kind, adapted, views)
    each = (taken - base_calls()) / len(views)
    assert each <= limit, each


def base_calls():
    """Operations of the model's own forward and backward without an adapter, towards its embedded tokens."""
    model, batch = base_model("llama"), ZooTask("llama").collate(records("llama")[:2])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    embedded = model.get_input_embeddings()(batch["input_ids"]).requires_grad_(True)
    with Counted() as counted:
        model(inputs_embeds=embedded, attention_mask=batch["attention_mask"]).logits.sum().backward()
    return counted.count


def test_blocks_beside_each_other_are_one_view():
    table = BlockTable.of({"a": (2, 3), "b": (2, 3), "c": (6,), "d": (2, 3)})
    wide = torch.arange(2 * 30, dtype=torch.float64).view(2, 30)
    blocks = FlatBlocks(table, wide[:, 3 : 3 + table.size])
    both = blocks.together(["a", "b"])
    assert both.shape == (2, 2, 2, 3)
    assert torch.equal(both[:, 1], blocks["b"])
    both.zero_()
    assert float(wide[:, 3:15].abs().sum()) == 0.0
    assert torch.equal(blocks["c"], wide[:, 15:21])
    for names in (["b", "d"], ["b", "c"], ["b", "a"]):
        with pytest.raises(KeyError, match="beside"):
            blocks.together(names)
