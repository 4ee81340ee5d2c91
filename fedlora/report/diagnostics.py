"""Figures about one round that the server can compute from public values: gauge drift and the noise in the weights.

Everything here is post-processing of adapters that travel and of the public configuration; nothing private is read.

References: PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1, Eqs. 8, 9, 20
(noise energy in Z), Sec. 4 (preconditioned noise); LoRA and Privacy: When Random Projections Help (and When They
Don't), Definition 3 (noise seen through A A^T).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlora.config.schema import RecordPrivacy, SgdConfig
from fedlora.geometry import procrustes, tangent_dimension
from fedlora.geometry.arrays import tensor
from fedlora.names import FRAME_IN, FRAME_OUT, LORA_A, LORA_B, TANGENT_OUT, block_name
from fedlora.training.session import Workbench
from fedlora.wire.payload import AdapterPayload, ModuleSpec

Float64 = npt.NDArray[np.float64]


class RoundDiagnostics:
    """Computes a round's public diagnostics.

    Args:
        bench: the server's own model and mechanism.
    """

    def __init__(self, bench: Workbench) -> None:
        """Bind the mechanism; nothing is computed yet."""
        self._bench, self._mechanism = bench, bench.mechanism
        self._common: dict[str, Float64] | None = None

    def of(
        self,
        before: AdapterPayload,
        after: AdapterPayload,
        clients: int,
        moments: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Return the figures that exist for this run.

        Args:
            before: global adapter that went down.
            after: global adapter after the round.
            clients: updates in the mean, >= 1.
            moments: the server optimiser's second moments ("second/<block>"), where it is adaptive.

        Returns:
            `gauge_drift`: share of the move of the factors that a rotation explains (0 where the coordinates are
            fixed). `intrinsic_noise`: root mean square of ||noise in the adapted weights||_F that the mean of one
            plain step of rate 1 carries. `preconditioned_noise`: the same for the server's adaptive step of this
            round; only where the clients' own steps are plain, because moments at clients stay there.
        """
        found: dict[str, float] = {}
        drift = gauge_drift(before, after)
        if drift is not None:
            found["gauge_drift"] = drift
        if not isinstance(self._bench.config.privacy, RecordPrivacy) or clients < 1:
            return found
        found["intrinsic_noise"] = self._intrinsic(before) / math.sqrt(clients)
        scaled = self._preconditioned(before, clients, moments or {})
        if scaled is not None:
            found["preconditioned_noise"] = scaled
        return {name: value for name, value in found.items() if math.isfinite(value)}

    # -- noise in the weights -----------------------------------------------------------------------

    def _stddev(self, block: str) -> float:
        """Noise of one entry of a client's averaged step, in the coordinates of a block: sigma C / (w b)."""
        mechanism = self._mechanism
        privacy, metric = mechanism.privacy, mechanism.metric
        weight = metric.weight(metric.group_of[block])
        return privacy.sigma() * privacy.max_grad_norm / (weight * privacy.divisor)

    def _intrinsic(self, payload: AdapterPayload) -> float:
        if self._mechanism.kind == "dp_sgd":  # whole matrices are trained; every block is one
            shapes = self._mechanism.coordinates.table.shapes
            return math.sqrt(sum(self._stddev(name) ** 2 * math.prod(shapes[name]) for name in shapes))
        energies = (self._energy(m, spec, payload) for m, spec in self._bench.layout.modules.items())
        return math.sqrt(sum(energies))

    def _energy(self, module: str, spec: ModuleSpec, payload: AdapterPayload) -> float:
        out, inp, rank, kind = spec.out_features, spec.in_features, spec.rank, self._mechanism.kind
        if kind == "prism":
            return self._stddev(block_name(module, TANGENT_OUT)) ** 2 * tangent_dimension(out, inp, rank)
        b = self._stddev(block_name(module, LORA_B))
        if (
            kind == "noisy_projection"
        ):  # E ||Omega L^T A||^2 with L L^T = A A^T and entries of A of variance 1/r
            return b**2 * out * inp * (inp + rank + 1) / rank
        energy = b**2 * out * float(np.square(self._lora_a(module, payload)).sum())
        if kind == "factor":
            a = self._stddev(block_name(module, LORA_A))
            energy += a**2 * inp * float(np.square(_block(payload, module, LORA_B)).sum())
        return energy * spec.scaling**2

    def _lora_a(self, module: str, payload: AdapterPayload) -> Float64:
        if block_name(module, LORA_A) in payload.blocks:
            return _block(payload, module, LORA_A)
        if self._common is None:
            state = self._mechanism.stages.open(self._mechanism, self._bench.adapted, payload, 1)
            self._common = {name: value.double().cpu().numpy() for name, value in state.fixed.items()}
        return self._common[module]

    # -- after the server's adaptive step -------------------------------------------------------------

    def _preconditioned(
        self, payload: AdapterPayload, clients: int, moments: Mapping[str, Any]
    ) -> float | None:
        config = self._bench.config
        server, local = config.federation.server_optimizer, config.training.optimizer
        plain = isinstance(local, SgdConfig) and local.momentum == 0.0
        plain = plain and getattr(config.mechanism, "adaptivity", "none") == "none"
        if server.kind != "adam" or not plain or config.training.schedule.kind != "constant":
            return None
        kinds: dict[str, Callable[..., float | None]] = {"prism": self._tangent, "lora_fa": self._rows}
        energy_of = kinds.get(self._mechanism.kind)
        if energy_of is None:
            return None
        share = local.lr * math.sqrt(config.training.local_steps / clients)
        total = 0.0
        for module, spec in self._bench.layout.modules.items():
            energy = energy_of(module, spec, payload, share, moments)
            if energy is None:
                return None
            total += energy
        return server.lr * math.sqrt(total)

    def _tangent(
        self, module: str, spec: ModuleSpec, payload: AdapterPayload, share: float, moments: Mapping[str, Any]
    ) -> float | None:
        """Energy of M (V + eps^2)^(-1/2) for tangent noise whose two blocks share one core."""
        del payload
        sides = [_second(moments, f"{module}|{side}") for side in ("out", "in")]
        eps = self._bench.config.federation.server_optimizer.eps
        if sides[0] is None or sides[1] is None:
            return None
        roots = [np.linalg.eigvalsh(v + eps**2 * np.eye(len(v))) ** -0.5 for v in sides if v is not None]
        squares, traces = [float((r**2).sum()) for r in roots], [float(r.sum()) for r in roots]
        rank = spec.rank
        free = (spec.out_features - rank) * squares[0] + (spec.in_features - rank) * squares[1]
        core = (rank * (squares[0] + squares[1]) + 2.0 * traces[0] * traces[1]) / 4.0
        return (share * self._stddev(block_name(module, TANGENT_OUT))) ** 2 * (free + core)

    def _rows(
        self, module: str, spec: ModuleSpec, payload: AdapterPayload, share: float, moments: Mapping[str, Any]
    ) -> float | None:
        """Energy of elementwise scaled noise in lora_B, carried into the weights by the common lora_A."""
        second = _second(moments, block_name(module, LORA_B))
        if second is None:
            return None
        eps = self._bench.config.federation.server_optimizer.eps
        gains = (np.sqrt(second) + eps) ** -2
        rows = np.square(self._lora_a(module, payload)).sum(1)
        scale = share * self._stddev(block_name(module, LORA_B)) * spec.scaling
        return scale**2 * float((gains * rows).sum())


