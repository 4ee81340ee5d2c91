"""A model of one matrix whose records choose its input and its output gradient, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


class Layer(nn.Module):
    """One matrix, whose input and output gradient a record chooses."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.q = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x)


@dataclass(frozen=True)
class Chosen:
    """Inputs (tokens, in) and output gradients (tokens, out) of one record."""

    x: torch.Tensor
    g: torch.Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class ChosenTask:
    """Losses whose gradient in the matrix's output is what each record says; its forward may run under autocast."""

    autocast: bool = False

    def collate(self, records: list[Chosen]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([r.x for r in records]), "g": torch.stack([r.g for r in records])}

    def per_record_loss(self, model, batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return (model(batch["x"]) * batch["g"]).flatten(1).float().sum(1)
