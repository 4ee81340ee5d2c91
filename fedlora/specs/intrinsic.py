"""The intrinsic mode: a conditional analysis of noise-free specifications, refused wherever a condition fails.

"PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Theorem 3.5 and Remark 3.6. In
a federation lora_A follows from a public seed, so the conditions never hold there: by Proposition 3.7 the release then
has no finite epsilon. The figure is for study; it cannot be charged, and no dock accepts it as a guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from fedlora.accounting import EpsilonReport, PaveEvent, PaveLayer, epsilon_of
from fedlora.errors import UnsupportedEventError
from fedlora.specs.types import PrivacyStatement

_ADVICE: Final = "Use the certified mode (lora_fa with per_layer_clip and noise), or state 'none'"

_VIOLATED: Final = {
    "lora_a_secret": "lora_A is public, so lora_B = F(D) lora_A^T can be tested (Proposition 3.7)",
    "seed_secret": "the seed of lora_A is public and gives lora_A (Proposition 3.7)",
    "product_secret": "the product lora_B lora_A, or a model with it, is public (Remark 3.6)",
    "lora_a_gaussian": "lora_A is not drawn from N(0, 1/r), independently of the data (Theorem 3.5)",
    "query_independent_of_lora_a": "the query depends on lora_A: several adaptive steps (Remark 3.6)",
    "common_subspace": "there is no fixed public subspace that holds every query (Eq. 18)",
    "covariance_positive_definite": "the covariance can degenerate in the subspace (Eq. 21)",
    "covariance_stable": "no gamma < 1 bounds the change of the covariance for all neighbours (Eq. 21)",
    "released_once": "several specifications come from one lora_A and are not stacked (Lemma 7.13)",
}


@dataclass(frozen=True, kw_only=True)
class IntrinsicConditions:
    """What Theorem 3.5 assumes, each to be stated by whoever asks for the figure; there are no defaults.

    Attributes:
        lora_a_secret: the realised lora_A never leaves its owner.
        seed_secret: neither does anything that reproduces it.
        product_secret: neither lora_B lora_A nor a predictor made with it is released.
        lora_a_gaussian: entries N(0, 1/r), drawn independently of the data.
        query_independent_of_lora_a: one step, or a trajectory decoupled from lora_A.
        common_subspace: every query lies in one fixed, public subspace.
        covariance_positive_definite: the query's covariance is positive definite there, for every data set.
        covariance_stable: the stated gamma holds for every ordered pair of neighbours.
        released_once: one release per lora_A, or all of them stacked into one query.
    """

    lora_a_secret: bool
    seed_secret: bool
    product_secret: bool
    lora_a_gaussian: bool
    query_independent_of_lora_a: bool
    common_subspace: bool
    covariance_positive_definite: bool
    covariance_stable: bool
    released_once: bool

    def violated(self) -> tuple[str, ...]:
        """Return why the theorem does not apply, one sentence per condition that is not stated to hold."""
        return tuple(_VIOLATED[one.name] for one in fields(self) if getattr(self, one.name) is not True)


def analyse_intrinsic(
    conditions: IntrinsicConditions, layers: Sequence[PaveLayer], delta: float
) -> EpsilonReport:
    """Return what a noise-free specification would guarantee if its conditions held; never a guarantee.

    Args:
        conditions: every one must hold.
        layers: rank, subspace dimension and gamma of each layer.
        delta: in (0, 1).

    Raises:
        UnsupportedEventError: naming each condition that fails.
    """
    violated = conditions.violated()
    if violated:
        raise UnsupportedEventError(f"the intrinsic analysis is refused: {'; '.join(violated)}. {_ADVICE}")
    return epsilon_of(PaveEvent(tuple(layers)), delta, adjacency="replace_one")


def refuse_intrinsic(privacy: PrivacyStatement, *, recipe_public: bool, expanded_released: bool) -> None:
    """Refuse a conditional statement wherever its secrecy condition cannot hold.

    Raises:
        UnsupportedEventError: if a conditional statement meets a public lora_A, seed or product.
    """
    if privacy.guarantee == "conditional" and (recipe_public or expanded_released):
        what = "lora_A or its seed" if recipe_public else "the product lora_B lora_A"
        raise UnsupportedEventError(
            f"the intrinsic guarantee needs a secret lora_A, but {what} is public: the release has no privacy. "
            f"{_ADVICE}"
        )