def _second(moments: Mapping[str, Any], name: str) -> Float64 | None:
    found = next((value for key, value in moments.items() if key.endswith(f"second/{name}")), None)
    return None if found is None else np.asarray(found, dtype=np.float64)


def _block(payload: AdapterPayload, module: str, name: str) -> Float64:
    return np.asarray(payload.blocks[block_name(module, name)], dtype=np.float64)


def gauge_drift(before: AdapterPayload, after: AdapterPayload) -> float | None:
    """Return the share of the factors' move that a common rotation explains: 1 - aligned / plain distance.

    The factors' stack F = [lora_B; lora_A^T] is turned by the orthogonal Q that brings it closest to the old one
    (Procrustes); what disappears changed the representation and not the model. In frames both sides turn on their own.
    Fixed coordinates (lora_B at a common lora_A, full matrices) have no gauge: 0. A round that moved nothing: 0.

    Args:
        before: adapter that went down.
        after: adapter after the round; None is returned if kind or ranks changed.
    """
    if before.kind != after.kind or dict(before.modules) != dict(after.modules):
        return None
    sides = {"factors": ((LORA_B, LORA_A),), "frames": ((FRAME_OUT,), (FRAME_IN,))}.get(after.kind, ())
    plain, aligned = 0.0, 0.0
    for module in after.modules:
        for names in sides:
            old, new = _stack(before, module, names), _stack(after, module, names)
            turned = new @ procrustes(tensor(new), tensor(old)).numpy()
            plain += float(np.square(new - old).sum())
            aligned += float(np.square(turned - old).sum())
    return 1.0 - math.sqrt(min(aligned, plain) / plain) if plain > 0.0 else 0.0


def _stack(payload: AdapterPayload, module: str, names: tuple[str, ...]) -> Float64:
    parts = [_block(payload, module, name) for name in names]
    return np.concatenate(
        [part.T if name == LORA_A else part for part, name in zip(parts, names, strict=True)]
    )


__all__ = ["RoundDiagnostics", "gauge_drift"]
