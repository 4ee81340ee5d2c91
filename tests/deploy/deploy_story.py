"""Ten rounds and more of three sites in network namespaces, with every fault once; told step by step."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy_helpers import Federation, wait_for, whole_records, write_model
from deploy_netns import Door, Network, SlowWire

from fedlora.cli import pki
from fedlora.cli.keyring import AllowList
from fedlora.ledger import Account, load_secret, open_ledger

ROUNDS = 30  # more than the steps take: how many rounds pass during one depends on the machine
DEADLINE = float(os.environ.get("FEDLORA_TEST_DEADLINE", "45"))
"""The stragglers' deadline; raise it where the machine is busy."""
SITES = ("site-a", "site-b", "site-c")
BRIEF = 6 * DEADLINE
"""Bound of everything that is waited for, in seconds; machines that run tests are slow."""


class Pushes:
    """Reads in a SuperNode's log whether the reply of a round is on its way or was acknowledged."""

    def __init__(self, log: Path) -> None:
        self._log, self._start = log, 0

    def _parts(self) -> list[str]:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return text.split("Sending: train")

    def begin(self) -> None:
        """Look at the next reply only."""
        self._start = len(self._parts())

    def begun(self) -> bool:
        """Return whether the reply is on its way or was sent."""
        return len(self._parts()) > self._start

    def sent(self) -> bool:
        """Return whether the reply was acknowledged."""
        return self.begun() and "Sent successfully" in self._parts()[-1]


class LastPush:
    """Says when the SuperLink has every part of the only reply that is on its way.

    A reply that was cut off before keeps its missing parts in the database: they were there when this one was made.
    """

    def __init__(self, database: Path, pushes: Pushes) -> None:
        self._place, self._pushes, self._seen = f"file:{database}?mode=ro", pushes, False
        self._left = self._missing()

    def _missing(self) -> int:
        with contextlib.closing(sqlite3.connect(self._place, uri=True, timeout=10)) as connection:
            return int(connection.execute("select count(*) from object_push_session_pending").fetchone()[0])

    def __call__(self) -> bool:
        """Return whether parts were missing and none is any more."""
        missing = self._missing() - self._left
        self._seen = self._seen or missing > 0
        return self._pushes.begun() and self._seen and missing <= 0


