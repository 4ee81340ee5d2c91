"""The YAML's schema: every key, its type and its range.

Models are frozen and strict: unknown keys, NaN, infinity, booleans for numbers and
open values are refused. No privacy parameter has a default. Rules that join several
sections live in `fedlora.config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedlora.config.fields import (
    Count,
    Delta,
    Name,
    NonNegative,
    Positive,
    Probability,
    Section,
)
from fedlora.config.schema_data import (
    AdapterConfig,
    ColumnPartition,
    DataConfig,
    DirichletPartition,
    EarlyStoppingConfig,
    FactorySource,
    FileSource,
    FilesPartition,
    FlwrPartition,
    HubSource,
    ModelConfig,
    PackageSource,
    Partition,
    PublicEvalConfig,
    QuantityPartition,
    Source,
    SqlSource,
)

__all__ = [
    "AdamConfig",
    "AdapterConfig",
    "AggregationConfig",
    "BudgetConfig",
    "ClientPrivacy",
    "ColumnPartition",
    "Count",
    "DataConfig",
    "Delta",
    "DeploymentConfig",
    "DerivedConfig",
    "DirichletPartition",
    "DpSgdMechanism",
    "EarlyStoppingConfig",
    "FactorMechanism",
    "FactorySource",
    "FedLoraConfig",
    "FederationConfig",
    "FileSource",
    "FilesPartition",
    "FlwrPartition",
    "HubSource",
    "LoraFaMechanism",
    "MechanismConfig",
    "ModelConfig",
    "Name",
    "NoMechanism",
    "NoPrivacy",
    "NoisyProjectionMechanism",
    "NonNegative",
    "OptimizerConfig",
    "PackageSource",
    "Partition",
    "Positive",
    "PrismMechanism",
    "PrivacyConfig",
    "Probability",
    "PublicEvalConfig",
    "QuantityPartition",
    "RayConfig",
    "RecordPrivacy",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "ServerOptimizerConfig",
    "SgdConfig",
    "SimulationConfig",
    "Source",
    "SqlSource",
    "TlsConfig",
    "TrackingConfig",
    "TrainingConfig",
]


class RunConfig(Section):
    """Who this run is and where its folder goes; the seed reaches data order and initialisation only."""

    name: Name
    seed: int = Field(ge=0, lt=2**63)
    dir: str = "runs/"


class NoMechanism(Section):
    """Ordinary LoRA on both factors, without clipping and noise on the client."""

    kind: Literal["none"]


class FactorMechanism(Section):
    """DP-LoRA on both factors, clipped jointly."""

    kind: Literal["factor"]


class LoraFaMechanism(Section):
    """DP-LoRA-FA: lora_A frozen and shared, lora_B trained; `per_layer_clip` clips each layer to C alone."""

    kind: Literal["lora_fa"]
    per_layer_clip: bool = False


class PrismMechanism(Section):
    """PRISM: clip and noise in the tangent space of the rank-r matrices."""

    kind: Literal["prism"]
    adaptivity: Literal["frames", "paper", "none"] = "frames"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)


class NoisyProjectionMechanism(Section):
    """Noisy projection M2: a fresh lora_A each step; an unprojected head has its own clip and noise."""

    kind: Literal["noisy_projection"]
    projection_source: Literal["client", "shared"]
    head_max_grad_norm: Positive | None = None
    head_noise_multiplier: Positive | None = None
    clipping: bool = True
    gradient_bound: Positive | None = None
    export_rank: Count | None = None
    rank_cap: Count | None = None


class DpSgdMechanism(Section):
    """DP-SGD on the full matrices of the target modules (baseline)."""

    kind: Literal["dp_sgd"]


MechanismConfig = Annotated[
    NoMechanism
    | FactorMechanism
    | LoraFaMechanism
    | PrismMechanism
    | NoisyProjectionMechanism
    | DpSgdMechanism,
    Field(discriminator="kind"),
]


class BudgetConfig(Section):
    """What one client may spend on one data set, over all runs."""

    epsilon: Positive
    delta: Delta
    on_exhausted: Literal["refuse", "fewer_steps"]
    window: Literal["lifetime", "calendar-year", "calendar-quarter", "calendar-month"] = "lifetime"


class NoPrivacy(Section):
    """An explicitly non-private run; reports say "no privacy"."""

    unit: Literal["none"]


class _PrivacyBase(Section):
    adjacency: Literal["add_or_remove", "replace_one"]
    target_epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    target_delta: Delta
    accountant: Literal["best", "pld", "rdp", "prv"] = "best"
    budget: BudgetConfig
    noise_source: Literal["os", "seeded-test-only"]


class RecordPrivacy(_PrivacyBase):
    """Record-level DP: noise on the client, the server is not trusted."""

    unit: Literal["record"]
    max_grad_norm: Positive
    group_weights: Literal["auto", "equal"] | dict[str, Positive] = "auto"
    group_by: str | None = None
    max_records_per_group: Count = 1


class ClientPrivacy(_PrivacyBase):
    """Client-level DP: whole updates are clipped to `clipping_norm`; noise at the server or in shares."""

    unit: Literal["client"]
    clipping_norm: Positive
    clipping: Literal["fixed", "adaptive-quantile"] = "fixed"
    target_quantile: float = Field(default=0.5, gt=0, lt=1)
    quantile_noise_multiplier: Positive | None = None
    noise_at: Literal["server", "clients"] = "server"
    honest_clients: Count | None = None


PrivacyConfig = Annotated[NoPrivacy | RecordPrivacy | ClientPrivacy, Field(discriminator="unit")]


class SgdConfig(Section):
    """Plain gradient descent, with momentum if it is above 0."""

    kind: Literal["sgd"]
    lr: Positive
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: NonNegative = 0.0


class AdamConfig(Section):
    """Adam on noised updates (post-processing)."""

    kind: Literal["adam"]
    lr: Positive
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0


OptimizerConfig = Annotated[SgdConfig | AdamConfig, Field(discriminator="kind")]


class ScheduleConfig(Section):
    """Learning-rate schedule over all local steps of the run."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)


