"""Client-level privacy: project, clip, sum with equal weights, noise, public divisor - in this order.

One client's whole update moves the sum by at most C (add or remove; 2C under replace-one, which the
accountant knows). The noise sigma C is added to the sum whoever answers, the divisor is the public
expected number of clients, and the event is written to the ledger before the noise is drawn.

Where noise is added at the clients in shares, each adds standard deviation sigma C / sqrt(honest),
so that any `honest` of them together add sigma C: the guarantee assumes that many honest answers.

Adaptive clipping follows "Differentially Private Learning with Adaptive Clipping" (Andrew et al.,
Algorithm 1): the bit 1[norm <= C] - 1/2 of each client is summed, noised and charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch

from fedlora.accounting import Event, GaussianEvent, PoissonGaussianEvent
from fedlora.aggregation.linear import consistent_tangent, frames_of, tangent_of
from fedlora.aggregation.types import Blocks, Float64, NormalSource
from fedlora.config.schema import ClientPrivacy, FederationConfig
from fedlora.errors import PrivacyParameterError, SensitivityMismatchError, TooFewRepliesError
from fedlora.geometry import Frames, Tangent, tangent_noise_from_normals, tangent_squared_norm
from fedlora.names import TANGENT_IN, TANGENT_OUT, block_name
from fedlora.wire.payload import AdapterPayload

BIT_SENSITIVITY: Final = 0.5
QUANTILE_RATE: Final = 0.2


@dataclass(frozen=True)
class ClientPlan:
    """PUBLIC constants of client-level privacy.

    Attributes:
        clipping_norm: C, the bound of one client's update in round 1 (and later, if fixed).
        noise_multiplier: noise standard deviation over C, on the sum.
        expected_clients: the divisor.
        sample_rate: q of independent (Poisson) client sampling; None claims no amplification.
        quantile: target share of clients below C if the clip adapts, else None.
        quantile_noise_multiplier: noise of the summed bits over their sensitivity 1/2.
        noise_at: "server", or "clients" (shares).
        honest_clients: least number of honest answers that shares of noise assume.
    """

    clipping_norm: float
    noise_multiplier: float
    expected_clients: float
    sample_rate: float | None
    quantile: float | None = None
    quantile_noise_multiplier: float | None = None
    noise_at: Literal["server", "clients"] = "server"
    honest_clients: int | None = None

    def __post_init__(self) -> None:
        """Refuse anything that is not finite and in range."""
        named = {
            "clipping_norm": self.clipping_norm,
            "noise_multiplier": self.noise_multiplier,
            "expected_clients": self.expected_clients,
        }
        if self.quantile is not None:
            if self.quantile_noise_multiplier is None or not 0 < self.quantile < 1:
                raise PrivacyParameterError(
                    "privacy.clipping adaptive-quantile needs target_quantile in (0, 1) and "
                    "quantile_noise_multiplier: the quantile's bit is released and charged"
                )
            named["quantile_noise_multiplier"] = self.quantile_noise_multiplier
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise PrivacyParameterError(f"client sample rate: got {self.sample_rate}; allowed (0, 1]")
        for name, value in named.items():
            if not (value > 0 and math.isfinite(value)):
                raise PrivacyParameterError(f"{name}: got {value}; allowed: finite and above 0")
        if self.noise_at == "clients" and (self.honest_clients is None or self.honest_clients < 1):
            raise PrivacyParameterError(
                "privacy.noise_at clients needs honest_clients >= 1: how many answers must be honest for the "
                "shares of noise to add up"
            )

    @property
    def share_stddev(self) -> float:
        """Standard deviation of one client's share of noise at clip C: sigma C / sqrt(honest)."""
        if self.honest_clients is None:
            raise PrivacyParameterError("shares of noise need privacy.honest_clients")
        return self.noise_multiplier * self.clipping_norm / math.sqrt(self.honest_clients)

    @property
    def event(self) -> Event:
        """What one round releases: the noised sum and, if the clip adapts, the noised bits (one coin).

        With noise in shares no amplification is claimed: the server, against which the shares protect, draws the coins
        and knows who takes part.
        """
        sigma = self.noise_multiplier
        if self.quantile is not None and self.quantile_noise_multiplier is not None:
            sigma = (sigma**-2 + self.quantile_noise_multiplier**-2) ** -0.5
        if self.sample_rate is None or self.sample_rate == 1.0 or self.noise_at == "clients":
            return GaussianEvent(sigma)
        return PoissonGaussianEvent(sigma, self.sample_rate)


