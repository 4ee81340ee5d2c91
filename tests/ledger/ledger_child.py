"""A client in a process of its own, which can be killed at every boundary of the order of things.

Usage: ledger_child.py LEDGER LOG ROUNDS POINT ROUND

It plays rounds 1..ROUNDS: reserve, draw noise for each step, keep the reply, commit, send. LOG is
the release log that the tests keep outside the ledger: a line is written and synced at the moment
noise is drawn ("noise <round> <step> <value>") and when bytes leave ("send <round> <digest>").
At POINT of round ROUND the process kills itself with SIGKILL.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any

from ledger_helpers import BUDGET, EVENT, SECRET, SITE

from fedlora.errors import DuplicateRoundError
from fedlora.ledger import Ledger, ReserveRequest, open_ledger
from fedlora.ledger.anchor import Anchor
from fedlora.ledger.journal import Journal
from fedlora.ledger.replies import ReplyStore

STEPS = 3
POINTS = (
    "before-reserve",
    "reserve:before-insert",
    "reserve:after-insert",
    "reserve:before-anchor",
    "reserve:after-anchor",
    "after-reserve",
    "noise-1",
    "noise-2",
    "noise-3",
    "reply:before",
    "reply:after",
    "commit:before-insert",
    "commit:after-insert",
    "commit:before-anchor",
    "commit:after-anchor",
    "after-commit",
    "after-send",
)


def die() -> None:
    """Kill this process as the operating system would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Log:
    """The release log outside the ledger."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class Killer:
    """Wraps the ledger's own functions, so that points inside a transaction can be hit."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.armed = False
        self.phase = ""
        self._wrap(Journal, "_insert", "insert", static=True)
        self._wrap(Anchor, "write", "anchor")
        self._wrap(ReplyStore, "store", "")

    def at(self, point: str) -> None:
        if self.armed and point == self.point:
            die()

    def _wrap(self, owner: type, name: str, label: str, *, static: bool = False) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*values: Any, **more: Any) -> Any:
            self.at(f"{self.phase}:before{'-' + label if label else ''}")
            result = original(*values, **more)
            self.at(f"{self.phase}:after{'-' + label if label else ''}")
            return result

        setattr(owner, name, staticmethod(wrapped) if static else wrapped)


def play_round(ledger: Ledger, log: Log, killer: Killer, number: int) -> None:
    """Play one round, or send the kept reply of a round that ran before."""
    killer.at("before-reserve")
    killer.phase = "reserve"
    try:
        reservation = ledger.reserve_one(ReserveRequest(SITE, BUDGET, "run-1", number, EVENT, STEPS))
    except DuplicateRoundError as error:
        reply = ledger.load_reply(SITE, "run-1", number)
        if reply is not None:
            log.write(f"send {number} {error.reply_digest} {reply.hex()}")
        return
    killer.phase = ""
    ledger.mark_started([reservation])
    killer.at("after-reserve")
    reply = b""
    for step in range(1, STEPS + 1):
        value = secrets.token_bytes(8)
        log.write(f"noise {number} {step} {value.hex()}")
        reply += value
        killer.at(f"noise-{step}")
    killer.phase = "reply"
    digest = ledger.store_reply(reservation, reply)
    killer.phase = "commit"
    ledger.commit([(reservation, STEPS, EVENT, digest)])
    killer.phase = ""
    killer.at("after-commit")
    log.write(f"send {number} {digest} {reply.hex()}")
    killer.at("after-send")


def main(location: str, log_path: str, rounds: str, point: str, at_round: str) -> None:
    """Play all rounds."""
    killer, log = Killer(point), Log(log_path)
    with open_ledger(location, secret=SECRET) as ledger:
        sys.stdout.write("open\n")
        sys.stdout.flush()
        for number in range(1, int(rounds) + 1):
            killer.armed = number == int(at_round)
            play_round(ledger, log, killer, number)


if __name__ == "__main__":
    main(*sys.argv[1:6])