class TrainingConfig(Section):
    """Local training; `sample_rate = expected_batch_size / nominal_records`, both public."""

    expected_batch_size: Count
    nominal_records: Count
    steps_per_round: Count | None = None
    epochs_per_round: Count | None = None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    micro_batch_size: Count | None = None
    proximal_mu: NonNegative = 0.0
    sampling: Literal["poisson", "shuffle"] = "poisson"

    @property
    def sample_rate(self) -> float:
        """Inclusion probability of each record in each step (public)."""
        return min(1.0, self.expected_batch_size / self.nominal_records)

    @property
    def local_steps(self) -> int:
        """Optimiser steps one client takes in one round (public)."""
        if self.steps_per_round is not None:
            return self.steps_per_round
        per_epoch = -(-self.nominal_records // self.expected_batch_size)
        return per_epoch * (self.epochs_per_round or 1)


class AggregationConfig(Section):
    """How updates become one adapter."""

    kind: Literal["mean_b", "tangent", "product", "stack", "aligned", "factor_mean"]
    rank: Count | None = None
    max_rank: Count | None = None
    weights: Literal["equal", "num_examples"] = "equal"
    robust: Literal["none", "trimmed", "median", "norm_bounded"] = "none"
    trim_fraction: float = Field(default=0.1, gt=0, lt=0.5)
    max_update_norm: Positive | None = None


class ServerOptimizerConfig(Section):
    """Server optimiser in the adapter's intrinsic coordinates."""

    kind: Literal["mean", "momentum", "adam"] = "mean"
    lr: Positive = 1.0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: Positive = 1e-3
    head_rates: Literal["auto"] | dict[str, Positive] = Field(default_factory=dict)


class FederationConfig(Section):
    """Rounds, client sampling, deadlines and aggregation."""

    rounds: Count
    members: tuple[Name, ...] | None = Field(default=None, min_length=1)
    clients_per_round: Literal["all"] | Count | Probability = "all"
    min_replies: Count
    round_timeout_seconds: Positive = 600.0
    aggregation: AggregationConfig
    server_optimizer: ServerOptimizerConfig = ServerOptimizerConfig()
    compression: Literal["none", "bf16", "int8"] = "none"
    secure_aggregation: bool = False
    max_payload_bytes: Count = 1_000_000_000


class RayConfig(Section):
    """Which Ray cluster to use; `address: null` starts one of our own."""

    address: str | None = None
    gpus_per_worker: NonNegative = 0.0
    connect_timeout_seconds: Positive = 20.0


class SimulationConfig(Section):
    """Workers of the simulation and clients trained together in one pass."""

    workers: Literal["auto"] | Count = "auto"
    cohort: Literal["auto"] | Count = "auto"
    threads_per_worker: Count = 1
    ray: RayConfig = RayConfig()


class TlsConfig(Section):
    """Certificates of the federation."""

    ca: str


class DeploymentConfig(Section):
    """Addresses of a real federation, who is expected, and how long the first round waits for them."""

    superlink: str = "127.0.0.1:8000"
    tls: TlsConfig = TlsConfig(ca="certs/ca.crt")
    expected_clients: Count | None = None
    startup_timeout_seconds: Positive = 900.0


class TrackingConfig(Section):
    """Optional experiment trackers."""

    tensorboard: bool = False
    mlflow: str | None = None
    wandb: str | None = None


class DerivedConfig(Section):
    """What resolving computed; written by fedlora, shown to the user, checked again by clients.

    `from_` tells which key the user gave; `epsilon` is the run's figure at `delta` for `total_steps`.
    """

    from_: Literal["target_epsilon", "noise_multiplier", "none"] = Field(alias="from")
    noise_multiplier: Positive | None = None
    epsilon: NonNegative | None = None
    delta: Delta | None = None
    sample_rate: Probability
    total_steps: Count
    accountant: str | None = None


class FedLoraConfig(Section):
    """One run, complete: the same file simulates and deploys it."""

    schema_: Literal[1] = Field(alias="schema")
    run: RunConfig
    model: ModelConfig
    adapter: AdapterConfig
    data: DataConfig
    mechanism: MechanismConfig
    privacy: PrivacyConfig
    training: TrainingConfig
    federation: FederationConfig
    simulation: SimulationConfig = SimulationConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    tracking: TrackingConfig = TrackingConfig()
    derived: DerivedConfig | None = None

    @property
    def seeded_noise(self) -> bool:
        """Whether noise and coins come from the test source: anybody can repeat them, and the run has no privacy."""
        return not isinstance(self.privacy, NoPrivacy) and self.privacy.noise_source == "seeded-test-only"

    @property
    def repeatable(self) -> bool:
        """Whether draws may be repeated from the seed: the test source, or no privacy that hangs on them."""
        return isinstance(self.privacy, NoPrivacy) or self.seeded_noise