def client_plan(privacy: ClientPrivacy, *, expected_clients: float, sample_rate: float | None) -> ClientPlan:
    """Build the plan from a resolved configuration.

    Raises:
        PrivacyParameterError: if the noise multiplier is still open.
    """
    if privacy.noise_multiplier is None:
        raise PrivacyParameterError(
            "privacy.noise_multiplier is open: resolve the configuration (target_epsilon) before the run"
        )
    adaptive = privacy.clipping == "adaptive-quantile"
    return ClientPlan(
        clipping_norm=privacy.clipping_norm,
        noise_multiplier=privacy.noise_multiplier,
        expected_clients=expected_clients,
        sample_rate=sample_rate,
        quantile=privacy.target_quantile if adaptive else None,
        quantile_noise_multiplier=privacy.quantile_noise_multiplier if adaptive else None,
        noise_at=privacy.noise_at,
        honest_clients=privacy.honest_clients,
    )


def client_event(privacy: ClientPrivacy, federation: FederationConfig) -> Event:
    """Return what one round releases under a configuration (a share of clients is Poisson-sampled)."""
    asked = federation.clients_per_round
    rate = asked if isinstance(asked, float) else None
    return client_plan(privacy, expected_clients=1.0, sample_rate=rate).event


@dataclass(frozen=True)
class ClippedUpdate:
    """SENSITIVE. One client's update with norm at most the bound, float64.

    Attributes:
        blocks: payload name to array, in the mode's update coordinates.
        bound: C; the norm is tangent plus Euclidean for extras.
        below: whether the norm was at most C before clipping (the quantile's bit).
    """

    blocks: Mapping[str, Float64]
    bound: float
    below: bool


class ClientMetric:
    """The norm of whole updates at one base point: tangent blocks jointly, everything else Euclidean."""

    def __init__(self, current: AdapterPayload) -> None:
        """Keep the frames of the base point (frames payloads), or none (lora_b payloads)."""
        self._current = current
        modules = current.modules if current.kind == "frames" else {}
        self._frames: dict[str, Frames] = {module: frames_of(current, module) for module in modules}

    def update_of(self, blocks: Blocks) -> dict[str, Float64]:
        """Return new - old in float64: tangent blocks made consistent, values minus current values."""
        update: dict[str, Float64] = {}
        for name, block in blocks.items():
            value = block.astype(np.float64)
            update[name] = value if self._frames else value - self._current.blocks[name]
        for module, frames in self._frames.items():
            update.update(_named(module, consistent_tangent(frames, tangent_of(update, module))))
        return update

    def norm(self, update: Mapping[str, Float64]) -> float:
        """Return the joint norm."""
        total, tangents = 0.0, set()
        for module, frames in self._frames.items():
            total += float(tangent_squared_norm(frames, tangent_of(update, module)))
            tangents |= {block_name(module, TANGENT_OUT), block_name(module, TANGENT_IN)}
        total += sum(float(np.vdot(block, block)) for name, block in update.items() if name not in tangents)
        return math.sqrt(max(total, 0.0))

    def clip(self, blocks: Blocks, bound: float) -> ClippedUpdate:
        """Scale an update down to norm `bound` where it is longer.

        Formal guarantee: the returned norm is at most bound (1 + 1e-12); zero stays zero.

        Raises:
            SensitivityMismatchError: if the norm is not finite (checked payloads cannot be).
        """
        update = self.update_of(blocks)
        norm = self.norm(update)
        if not math.isfinite(norm):
            raise SensitivityMismatchError("an update's norm is not finite; refuse it before it is clipped")
        factor = 1.0 if norm <= bound else bound / norm
        return ClippedUpdate({name: factor * block for name, block in update.items()}, bound, norm <= bound)

    def noise(
        self, names: Mapping[str, tuple[int, ...]], stddev: float, source: NormalSource
    ) -> dict[str, Float64]:
        """Draw noise that is isotropic in the metric: tangent noise with one shared core a module."""
        drawn: dict[str, Float64] = {}
        for module, frames in self._frames.items():
            parts = (frames.q_out.shape, frames.q_in.shape, frames.core.shape)
            out, inn, core = (torch.from_numpy(source.normal(tuple(shape))) for shape in parts)
            drawn.update(_named(module, tangent_noise_from_normals(frames, out, inn, core).scaled(stddev)))
        for name, shape in names.items():
            if name not in drawn:
                drawn[name] = stddev * source.normal(tuple(shape))
        return drawn


