"""A run of three sites in network namespaces, with every fault once; told step by step.

The server stands still before every round until the story lets it go on (`deploy_barrier`), a site's answers and the
parts of its reply wait where the story says (`Door`, `Gateway`): what happens when does not hang on the machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from deploy_barrier import Barrier
from deploy_gateway import Gateway
from deploy_helpers import Federation, wait_for, whole_records, write_model
from deploy_netns import Door, Network

from fedlora.cli import pki
from fedlora.cli.keyring import AllowList
from fedlora.ledger import Account, load_secret, open_ledger

ROUNDS = 12
DEADLINE = float(os.environ.get("FEDLORA_TEST_DEADLINE", "60"))
"""The stragglers' deadline in seconds; four rounds wait for it."""
SITES = ("site-a", "site-b", "site-c")
BRIEF = 600.0
"""Bound of everything that is waited for, in seconds; far away."""


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
        write_model(root / "other-model", seed=1)
        self._small_disk(root / "site-b" / "disk")
        self.gateways = {
            site: Gateway(self.network.space(site), (address, made.port), root / "certs") for site in SITES
        }
        self.doors = {site: Door(made.place(site) / "g", made.place(site) / "s") for site in SITES}
        self.barrier = Barrier(root / "hooked", made.place("site-a") / "b")

    def _small_disk(self, folder: Path) -> None:
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
        site = folder.parent / "site.yaml"
        site.write_text(site.read_text().replace("ledger: {url: ledger.db", "ledger: {url: disk/ledger.db"))

    def close(self) -> None:
        """End and remove everything."""
        self.barrier.close()
        for door in self.doors.values():
            door.close()
        self.made.stop()
        for gateway in self.gateways.values():
            gateway.close()
        subprocess.run(["umount", str(self.made.root / "site-b" / "disk")], check=False)
        self.network.close()

    # -- parts -------------------------------------------------------------------------------------

    def server(self, name: str, *more: str) -> None:
        """Start the server in its namespace."""
        inside = ("ip", "netns", "exec", self.network.space("server"))
        arguments = ("server", "run.yaml", "--host", "0.0.0.0", *more)
        self.made.start(name, *arguments, before=inside, path=str(self.barrier.folder))

    def trainer(self, site: str, name: str = "", before: tuple[str, ...] = (), path: str = "") -> None:
        """Start a trainer without any network; wait until it serves."""
        name, socket = name or f"{site}-trainer", self.made.place(site) / "s"
        socket.unlink(missing_ok=True)  # a killed one's
        self.made.start(name, "trainer", f"{site}/site.yaml", before=("unshare", "-n", *before), path=path)
        self.until(f"{site}'s socket", socket.exists)

    def relay(self, site: str, name: str = "") -> None:
        """Start a relay in its site's namespace, through its gateway."""
        place = self.made.place(site)
        inside = ("ip", "netns", "exec", self.network.space(site))
        server = ["--superlink", f"127.0.0.1:{self.gateways[site].port}", "--ca", "certs/ca.crt"]
        own = ["--key", f"{site}/keys/{site}", "--state", f"{site}/state", "--max-wait", "600"]
        door = ["--trainer-socket", str(place / "g"), "--token", str(place / "token")]
        self.made.start(name or site, "client", *server, *own, *door, before=inside)

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
        """Wait for what stays once it is there."""
        return wait_for(what, condition, BRIEF, self.made)

    def charged(self, site: str) -> list[tuple[int, str, int]]:
        """Return (round, state, steps) of a site's own ledger."""
        folder = self.made.root / site
        ledger_file = folder / ("disk/ledger.db" if site == "site-b" else "ledger.db")
        secret = load_secret(folder / "keys" / "ledger.secret")
        with open_ledger(ledger_file, secret=secret, read_only=True) as ledger:
            rows = ledger.report(Account(site, "words-2026")).rounds
            self.facts[f"epsilon {site}"] = ledger.report(Account(site, "words-2026")).epsilon
        return [(row.server_round, row.state, row.steps_charged) for row in rows]

    # -- rounds ------------------------------------------------------------------------------------

    def stands(self, point: str = "round") -> int:
        """Wait until the server stands before a round (or a checkpoint); return its number."""
        number = self.barrier.until(point, BRIEF)
        return number or self.until(f"the server before a {point}", lambda: self.barrier.until(point, 0.0))

    def begin(self) -> int:
        """Let the next round begin; return its number."""
        number = self.stands()
        self.barrier.go("round")
        return number

    def end(self) -> dict[str, Any]:
        """Wait until the server stands before the round after; return the line of the one that has ended."""
        number = self.stands() - 1
        return self.lines()[number]

    def whole_round(self) -> dict[str, Any]:
        """Let a round pass in which nothing happens."""
        self.begin()
        return self.end()

    def held(self, site: str) -> int:
        """Begin a round; wait until a site has trained it. Its answer waits behind the door."""
        self.stands()
        self.doors[site].hold()
        number = self.begin()
        self.until(f"{site} trains round {number}", lambda: self.trained(site, number))
        return number

    def back(self, *sites: str, since: float | None = None) -> None:
        """Wait until the server has heard of sites again, after a monotonic moment (now by default)."""
        moment = time.monotonic() if since is None else since
        for site in sites:
            self.gateways[site].alive_since(moment, BRIEF)

    def pushed(self, site: str) -> tuple[bool, bool]:
        """Return whether a SuperNode's log says that its reply is on its way, and that it was sent."""
        reply = self.gateways[site].reply
        log = self.made.root / site / "state" / "supernode.log"
        if reply is None:
            return False, False
        _, begun, after = log.read_text(errors="replace").partition(f"(ID: {reply.message})")
        return bool(begun), "Sent successfully" in after

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
        self.facts["round 1"] = self.whole_round()
        made.kill("site-b-trainer")
        self.trainer("site-b", "site-b-right")

    def superlink_restart(self) -> None:
        """The SuperLink dies under running SuperNodes in the middle of a round."""
        number = self.held("site-a")
        pid = int(self.made.state()["superlink_pid"])
        os.kill(pid, 9)
        died = time.monotonic()
        self.until("another SuperLink", lambda: self.made.state().get("superlink_pid") not in (pid, None))
        self.doors["site-a"].release()
        assert self.stands() == number
        self.back(*SITES, since=died)
        self.facts["superlink restart"] = self.whole_round()

    def cut_before_upload(self) -> None:
        """(a) The cable is pulled after site-a has trained and before its reply is on its way."""
        self.held("site-a")
        self.network.pull("site-a")
        self.doors["site-a"].release()
        self.facts["cut before"] = self.end()
        self.network.plug("site-a")
        self.back("site-a")

    def cut_during_upload(self) -> None:
        """(b) The cable is pulled when two parts of site-a's reply and a half are on its way."""
        gateway = self.gateways["site-a"]
        self.stands()
        gateway.cut_after(2)
        self.begin()
        self.until("a part of the upload", gateway.held.is_set)
        self.network.pull("site-a")
        self.until("the upload in the log", lambda: self.pushed("site-a")[0])
        self.facts["cut during"] = self.end()
        self.facts["sent when cut during"] = self.pushed("site-a")
        self.facts["whole when cut during"] = gateway.reply is None or gateway.reply.whole
        gateway.normal()
        self.network.plug("site-a")
        self.back("site-a")

    def cut_after_upload(self) -> None:
        """(c) The reply arrives, its acknowledgement does not: the cable is pulled in between."""
        gateway = self.gateways["site-a"]
        self.stands()
        gateway.mute_last()
        self.begin()
        self.until("the last acknowledgement is held back", gateway.held.is_set)
        self.network.pull("site-a")
        self.facts["cut after"] = self.end()
        self.facts["sent when cut after"] = self.pushed("site-a")[1]
        gateway.normal()
        self.network.plug("site-a")
        self.back("site-a")

    def client_killed(self) -> None:
        """Site-b loses power in the middle of a round and comes back."""
        self.held("site-b")
        for name in ("site-b", "site-b-right"):
            self.made.kill(name)
        self.doors["site-b"].release()
        self.facts["client killed"] = self.end()
        self.trainer("site-b", "site-b-third")
        self.relay("site-b", "site-b-again")
        self.back("site-b")

    def slow_client(self) -> None:
        """Site-c's wire is so slow and lossy that its reply comes after the deadline."""
        gateway = self.gateways["site-c"]
        self.stands()
        gateway.slow(0.2, 3)
        self.begin()
        self.facts["slow client"] = self.end()
        self.until("the slow reply's last part", gateway.held.is_set)
        gateway.normal()
        self.facts["after the faults"] = self.whole_round()

    def server_killed_while_aggregating(self) -> None:
        """`kill -9` between the last reply and the checkpoint; the newest checkpoint is cut short as well.

        Of the two rounds that are done again sites keep the reply of the last one only: they refuse the first.
        """
        folder = self.made.run_folder() / "checkpoints"
        self.stands()
        self.barrier.stop_at_checkpoint()
        self.begin()
        number = self.stands("checkpoint")
        self.made.kill("server")
        died = time.monotonic()
        newest = max(folder.glob("round-*.ckpt"))
        self.facts["newest checkpoint"] = (newest.name, number)
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) // 2])
        self.server("server-again", "--resume", "--stay")
        assert self.stands() == number - 1
        self.back(*SITES, since=died)
        self.facts["asked again"] = self.whole_round()
        self.facts["server killed"] = self.whole_round()

    def disk_full(self) -> None:
        """Site-b's disk fills up; nothing is trained or sent; then there is room again."""
        fill = self.made.root / "site-b" / "disk" / "fill"
        number = self.stands()
        with fill.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(b"0" * 4096)
        self.facts["disk full"] = self.whole_round()
        fill.unlink()
        self.facts["charged while full"] = sum(one == number for one, _, _ in self.charged("site-b"))
        self.facts["disk again"] = self.whole_round()

    def key_revoked(self) -> None:
        """Site-c's key is revoked while the run goes on, to its end."""
        made, gone, server = self.made, self.made.processes["site-c"], self.made.processes["server-again"]
        self.stands()
        allow = AllowList.load(made.root / "allow.json")
        allow.revoke("site-c")
        allow.save()
        log = made.root / "server-state" / "audit.jsonl"
        self.until("site-c is removed", lambda: '"site removed"' in log.read_text())
        self.begin()
        self.until("the run's end", lambda: made.state().get("status") == "finished")
        self.until("site-c is refused", lambda: gone.poll() is not None)
        server.terminate()
        self.until("the server's end", lambda: server.poll() is not None)
