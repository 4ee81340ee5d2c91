"""The adapted model: PEFT's modules, the layout, the shared recipe and the taps, held together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlora.adapters.layout import check_payload_fits
from fedlora.adapters.recipe import ARecipe
from fedlora.adapters.spectral import RemovedPart
from fedlora.adapters.taps import Taps
from fedlora.errors import LayoutMismatchError
from fedlora.names import CORE, FRAME_IN, FRAME_OUT, LORA_A, LORA_B, block_name
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array, ModuleSpec

ADAPTER = "default"


@dataclass(frozen=True)
class AdaptedModel:
    """A frozen base model with one adapter.

    Attributes:
        model: PEFT's model (the plain model when full matrices are trained); all parameters frozen, because
            gradients come from the taps.
        layout: names and shapes of what is trained. PUBLIC.
        recipe: the shared lora_A. PUBLIC.
        lora_layers: module path to PEFT's LoRA layer.
        leaves: module path to trained leaf modules of `modules_to_save`.
        taps: opened by the engine for one pass.
        pattern_matches: rank and alpha pattern key to the number of layers that it matched.
        dropout: whether LoRA dropout is on (then passes run in train mode).
        removed: module path to what `init: spectral` took out of the base weight; empty otherwise. PUBLIC.
        left_out: directions in which trained heads do not move (see `Mechanism.left_out`). PUBLIC.
    """

    model: nn.Module
    layout: AdapterLayout
    recipe: ARecipe
    lora_layers: Mapping[str, Any]
    leaves: Mapping[str, nn.Module]
    taps: Taps = field(default_factory=Taps)
    pattern_matches: Mapping[str, int] = field(default_factory=dict)
    dropout: bool = False
    removed: Mapping[str, RemovedPart] = field(default_factory=dict)
    left_out: dict[str, torch.Tensor] = field(default_factory=dict)
    _able: dict[str, list[Any]] = field(default_factory=dict, repr=False, compare=False)
    _shared: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lies."""
        return next(self.model.parameters()).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Floating dtype of the frozen base (float32 where only integers are found)."""
        for parameter in self.model.parameters():
            if parameter.dtype.is_floating_point:
                return parameter.dtype
        return torch.float32

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype of clipping, sums and states: float64 for a float64 model, else float32."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def shared_a(self, module: str) -> torch.Tensor:
        """Return the recipe's lora_A on the device in the compute dtype, drawn once. PUBLIC."""
        if module not in self._shared:
            drawn = torch.from_numpy(self.recipe.draw(module))
            self._shared[module] = drawn.to(self.device, self.compute_dtype)
        return self._shared[module]

    def num_trained(self) -> int:
        """PUBLIC. Number of trained values in factor form."""
        spec_sizes = (s.rank * (s.out_features + s.in_features) for s in self.layout.modules.values())
        return sum(spec_sizes) + sum(int(np.prod(shape)) for shape in self.layout.extra.values())

    def load(self, payload: AdapterPayload) -> None:
        """Write an adapter into PEFT's modules, for evaluation and export.

        Args:
            payload: kind `lora_b`, `factors` or `frames`. PUBLIC.

        Raises:
            LayoutMismatchError: if names, shapes, base model or the lora_A recipe differ, or the payload is an
                update rather than an adapter.
        """
        check_payload_fits(payload, self.layout)
        for name in self.layout.modules:
            lora_a, lora_b = self._factors(payload, name)
            self._set_factors(name, payload.modules[name], lora_a, lora_b)
        for name, leaf in self.leaves.items():
            for key, parameter in leaf.named_parameters(recurse=False):
                parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(payload.blocks[f"{name}|{key}"])))

    def _factors(self, payload: AdapterPayload, name: str) -> tuple[Array, Array]:
        blocks, spec = payload.blocks, payload.modules[name]
        if payload.kind == "lora_b":
            if payload.recipe != self.recipe.sha256:
                raise LayoutMismatchError(
                    f"module {name}: lora_A recipe {str(payload.recipe)[:12]}; this side drew "
                    f"{self.recipe.sha256[:12]}; "
                    "use the same seed, ranks and fedlora version"
                )
            return self.recipe.draw(name), blocks[block_name(name, LORA_B)]
        if payload.kind == "factors":
            return blocks[block_name(name, LORA_A)], blocks[block_name(name, LORA_B)]
        if payload.kind == "frames":
            q_out = blocks[block_name(name, FRAME_OUT)].astype(np.float64)
            core = blocks[block_name(name, CORE)].astype(np.float64)
            left = (q_out @ core / spec.scaling).astype(np.float32)
            return np.ascontiguousarray(blocks[block_name(name, FRAME_IN)].T), left
        raise LayoutMismatchError(
            f"adapter payload: got kind {payload.kind!r}; allowed are lora_b, factors, frames; aggregate updates first"
        )

    def _set_factors(self, name: str, spec: ModuleSpec, lora_a: Array, lora_b: Array) -> None:
        layer = self.lora_layers[name]
        for linear, array in ((layer.lora_A[ADAPTER], lora_a), (layer.lora_B[ADAPTER], lora_b)):
            value = torch.from_numpy(np.ascontiguousarray(array)).to(linear.weight)
            linear.weight = nn.Parameter(value, requires_grad=False)
            linear.out_features, linear.in_features = value.shape
        layer.scaling[ADAPTER], layer.r[ADAPTER] = spec.scaling, spec.rank

    def write_factors(self) -> AdapterPayload:
        """Read PEFT's modules back as a `factors` payload. PUBLIC if what was loaded is."""
        blocks: dict[str, Array] = {}
        for name, layer in self.lora_layers.items():
            blocks[block_name(name, LORA_A)] = _array(layer.lora_A[ADAPTER].weight)
            blocks[block_name(name, LORA_B)] = _array(layer.lora_B[ADAPTER].weight)
        blocks |= self.extra_values()
        modules = {
            name: ModuleSpec(spec.out_features, spec.in_features, int(self.lora_layers[name].r[ADAPTER]),
                             float(self.lora_layers[name].scaling[ADAPTER]))
            for name, spec in self.layout.modules.items()
        }  # fmt: skip
        return AdapterPayload("factors", blocks, modules, None, self.layout.base_fingerprint)

    def extra_values(self) -> dict[str, Array]:
        """Return the trained extra parameters' present values as float32."""
        return {
            f"{name}|{key}": _array(parameter)
            for name, leaf in self.leaves.items()
            for key, parameter in leaf.named_parameters(recurse=False)
        }

    def prepare_pass(self) -> None:
        """Set the mode of a training pass: eval without LoRA dropout, train with it.

        Gradient checkpointing acts in train mode only, so its own layers (not their dropout) are switched.
        """
        if self.model.training != self.dropout:
            self.model.train(self.dropout)
        for module in self._checkpointed():
            if module.gradient_checkpointing:
                module.training = True

    def _checkpointed(self) -> list[Any]:
        """Return the modules that can checkpoint, searched once."""
        if "found" not in self._able:
            self._able["found"] = [m for m in self.model.modules() if hasattr(m, "gradient_checkpointing")]
        return self._able["found"]


def _array(parameter: torch.Tensor) -> Array:
    return parameter.detach().to(torch.float32).cpu().numpy().copy()
