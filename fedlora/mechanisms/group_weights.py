"""Public clip weights for groups of parameters, chosen without private data.

One global clip over a trained head and the adapters lets the head eat the bound: a random r-dimensional
frame keeps about r/in + r/out of a layer's gradient energy, so tangents are small beside a classifier's
gradient. The cure is a weighted clip norm sqrt(sum_g w_g^2 ||g||^2) with noise sigma C / w_g for group g:
the same Gaussian mechanism in rescaled coordinates. This module says which w_g.

The rule. Let n_g be the root mean square of a record's gradient norm in group g, d_g the number of noised
coordinates, and s_g = w_g^2 n_g^2 / sum the group's share of the squared clip norm (sum_g s_g = 1). A clipped
record's signal in group g is at most C n_g / sqrt(sum w^2 n^2), the noise there has energy d_g sigma^2 C^2 /
w_g^2, so group g's noise-to-signal energy ratio is sigma^2 d_g / s_g. Minimising the sum over groups gives

    s_g proportional to sqrt(d_g),        w_g proportional to d_g^(1/4) / n_g,

which is Neyman's allocation. It depends neither on sigma nor on epsilon. Equal shares ignore that adapters have
50 times more coordinates; shares proportional to d_g (equal noise per coordinate) starve the head.

n_g is measured on public sequences (random tokens with random labels by default) through the same model, so no
private record is looked at and the weights cost no privacy. One thing must not be taken from the starting point: a new
head's weights are tiny there, and the adapters' gradients come through them, so they are small at first and grow
with the head. The weights hold for a whole run, so the measurement is made at a head as large as training leaves it:
rows scaled up (never down) until a feature aligned with one would give the logit 6 (`TRAINED_LOGIT`, `head_scale`).
Where no model runs, the adapters' norm follows from the layers' full gradient norms and the shapes
(`mechanism_energy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedlora.errors import PrivacyParameterError
from fedlora.geometry import tangent_dimension
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD
from fedlora.wire.payload import AdapterLayout, ModuleSpec


@dataclass(frozen=True)
class GroupRule:
    """PUBLIC. What the rule saw and decided, for the report.

    Attributes:
        weights: w_g, largest group of coordinates (the adapters, usually) at 1.
        shares: s_g that the rule aims at, summing to 1.
        norms: n_g on public sequences.
        dimensions: d_g.
        typical_norm: sqrt(sum w_g^2 n_g^2), the weighted norm of a public record: a data-free guide to
            max_grad_norm (in the weighted norm).
    """

    weights: Mapping[str, float]
    shares: Mapping[str, float]
    norms: Mapping[str, float]
    dimensions: Mapping[str, int]
    typical_norm: float


START_LOGIT = 2.0
"""Logit that a row of a head started at `typical` size gives to an aligned feature: neither undecided nor saturated."""

TRAINED_LOGIT = 6.0
"""The same for a head at the end of training: odds of 400 to 1 against each other label. Weights are measured there."""


def head_scale(row_norm: float, feature_norm: float, logit: float) -> float:
    """Return the factor >= 1 by which a head's matrix is scaled up so that an aligned feature gives `logit`.

    Args:
        row_norm: root mean square norm of the matrix's rows (one per output).
        feature_norm: root mean square norm of its inputs on public records.
        logit: one row times a feature in its direction, afterwards.

    Example:
        >>> head_scale(0.5, 1.0, START_LOGIT)
        4.0
    """
    reach = row_norm * feature_norm
    if not (reach > 0 and math.isfinite(reach)):
        return 1.0
    return max(1.0, logit / reach)


def neyman_weights(norms: Mapping[str, float], dimensions: Mapping[str, int]) -> GroupRule:
    """Return the rule's weights from public norms and dimensions.

    Args:
        norms: n_g >= 0, root mean square per-record gradient norm; a group with 0 (no signal at the start)
            is treated like the group with the smallest positive norm.
        dimensions: d_g >= 1, number of noised coordinates.

    Raises:
        PrivacyParameterError: if groups differ, a number is not finite, or every norm is 0.
    """
    if set(norms) != set(dimensions) or not norms:
        raise PrivacyParameterError(
            f"group weights: norms are for {sorted(norms)}, dimensions for {sorted(dimensions)}; give both for each"
        )
    if not all(math.isfinite(n) and n >= 0 for n in norms.values()) or not all(
        d >= 1 for d in dimensions.values()
    ):
        raise PrivacyParameterError(
            "group weights: public norms must be finite and >= 0, dimensions >= 1; set privacy.group_weights by hand"
        )
    positive = [n for n in norms.values() if n > 0]
    if not positive:
        raise PrivacyParameterError(
            "group weights: every public gradient norm is 0; set privacy.group_weights by hand"
        )
    floor = min(positive)
    used = {g: (n if n > 0 else floor) for g, n in norms.items()}
    total = sum(math.sqrt(d) for d in dimensions.values())
    shares = {g: math.sqrt(dimensions[g]) / total for g in norms}
    raw = {g: math.sqrt(shares[g]) / used[g] for g in norms}
    largest = max(dimensions, key=lambda g: (dimensions[g], g))
    weights = {g: round_significant(w / raw[largest]) for g, w in raw.items()}
    typical = math.sqrt(sum((weights[g] * used[g]) ** 2 for g in norms))
    return GroupRule(weights, shares, dict(norms), dict(dimensions), typical)


def round_significant(value: float, digits: int = 3) -> float:
    """Return the value with a few significant digits, so that devices' rounding does not reach the config."""
    return float(f"{value:.{digits - 1}e}")


