"""The secret Gaussian sketch: Lemmas 7.1 and 7.2, Corollary 7.3 and both conversions.

"LoRA Provides Differential Privacy by Design via Random Sketching". A conditional analysis: the sketching matrix must
stay secret. The lemma's last step calls the product with A a post-processing of the sketch, which fails because A is
the mechanism's own secret; and for more than one step the query depends on A. The inequality in its Eq. 43 is
printed the
wrong way round; the bound itself stands.
"""

from __future__ import annotations

import math

from fedlora.accounting import _checks
from fedlora.accounting.conditional import SketchEvent


def gamma_of_sketch(eigenvalue: float, noise_ratio: float, norm: float, sensitivity: float) -> float:
    """Return Lemma 7.1's Gamma = (lambda + sigma_g^2 / sigma_A^2) / (2 B_F B_S).

    Args:
      eigenvalue: lower bound lambda on the smallest eigenvalue of Q Q^T, > 0.
      noise_ratio: sigma_g^2 / sigma_A^2, >= 0.
      norm: B_F >= ||Q||_F.
      sensitivity: B_S >= ||Q(D) - Q(D')||_F.
    """
    top = _checks.real("eigenvalue", eigenvalue, above=0.0) + _checks.real(
        "noise_ratio", noise_ratio, at_least=0.0
    )
    return top / (
        2.0 * _checks.real("norm", norm, above=0.0) * _checks.real("sensitivity", sensitivity, above=0.0)
    )


def gamma_of_lora(
    eigenvalue: float,
    noise_std: float,
    rank: int,
    learning_rate: float,
    smoothness: float,
    batch_size: int,
    gradient_norm: float,
    steps: int,
) -> float:
    """Return Lemma 7.2's Gamma = (eta beta / 4) b (lambda + r sigma_g^2) / (C^2 T ((1 + eta beta)^T - 1))."""
    rate = _checks.real("learning_rate", learning_rate, above=0.0) * _checks.real(
        "smoothness", smoothness, above=0.0
    )
    top = _checks.real("eigenvalue", eigenvalue, above=0.0)
    top += _checks.integer("rank", rank) * _checks.real("noise_std", noise_std, at_least=0.0) ** 2
    count = _checks.integer("steps", steps)
    growth = math.expm1(min(count * math.log1p(rate), 700.0))
    bound = _checks.real("gradient_norm", gradient_norm, above=0.0) ** 2 * count * growth
    return rate / 4.0 * _checks.integer("batch_size", batch_size) * top / bound


def truncated_cdp(event: SketchEvent) -> tuple[float, float] | None:
    """Return Corollary 7.3's (rho, omega) = (r L n / (2 Gamma^2), 2 Gamma / 5), or None unless Gamma > 5/2."""
    if not event.gamma > 2.5:
        return None
    return event.rank * event.layers * event.tau / (2.0 * event.gamma**2), 2.0 * event.gamma / 5.0


def epsilon_of_truncated_cdp(rho: float, omega: float, delta: float) -> float:
    """Return Proposition 4.4's epsilon; both cases (the paper's summary after Corollary 7.3 leaves out the second)."""
    log_inverse = -math.log(_checks.delta(delta))
    if log_inverse <= (omega - 1.0) ** 2 * rho:
        return rho + 2.0 * math.sqrt(rho * log_inverse)
    return rho * omega + log_inverse / (omega - 1.0) if omega > 1.0 else math.inf


def alternatives(event: SketchEvent, delta: float) -> dict[str, float]:
    """Return Corollary 7.3 with Proposition 4.4, where it applies."""
    pair = truncated_cdp(event)
    return {} if pair is None else {"corollary_7_3_proposition_4_4": epsilon_of_truncated_cdp(*pair, delta)}