class Story:
    """The federation, its network, and one method for each fault."""

    def __init__(self, root: Path) -> None:
        self.network = Network()
        self.facts: dict[str, Any] = {}
        address = self.network.add("server")
        for site in SITES:
            self.network.add(site)
        self.made = made = Federation(root, rounds=ROUNDS, timeout=DEADLINE, sites=SITES, replies=2).make()
        pki.issue_server(root / "certs", ["localhost", "127.0.0.1", address], replace=True)
        self.address = (address, made.port)
        write_model(root / "other-model", seed=1)
        self._small_disk(root / "site-b" / "disk")
        self.wires = {site: SlowWire(self.network.space(site), self.address) for site in ("site-a", "site-c")}
        places = {site: made.place(site) for site in ("site-a", "site-c")}
        self.doors = {site: Door(place / "g", place / "s") for site, place in places.items()}
        self.door = self.doors["site-a"]
        self.pushes = Pushes(root / "site-a" / "state" / "supernode.log")

    def _small_disk(self, folder: Path) -> None:
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
        site = folder.parent / "site.yaml"
        site.write_text(site.read_text().replace("ledger: {url: ledger.db", "ledger: {url: disk/ledger.db"))

    def close(self) -> None:
        """End and remove everything."""
        for door in self.doors.values():
            door.close()
        self.made.stop()
        for wire in self.wires.values():
            wire.close()
        subprocess.run(["umount", str(self.made.root / "site-b" / "disk")], check=False)
        self.network.close()

    # -- parts -------------------------------------------------------------------------------------

    def server(self, name: str, *more: str) -> None:
        """Start the server in its namespace."""
        inside = ("ip", "netns", "exec", self.network.space("server"))
        self.made.start(name, "server", "run.yaml", "--host", "0.0.0.0", *more, before=inside)

    def trainer(self, site: str, name: str = "", before: tuple[str, ...] = (), path: str = "") -> None:
        """Start a trainer without any network."""
        name = name or f"{site}-trainer"
        self.made.start(name, "trainer", f"{site}/site.yaml", before=("unshare", "-n", *before), path=path)
        token = self.made.place(site) / "token"
        wait_for(f"{site}'s token", token.exists, BRIEF, self.made)

    def relay(self, site: str, name: str = "") -> None:
        """Start a relay in its site's namespace, through its wire if it has one."""
        place, made = self.made.place(site), self.made
        wire = self.wires.get(site)
        server = f"{self.address[0]}:{made.port}" if wire is None else f"127.0.0.1:{wire.port}"
        socket = place / ("g" if site in self.doors else "s")
        inside = ("ip", "netns", "exec", self.network.space(site))
        own = ["--key", f"{site}/keys/{site}", "--state", f"{site}/state", "--max-wait", "600"]
        door = ["--trainer-socket", str(socket), "--token", str(place / "token")]
        made.start(
            name or site, "client", "--superlink", server, "--ca", "certs/ca.crt", *own, *door, before=inside
        )

    def audit(self, site: str) -> list[dict[str, Any]]:
        """The rounds in a site's audit log."""
        entries = whole_records(self.made.root / site / "audit.jsonl")
        return [entry for entry in entries if entry["what"] == "round"]

    def trained(self, site: str, number: int) -> bool:
        """Whether a site has answered a round."""
        return any(entry["round"] == number for entry in self.audit(site))

    def server_log(self) -> str:
        """What the ServerApp wrote into the run folder."""
        logs = list((self.made.root / "runs").glob("*/server.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def lines(self) -> dict[int, dict[str, Any]]:
        """The run's rounds so far."""
        return {line["round"]: line for line in self.made.rounds_done()}

    def until(self, what: str, condition: Any) -> Any:
        """Wait."""
        return wait_for(what, condition, BRIEF, self.made)

    def until_round(self, number: int) -> dict[str, Any]:
        """Wait for the end of a round."""
        return self.until(f"round {number}", lambda: self.lines().get(number))

    def charged(self, site: str) -> list[tuple[int, str, int]]:
        """Return (round, state, steps) of a site's own ledger."""
        folder = self.made.root / site
        ledger_file = folder / ("disk/ledger.db" if site == "site-b" else "ledger.db")
        secret = load_secret(folder / "keys" / "ledger.secret")
        with open_ledger(ledger_file, secret=secret, read_only=True) as ledger:
            rows = ledger.report(Account(site, "words-2026")).rounds
            self.facts[f"epsilon {site}"] = ledger.report(Account(site, "words-2026")).epsilon
        return [(row.server_round, row.state, row.steps_charged) for row in rows]

    # -- the faults --------------------------------------------------------------------------------

    def tell(self) -> None:
        """Tell the whole story."""
        self.other_versions_and_models()
        self.superlink_restart()
        self.cut_before_upload()
        self.cut_during_upload()
        self.cut_after_upload()
        self.client_killed()
        self.slow_client()
        self.server_killed_while_aggregating()
        self.disk_full()
        self.key_revoked()
        self.until("the run's end", lambda: self.made.state().get("status") == "finished")
        gone = self.made.processes["site-c"]
        self.until("site-c is refused", lambda: gone.poll() is not None)
        server = self.made.processes["server-again"]
        server.terminate()
        self.until("the server's end", lambda: server.poll() is not None)

    def other_versions_and_models(self) -> None:
        """Site-c comes with another version and is left out; site-b with another base model and refuses."""
        made = self.made
        skewed = made.root / "skewed"
        skewed.mkdir()
        (skewed / "sitecustomize.py").write_text("import fedlora\nfedlora.__version__ = '0.0.9'\n")
        other, model = made.root / "other-model", made.root / "model"
        bind = ("unshare", "-m", "sh", "-c", f'mount --bind {other} {model} && exec "$@"', "sh")
        self.server("server")
        self.trainer("site-a")
        self.trainer("site-b", before=bind)
        self.trainer("site-c", "site-c-skewed", path=str(skewed))
        self.until("the server", lambda: made.state().get("status") == "running")
        for site in SITES:
            self.relay(site)
        self.until("site-c is left out", lambda: "0.0.9" in self.server_log())
        made.kill("site-c-skewed")
        self.trainer("site-c")
        self.wires["site-a"].mute_after = self.pushes
        self.measure_upload()
        self.facts["round 1"] = self.until_round(1)
        made.kill("site-b-trainer")
        self.trainer("site-b", "site-b-right")

    def measure_upload(self) -> None:
        """Note how many bytes a reply of site-a takes."""
        wire = self.wires["site-a"]
        self.held()
        self.pushes.begin()
        wire.counted, wire.since = 0, self.pushes.begun
        self.door.release()
        self.until("site-a sent", self.pushes.sent)
        self.facts["upload"], wire.since = wire.counted, None

    def everyone(self) -> None:
        """Wait for a round with all three sites."""
        seen = max(self.lines())
        self.until(
            "all sites in a round",
            lambda: any(line["accepted"] == 3 for number, line in self.lines().items() if number > seen),
        )

    def next_round(self, site: str) -> int:
        """Wait until a site has trained one more round; return its number."""
        seen = max((entry["round"] for entry in self.audit(site)), default=0)
        self.until(f"{site} trains again", lambda: self.trained_after(site, seen))
        return self.trained_after(site, seen)

    def trained_after(self, site: str, seen: int) -> int:
        """Return the newest round that a site has answered after one, or 0."""
        newest = max((entry["round"] for entry in self.audit(site)), default=0)
        return newest if newest > seen else 0

    def held(self, *others: str, before: Callable[[], object] | None = None) -> int:
        """Return the next round that site-a and others have trained; site-a's answer waits behind the door.

        A round that one of the others is not in (its node has missed heartbeats, say) is let go.
        """
        while True:
            if before is not None:
                before()
            self.door.hold()
            number = self.next_round("site-a")
            ends = time.monotonic() + DEADLINE / 2
            while time.monotonic() < ends:
                if all(self.trained(site, number) for site in others):
                    return number
                time.sleep(0.25)
            self.door.release()
            self.everyone()

    def superlink_restart(self) -> None:
        """The SuperLink dies under running SuperNodes in the middle of a round."""
        number = self.held()
        pid = int(self.made.state()["superlink_pid"])
        os.kill(pid, 9)
        self.until("another SuperLink", lambda: self.made.state().get("superlink_pid") not in (pid, None))
        self.door.release()
        self.facts["superlink restart"] = self.until_round(number)

    def cut_before_upload(self) -> None:
        """(a) The cable is pulled after site-a has trained and before its reply is on its way."""
        number = self.held()
        self.network.pull("site-a")
        self.door.release()
        self.facts["cut before"] = self.until_round(number)
        self.network.plug("site-a")

    def cut_during_upload(self) -> None:
        """(b) The cable is pulled when a part of site-a's reply is on its way.

        A third of what a reply takes: what a slow machine counts on top of it does not make a whole of that.
        """
        wire = self.wires["site-a"]
        number = self.held()
        self.pushes.begin()
        wire.since = self.pushes.begun
        wire.allowed = max(1, self.facts["upload"] // 3)
        self.door.release()
        self.until("a part of the upload", wire.stopped.is_set)
        self.facts["sent when cut during"] = (self.pushes.begun(), self.pushes.sent())
        self.network.pull("site-a")
        self.facts["cut during"] = self.until_round(number)
        wire.normal()
        self.network.plug("site-a")

    def cut_after_upload(self) -> None:
        """(c) The reply arrives, its acknowledgement does not: the cable is pulled in between."""
        wire = self.wires["site-a"]
        others = [Pushes(self.made.root / site / "state" / "supernode.log") for site in ("site-b", "site-c")]
        number = self.held("site-b", "site-c", before=lambda: [push.begin() for push in others])
        self.pushes.begin()
        self.until("the others have sent", lambda: all(push.sent() for push in others))
        wire.mute_when = LastPush(self.made.root / "server-state" / "superlink.db", self.pushes)
        self.door.release()
        self.until("the last acknowledgement is held back", wire.muted.is_set)
        self.facts["sent when cut after"] = self.pushes.sent()
        self.network.pull("site-a")
        self.facts["cut after"] = self.until_round(number)
        wire.normal()
        self.network.plug("site-a")

    def client_killed(self) -> None:
        """Site-b loses power in the middle of a round and comes back."""
        self.everyone()
        number = self.next_round("site-b")
        for name in ("site-b", "site-b-right"):
            self.made.kill(name)
        self.facts["client killed"] = self.until_round(number)
        self.trainer("site-b", "site-b-third")
        self.relay("site-b", "site-b-again")

    def slow_client(self) -> None:
        """Site-c's wire is so slow and lossy that its reply comes after the deadline."""
        self.everyone()
        door, wire = self.doors["site-c"], self.wires["site-c"]
        door.hold()
        number = self.next_round("site-c")
        wire.delay, wire.loss = 6.0, 3
        door.release()
        self.facts["slow client"] = self.until_round(number)
        wire.normal()

    def server_killed_while_aggregating(self) -> None:
        """`kill -9` between the last reply and the checkpoint; the newest checkpoint is cut short as well."""
        folder = self.made.run_folder() / "checkpoints"
        self.everyone()
        number = self.held("site-c")
        self.door.release()
        deadline = time.monotonic() + BRIEF
        while time.monotonic() < deadline and not any(f"{number:06d}" in name for name in os.listdir(folder)):
            time.sleep(0.0005)
        self.made.kill("server")
        newest = max(folder.glob("round-*.ckpt"))
        self.facts["newest checkpoint"] = (newest.name, number)
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) // 2])
        self.server("server-again", "--resume", "--stay")
        self.facts["server killed"] = self.until_round(number)

    def disk_full(self) -> None:
        """Site-b's disk fills up; nothing is trained or sent; then there is room again."""
        fill = self.made.root / "site-b" / "disk" / "fill"
        self.everyone()  # the round that the killed server does again is over: a new one has a new number
        last = self.held("site-b")  # that round cannot end yet: site-b has answered and rests
        with fill.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(b"0" * 4096)
        self.door.release()
        number = self.until("site-b answers", lambda: self.trained_after("site-b", last))
        self.facts["disk full"] = self.until_round(number)
        fill.unlink()
        self.facts["charged while full"] = sum(last < one <= number for one, _, _ in self.charged("site-b"))
        self.next_round("site-b")

    def key_revoked(self) -> None:
        """Site-c's key is revoked while the run goes on."""
        allow = AllowList.load(self.made.root / "allow.json")
        allow.revoke("site-c")
        allow.save()
