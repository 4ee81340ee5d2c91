"""Data: sources, records, partitions and tasks.

```
rows   = load_rows(config.data)                                   # SENSITIVE, lazy
names  = label_names(config.model, config.data, rows)             # PUBLIC
base   = load_base(config.model, len(names) if names else None)   # fedlora.adapters.models
task   = build_task(config.model, config.data, base.tokenizer, names)
shares = partition_rows(rows, config.data.partition, config.run.seed)
```
"""

from fedlora.data.fitting import check_records
from fedlora.data.labels import check_columns, label_names
from fedlora.data.partition import bound_groups, check_disjoint, partition_rows
from fedlora.data.rows import Origin, Row, Rows
from fedlora.data.sources import load_rows, public_eval_rows
from fedlora.data.splits import split_validation
from fedlora.data.tasks import build_task
from fedlora.data.tasks.base import Encoded, EncodedRows, EncodeReport, Task, encode_report

__all__ = [
    "EncodeReport",
    "Encoded",
    "EncodedRows",
    "Origin",
    "Row",
    "Rows",
    "Task",
    "bound_groups",
    "build_task",
    "check_columns",
    "check_disjoint",
    "check_records",
    "encode_report",
    "label_names",
    "load_rows",
    "partition_rows",
    "public_eval_rows",
    "split_validation",
]
