"""Rules on the run's sizes, names, data and addresses; those on privacy stand in `fedlora.config.rules`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fedlora.addresses import host_and_port
from fedlora.config.problems import Problem
from fedlora.config.rule_view import Rule, View

MOST_STEPS: Final = 10**12
"""Most steps that the accountants take in one run of a client."""


def federation_sizes(v: View) -> Iterator[Problem]:
    """Numbers of clients and replies must be reachable."""
    clients = v("federation.clients_per_round", "all")
    count = clients if isinstance(clients, int) and not isinstance(clients, bool) else None
    total = v.number("data.partition.clients")
    replies = v.number("federation.min_replies")
    if count is not None and replies is not None and replies > count:
        text = f"is above federation.clients_per_round ({count}); no round could ever finish"
        yield Problem("federation.min_replies", text)
    if total is not None and count is not None and count > total:
        text = f"is above data.partition.clients ({total:.0f})"
        yield Problem("federation.clients_per_round", text)
    if total is not None and replies is not None and replies > total:
        text = f"is above data.partition.clients ({total:.0f}); no round could ever finish"
        yield Problem("federation.min_replies", text)


def steps_of_the_run(v: View) -> Iterator[Problem]:
    """Rounds and local steps together stay countable: every step of a client is accounted."""
    rounds = v.number("federation.rounds")
    steps = v.number("training.steps_per_round")
    if steps is None and (batch := v.number("training.expected_batch_size")):
        records, epochs = v.number("training.nominal_records", 0), v.number("training.epochs_per_round", 1)
        steps = (epochs or 1) * (records or 0) / batch
    if rounds is not None and steps is not None and rounds * steps > MOST_STEPS:
        text = f"with {steps:.3g} local steps a round gives {rounds * steps:.3g} steps; allowed are "
        yield Problem("federation.rounds", f"{text}{MOST_STEPS:.0e} in all")


def member_rules(v: View) -> Iterator[Problem]:
    """A group's members are distinct and enough; a frozen head is not trained by another name."""
    members, least = v("federation.members"), v.number("federation.min_replies")
    if isinstance(members, list | tuple):
        if len(set(map(str, members))) != len(members):
            yield Problem("federation.members", "names a client twice; name each once")
        if least is not None and least > len(members):
            text = f"is above the number of federation.members ({len(members)}); lower it"
            yield Problem("federation.min_replies", text)
    if v("adapter.freeze_head") is True and v("adapter.modules_to_save", []):
        yield Problem(
            "adapter.modules_to_save", "names trained modules, but adapter.freeze_head is true; set []"
        )


def aggregation_keys(v: View) -> Iterator[Problem]:
    """Keys of the aggregation that only some kinds read."""
    for key in ("rank", "max_rank"):
        if v(f"federation.aggregation.{key}") is not None and v.aggregation in {
            "mean_b",
            "tangent",
            "factor_mean",
        }:
            text = f"has no effect on {v.aggregation}; remove it or use product or stack"
            yield Problem(f"federation.aggregation.{key}", text)
    robust = v("federation.aggregation.robust", "none")
    limit = v("federation.aggregation.max_update_norm") is not None
    if robust == "norm_bounded" and not limit:
        yield Problem("federation.aggregation.max_update_norm", "missing; norm_bounded needs the bound")
    if limit and robust != "norm_bounded":
        text = "has no effect unless federation.aggregation.robust is norm_bounded; remove it"
        yield Problem("federation.aggregation.max_update_norm", text)
    if v.aggregation == "stack" and v("federation.server_optimizer.kind", "mean") != "mean":
        text = "needs coordinates of one size; stack grows them each round, so use mean (or product)"
        yield Problem("federation.server_optimizer.kind", text)


def public_eval_choice(v: View) -> Iterator[Problem]:
    """Public evaluation records come from exactly one place."""
    if v("data.public_eval") is None:
        return
    given = [key for key in ("split", "source", "fraction") if v(f"data.public_eval.{key}") is not None]
    if len(given) != 1:
        text = f"give exactly one of split, source and fraction (got {', '.join(given) or 'none'})"
        yield Problem("data.public_eval", text)


def evaluation_is_not_on_private_records(v: View) -> Iterator[Problem]:
    """Records that train under privacy are no public ones: what they evaluate to is printed, without noise.

    Without a partition clients' records stand in the sites' own files, not in `data.source`.
    """
    simulated = v("data.partition") is not None
    if not simulated or v.unit in ("", "none") or v("data.marked_public") is True:
        return
    text = "names the records that are trained on; their losses would be printed without noise, under no epsilon. "
    advice = "Name other records, or set data.marked_public where all of them are public"
    own, other = v("data.source"), v("data.public_eval.source")
    split = v("data.public_eval.split")
    if split is not None and split in ("all", v("data.source.split", "train")):
        yield Problem("data.public_eval.split", text + advice)
    if isinstance(own, Mapping) and isinstance(other, Mapping) and _share_records(own, other):
        yield Problem("data.public_eval.source", text + advice)


def _share_records(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if own.get("kind") == other.get("kind") == "file":
        paths, others = own.get("paths"), other.get("paths")
        if not (isinstance(paths, list | tuple) and isinstance(others, list | tuple)):
            return False
        return not {str(one) for one in paths}.isdisjoint(str(one) for one in others)
    return dict(own) == dict(other)


def keys_of_the_task(v: View) -> Iterator[Problem]:
    """Keys that only tasks with prompts read."""
    task = v("model.task")
    if v("data.on_overlong") == "truncate_prompt" and task != "instruction":
        text = f"truncate_prompt keeps a response, which {task} does not have; use truncate_end or refuse"
        yield Problem("data.on_overlong", text)
    if v("data.public_eval.answers") is not None and task not in {"instruction", "seq2seq"}:
        yield Problem(
            "data.public_eval.answers", f"has no effect on {task}, which generates nothing; remove it"
        )


def label_count(v: View) -> Iterator[Problem]:
    """The label names are distinct, at least two, and as many as the number of labels."""
    names, count = v("data.labels"), v.number("model.num_labels")
    if not isinstance(names, list | tuple):
        return
    if len(set(map(str, names))) != len(names):
        yield Problem("data.labels", "names a label twice; name each once")
    if len(names) < 2 and count != 1:
        text = "a classifier needs two names at least (model.num_labels: 1 is a regression, without names)"
        yield Problem("data.labels", text)
    if count is not None and count != len(names):
        text = f"is {count:.0f}, but data.labels names {len(names)}; leave one of the two out"
        yield Problem("model.num_labels", text)


def quantization_package(v: View) -> Iterator[Problem]:
    """A quantised base needs its package, and says so before anything is loaded."""
    kind = v("model.quantization")
    if kind is not None and importlib.util.find_spec("bitsandbytes") is None:
        text = f"{kind} needs the package bitsandbytes, which is not installed here; install it "
        yield Problem("model.quantization", text + "(pip install bitsandbytes) or set quantization to null")


def server_address(v: View) -> Iterator[Problem]:
    """The server's address is host:port."""
    address = v("deployment.superlink")
    if isinstance(address, str) and host_and_port(address) is None:
        yield Problem("deployment.superlink", f"got {address!r}; give host:port, with a port below 65536")


RUN_RULES: tuple[Rule, ...] = (
    federation_sizes,
    steps_of_the_run,
    member_rules,
    aggregation_keys,
    public_eval_choice,
    evaluation_is_not_on_private_records,
    keys_of_the_task,
    label_count,
    quantization_package,
    server_address,
)