def _named(module: str, tangent: Tangent) -> dict[str, Float64]:
    return {
        block_name(module, TANGENT_OUT): tangent.x_out.numpy(),
        block_name(module, TANGENT_IN): tangent.x_in.numpy(),
    }


class ClientRelease:
    """One round's clipped sum; `release` is the only way out, and it noises.

    Args:
        plan: public constants (with this round's clipping norm).
        current: the base point.
        shapes: update block to shape (public), so that an empty round releases noise too.
    """

    def __init__(
        self, plan: ClientPlan, current: AdapterPayload, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Start at zero."""
        self._plan, self._metric, self._shapes = plan, ClientMetric(current), dict(shapes)
        self._sum: dict[str, Float64] = {name: np.zeros(shape) for name, shape in self._shapes.items()}
        self._bits, self._count = 0.0, 0

    def add(self, blocks: Blocks) -> None:
        """Clip one client's checked update and add it with weight one."""
        clipped = self._metric.clip(blocks, self._plan.clipping_norm)
        for name, block in clipped.blocks.items():
            self._sum[name] += block
        self._bits += BIT_SENSITIVITY if clipped.below else -BIT_SENSITIVITY
        self._count += 1

    def add_share(self, blocks: Blocks) -> None:
        """Add an update that its client has clipped and noised with its share itself."""
        for name, block in self._metric.update_of(blocks).items():
            self._sum[name] += block
        self._count += 1

    def release(self, source: NormalSource) -> tuple[dict[str, Float64], float]:
        """Noise the sum, divide by the public divisor, and adapt the clip.

        Returns: (mean update, next clipping norm), both PUBLIC.

        Raises:
            TooFewRepliesError: fewer answers than the honest ones that shares of noise assume.
        """
        plan = self._plan
        if plan.noise_at == "clients":
            if plan.honest_clients is None or self._count < plan.honest_clients:
                raise TooFewRepliesError(
                    f"{self._count} answers, but shares of noise assume {plan.honest_clients} honest ones "
                    "(privacy.honest_clients): nothing is released"
                )
            noised = self._sum
        else:
            noise = self._metric.noise(self._shapes, plan.noise_multiplier * plan.clipping_norm, source)
            noised = {name: block + noise[name] for name, block in self._sum.items()}
        mean = {name: block / plan.expected_clients for name, block in noised.items()}
        return mean, self._next_clip(source)

    def _next_clip(self, source: NormalSource) -> float:
        plan = self._plan
        if plan.quantile is None or plan.quantile_noise_multiplier is None:
            return plan.clipping_norm
        stddev = BIT_SENSITIVITY * plan.quantile_noise_multiplier
        noised = self._bits + stddev * float(source.normal(()))
        share = noised / plan.expected_clients + 0.5
        return plan.clipping_norm * math.exp(-QUANTILE_RATE * (share - plan.quantile))


def clip_and_share(
    payload: AdapterPayload, current: AdapterPayload, plan: ClientPlan, source: NormalSource
) -> AdapterPayload:
    """Run at a client when `noise_at` is clients: clip its update and add its share of the noise.

    Args:
        payload: SENSITIVE. The client's own update (lora_b values or tangent blocks).
        current: the global adapter it started from.
        plan: public constants, the same at every client.
        source: the client's own cryptographic noise.

    Returns: what it may hand to secure aggregation. Alone it has only 1/honest of the noise's variance.
    """
    metric = ClientMetric(current)
    clipped = metric.clip(payload.blocks, plan.clipping_norm)
    shapes = {name: block.shape for name, block in payload.blocks.items()}
    noise = metric.noise(shapes, plan.share_stddev, source)
    blocks = {}
    for name, block in clipped.blocks.items():
        value = block + noise[name] + (0.0 if current.kind == "frames" else current.blocks[name])
        blocks[name] = value.astype(np.float32)
    return replace(payload, blocks=blocks, notes={})