def mechanism_energy(kind: str, spec: ModuleSpec, squared_norm: float) -> float:
    """Return E of a record's squared gradient norm in a mechanism's coordinates for one module at the start.

    Args:
        kind: mechanism kind.
        spec: the module's shape.
        squared_norm: mean over public records of ||G||_F^2, G the full gradient of the layer's weight.

    Returns:
        lora_fa, factor (B = 0): scaling^2 ||G||^2, as E A^T A = I. prism: the share that a random pair of
        frames keeps, r/in + r/out - r^2/(in out). Others: ||G||^2.
    """
    r, inp, out = spec.rank, spec.in_features, spec.out_features
    if kind == "prism":
        return squared_norm * (r / inp + r / out - r * r / (inp * out))
    if kind in ("lora_fa", "factor"):
        return squared_norm * spec.scaling**2
    return squared_norm


def mechanism_dimension(kind: str, spec: ModuleSpec) -> int:
    """Return the number of noised coordinates of one module in a mechanism's coordinates."""
    r, inp, out = spec.rank, spec.in_features, spec.out_features
    if kind == "prism":
        return tangent_dimension(out, inp, r)
    if kind == "factor":
        return r * (out + inp)
    if kind in ("lora_fa", "noisy_projection"):
        return r * out
    return out * inp


def weights_for(
    kind: str, layout: AdapterLayout, module_squared_norms: Mapping[str, float], head_squared_norm: float
) -> GroupRule:
    """Return the rule for a layout with the groups `adapters` and, if something else is trained, `head`.

    Args:
        kind: mechanism kind.
        layout: shapes.
        module_squared_norms: module path to mean ||G||_F^2 on public records.
        head_squared_norm: mean squared gradient norm over all extra parameters together.
    """
    energy = sum(mechanism_energy(kind, s, module_squared_norms[m]) for m, s in layout.modules.items())
    norms = {GROUP_ADAPTERS: math.sqrt(energy)}
    dimensions = {GROUP_ADAPTERS: sum(mechanism_dimension(kind, s) for s in layout.modules.values())}
    if layout.extra:
        norms[GROUP_HEAD] = math.sqrt(head_squared_norm)
        dimensions[GROUP_HEAD] = sum(math.prod(shape) for shape in layout.extra.values())
    return neyman_weights(norms, dimensions)
