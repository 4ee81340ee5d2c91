"""Events of noise-free or unverifiable analyses: they can be evaluated, never charged.

With the projection known, or with the product of both factors released, a noise-free low-rank update has no finite
epsilon ("LoRA and Privacy: When Random Projections Help (and When They Don't)", Proposition 2; "PAVE Specifications of
Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Proposition 3.7). In a federation the server and every
client know the projection, so these figures hold only under the conditions that each event lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedlora.accounting import _checks
from fedlora.accounting.events import Event, _set
from fedlora.errors import PrivacyParameterError

_UNSEEN = (
    "the projection is secret: never released, not derivable from a seed, and no product with it is released"
)
_INDEPENDENT = (
    "the projected query does not depend on the projection (one step, or a trajectory decoupled from it)"
)


@dataclass(frozen=True)
class VectorProjectionEvent(Event):
    """The noise-free projection of one unit vector ("LoRA and Privacy", Definition 1, Theorem 1).

    Attributes:
      width: d >= 2.
      rank: r, 1 <= r <= d.
      alignment: smallest inner product rho of the unit queries of neighbouring data sets, in (-1, 1].
    """

    width: int
    rank: int
    alignment: float
    kind: ClassVar[str] = "vector_projection"
    chargeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate."""
        width = _checks.integer("width", self.width, at_least=2)
        _set(
            self,
            width=width,
            rank=_checks.integer("rank", self.rank, at_most=width),
            alignment=_checks.real("alignment", self.alignment, above=-1.0, at_most=1.0),
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """Secrecy, independence, unit norm, alignment, one vector."""
        return (
            _UNSEEN,
            _INDEPENDENT,
            "the query is one vector of norm 1 (a matrix of two or more rows has no finite epsilon)",
            f"neighbouring queries have an inner product of at least {self.alignment:.9g}",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"kind": self.kind, "width": self.width, "rank": self.rank, "alignment": self.alignment}


@dataclass(frozen=True)
class M1Event(Event):
    """M V + Xi with a secret Wishart M ("LoRA and Privacy", Definition 3 (M1), Theorems 3 and 4).

    Attributes:
      width: d, length of a column.
      rank: r, degrees of freedom of M.
      span: dimension s of the span of the unchanged columns, 0 <= s < d.
      alignment: lower bound on the alignment of the changed column's parts outside that span, in (0, 1].
      residual: norm beta of those parts, in [0, 1].
      column_distance: bound on ||v - v'|| of a changed column, in (0, 2].
      noise_std: standard deviation of Xi's entries, >= 0 (columns have norm 1).
      changed_columns: number k of columns that differ.
    """

    width: int
    rank: int
    span: int
    alignment: float
    residual: float
    column_distance: float
    noise_std: float
    changed_columns: int = 1
    kind: ClassVar[str] = "m1"
    chargeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate."""
        width = _checks.integer("width", self.width, at_least=2)
        _set(
            self,
            width=width,
            rank=_checks.integer("rank", self.rank, at_most=width),
            span=_checks.integer("span", self.span, at_least=0, at_most=width - 1),
            alignment=_checks.real("alignment", self.alignment, above=0.0, at_most=1.0),
            residual=_checks.real("residual", self.residual, at_least=0.0, at_most=1.0),
            column_distance=_checks.real("column_distance", self.column_distance, above=0.0, at_most=2.0),
            noise_std=_checks.real("noise_std", self.noise_std, at_least=0.0),
            changed_columns=_checks.integer("changed_columns", self.changed_columns),
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """Secrecy, independence and the adjacency's alignment parameters."""
        return (
            _UNSEEN,
            _INDEPENDENT,
            "every column has norm 1 and neighbouring inputs satisfy Definition 4 with the stated alignment, residual "
            "norm, span and column distance (properties of the data that training cannot verify)",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = (
            "width",
            "rank",
            "span",
            "alignment",
            "residual",
            "column_distance",
            "noise_std",
            "changed_columns",
        )
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class SketchEvent(Event):
    """A secret Gaussian sketch ("LoRA Provides Differential Privacy by Design via Random Sketching", Lemma 7.2).

    Attributes:
      rank: r, columns of the sketch.
      tau: rank bound tau of the covariance difference, at most the out-width n.
      gamma: the ratio Gamma > 1 of the smallest eigenvalue (noise included) to the covariance sensitivity.
      layers: L independent layers.
    """

    rank: int
    tau: int
    gamma: float
    layers: int = 1
    kind: ClassVar[str] = "sketch"
    chargeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate."""
        _set(
            self,
            rank=_checks.integer("rank", self.rank),
            tau=_checks.integer("tau", self.tau),
            gamma=_checks.real("gamma", self.gamma, above=1.0),
            layers=_checks.integer("layers", self.layers),
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """Secrecy, independence (one step), eigenvalue bound, smoothness."""
        return (
            _UNSEEN,
            "only lora_B is released, once; after more than one step the query depends on the projection and the "
            "proof fails",
            "the smallest eigenvalue of the query's Gram matrix has the stated lower bound for every data set",
            "the loss is smooth and every record's gradient has the stated norm bound",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "rank": self.rank,
            "tau": self.tau,
            "gamma": self.gamma,
            "layers": self.layers,
        }


@dataclass(frozen=True)
class PaveLayer:
    """One layer of a PAVE specification.

    Attributes:
      rank: r >= 1.
      dimension: k, dimension of the public subspace (of the stacked query for specifications that share A).
      gamma: covariance stability in [0, 1).
    """

    rank: int
    dimension: int
    gamma: float

    def __post_init__(self) -> None:
        """Validate."""
        set_ = object.__setattr__
        set_(self, "rank", _checks.integer("rank", self.rank))
        set_(self, "dimension", _checks.integer("dimension", self.dimension))
        set_(self, "gamma", _checks.real("gamma", self.gamma, at_least=0.0, below=1.0))


@dataclass(frozen=True)
class PaveEvent(Event):
    """A noise-free compact PAVE specification ("PAVE Specifications of Learnwares ...", Theorem 3.5, Lemma 7.12).

    Attributes:
      layers: independent layers; several specifications from one A are one layer of the stacked query (Lemma 7.13).
    """

    layers: tuple[PaveLayer, ...]
    kind: ClassVar[str] = "pave"
    chargeable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate."""
        layers = tuple(self.layers)
        if not layers or not all(isinstance(layer, PaveLayer) for layer in layers):
            raise PrivacyParameterError("layers: got none or other types, allowed is at least one PaveLayer")
        _set(self, layers=layers)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Secrecy, independence, common support, covariance stability."""
        return (
            _UNSEEN,
            _INDEPENDENT,
            "the query lies in a fixed public subspace and its covariance is positive definite",
            "covariance stability holds with the stated gamma for every ordered pair of neighbouring data sets",
            "neighbours differ by replacing one record",
            "layers use independent projections; specifications from one projection are stacked into one layer",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        layers = [{"rank": x.rank, "dimension": x.dimension, "gamma": x.gamma} for x in self.layers]
        return {"kind": self.kind, "layers": layers}

    @classmethod
    def _parse(cls, fields: Mapping[str, Any]) -> Event:
        rest = {name: value for name, value in fields.items() if name != "layers"}
        return cls(layers=tuple(PaveLayer(**layer) for layer in fields["layers"]), **rest)
