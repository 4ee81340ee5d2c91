"""A real federation on the loopback: TLS, node keys, three sites, a kill -9, an unknown key, ledgers."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import dp_accounting
import pytest
from deploy_helpers import Federation, wait_for
from dp_accounting import pld
from ports import reserved_port

from fedlora.cli import keyring, pki
from fedlora.config import load_config
from fedlora.errors import AuthenticationError
from fedlora.ledger import Account, load_secret, open_ledger

SIGMA, RATE, STEPS, DELTA = 1.25, 8 / 64, 2, 1e-4
WARDS = ("ward-1", "ward-2")
HEALTH = tuple(f"127.0.0.1:{reserved_port()}" for _ in range(2))
"""Metrics addresses of the server and of site-a's trainer."""
SKEWED_CLOCK = """\
import datetime as d
class Shifted(d.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - d.timedelta(hours=1)
d.datetime = Shifted
"""


PAGES: list[dict[str, str]] = []
"""What `watch` read while the run went on, oldest first; both processes end with the run."""


def true_epsilon_of(sigma: float, steps: int) -> float:
    """Epsilon of so many steps at one noise multiplier, by dp_accounting alone."""
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(DELTA))


def true_epsilon(steps: int) -> float:
    """Epsilon of so many steps of this file's runs."""
    return true_epsilon_of(SIGMA, steps)


def spent(
    federation: Federation, site: str, client: str | None = None
) -> tuple[float, list[tuple[int, str, int]]]:
    """Return (epsilon, rounds as (round, state, steps)) of a site's own ledger, for one of its clients."""
    folder = federation.root / site
    secret = load_secret(folder / "keys" / "ledger.secret")
    with open_ledger(folder / "ledger.db", secret=secret, read_only=True) as ledger:
        report = ledger.report(Account(client or site, "words-2026"))
    return report.epsilon, [(row.server_round, row.state, row.steps_charged) for row in report.rounds]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(
        tmp_path_factory.mktemp("federation"), rounds=2, timeout=75.0, wards={"site-b": WARDS}
    ).make()
    watched = made.root / "site-a" / "site.yaml"
    watched.write_text(
        watched.read_text().replace("audit.jsonl}", f"audit.jsonl, metrics_address: '{HEALTH[1]}'}}")
    )
    made.start_server(f"privacy.noise_multiplier={SIGMA}", "--metrics", HEALTH[0])
    for site in made.sites:
        made.start_site(site)
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(over,), daemon=True)
    watcher.start()
    try:
        yield made
    finally:
        over.set()
        watcher.join()
        made.stop()


@pytest.fixture(scope="module")
def finished(federation: Federation) -> Federation:
    """The run after two rounds, one client killed in the second, one stranger turned away."""
    ready = wait_for("server", lambda: federation.state().get("status") == "running", 180, federation)
    assert ready
    strangers(federation)
    wait_for("round 1", lambda: len(federation.rounds_done()) >= 2, 300, federation)
    wait_for("its metrics", lambda: any(gauges(page["server"]) for page in list(PAGES)), 60, federation)
    federation.kill("site-c")
    server = federation.processes["server"]
    wait_for("the run's end", lambda: server.poll() is not None, 300, federation)
    return federation


def strangers(federation: Federation) -> None:
    """Start clients that must not come in: an unknown key, another CA, a clock that is an hour late."""
    federation.make_site("site-x", 9)
    pki.make_ca(federation.root / "other-ca")
    late = federation.root / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(SKEWED_CLOCK)
    for name, ca, path in (
        ("stranger", "certs", ""),
        ("other-ca", "other-ca", ""),
        ("late", "certs", str(late)),
    ):
        key = ["--key", "site-x/keys/site-x", "--state", f"site-x/state-{name}"]
        connection = ["--superlink", f"127.0.0.1:{federation.port}", "--ca", f"{ca}/ca.crt"]
        place = ["--trainer-socket", "none", "--token", "none"]
        federation.start(name, "client", *connection, *key, *place, "--json", path=path)


def watch(over: threading.Event) -> None:
    """Keep the metrics pages of the server and of site-a's trainer, and what they say of being ready."""
    while not over.wait(0.1):
        found = {}
        with contextlib.suppress(OSError, http.client.HTTPException):  # not there yet, or no more
            for name, address in zip(("server", "trainer"), HEALTH, strict=True):
                for key, path in ((name, "metrics"), (f"{name} ready", "readyz")):
                    with urllib.request.urlopen(f"http://{address}/{path}", timeout=10) as answer:
                        found[key] = answer.read().decode()
            PAGES.append(found)


def gauges(page: str) -> dict[str, float]:
    """Return the values of the last round on a server's page; nothing before the first round."""
    lines = (line.split(" ") for line in page.splitlines() if line.startswith("fedlora_round"))
    return {name: float(value) for name, value in lines}


@pytest.fixture(scope="module")
def answers(federation: Federation) -> dict[str, int]:
    """What someone who holds nothing but the CA certificate gets from the server's port."""
    wait_for("server", lambda: federation.state().get("status") == "running", 180, federation)
    trust = ssl.create_default_context(cafile=str(federation.root / "certs" / "ca.crt"))
    found = {}
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/control/list-runs",
        "/v1/fleet/../control/start-run",
        "//v1/control/start-run",
        "/docs",
        "/openapi.json",
    ):
        request = urllib.request.Request(
            f"https://127.0.0.1:{federation.port}{path}",
            data=b"",
            headers={"Content-Type": "application/x-protobuf", "Authorization": "Bearer " + "0" * 64},
        )
        try:
            with urllib.request.urlopen(request, context=trust, timeout=10) as answer:
                found[path] = answer.status
        except urllib.error.HTTPError as error:
            found[path] = error.code
    return found


def test_the_ca_certificate_alone_opens_nothing(answers: dict[str, int]) -> None:
    assert len(answers) == 7
    assert set(answers.values()) <= {401, 403, 404}, answers


def test_a_run_survives_a_killed_client(finished: Federation) -> None:
    assert finished.processes["server"].returncode == 0, finished.log("server")[-2000:]
    rounds = {line["round"]: line for line in finished.rounds_done()}
    assert rounds[1]["status"] == "ok"
    assert rounds[1]["accepted"] == 4
    assert rounds[2]["status"] == "ok"
    assert rounds[2]["accepted"] in {3, 4}
    assert "finished" in finished.log("server")


def test_the_other_clients_ledgers_are_right(finished: Federation) -> None:
    for site, client in (("site-a", None), *(("site-b", ward) for ward in WARDS)):
        epsilon, rounds = spent(finished, site, client)
        assert rounds == [(1, "committed", STEPS), (2, "committed", STEPS)]
        assert epsilon == pytest.approx(true_epsilon(2 * STEPS), rel=0.02)
        assert epsilon >= true_epsilon(2 * STEPS) * (1 - 1e-3)


def test_h38_an_override_reaches_the_server_and_every_client(finished: Federation) -> None:
    written = load_config(finished.run_folder() / "config.yaml")
    assert written.privacy.noise_multiplier == SIGMA
    assert load_config(finished.root / "run.yaml").privacy.noise_multiplier == 1.0
    for site, client in (("site-a", "site-a"), *(("site-b", ward) for ward in WARDS)):
        secret = load_secret(finished.root / site / "keys" / "ledger.secret")
        with open_ledger(finished.root / site / "ledger.db", secret=secret, read_only=True) as ledger:
            rows = ledger.rounds(Account(client, "words-2026"))
        events = {json.dumps(json.loads(row.event_json), sort_keys=True) for row in rows}
        assert len(events) == 1
        assert '"noise_multiplier": 1.25' in events.pop()


def test_an_edge_site_keeps_an_account_for_each_of_its_clients(finished: Federation) -> None:
    secret = load_secret(finished.root / "site-b" / "keys" / "ledger.secret")
    with open_ledger(finished.root / "site-b" / "ledger.db", secret=secret, read_only=True) as ledger:
        accounts = {account.client for account in ledger.accounts()}
    assert accounts == set(WARDS)
    entries = [json.loads(line) for line in (finished.root / "site-b" / "audit.jsonl").open()]
    answered = {(one["client"], one["round"]) for one in entries if one["what"] == "round"}
    assert answered == {(ward, number) for ward in WARDS for number in (1, 2)}


@pytest.mark.parametrize(("name", "reason"), [("other-ca", "not signed by the CA"), ("late", "clock")])
def test_a_wrong_ca_and_a_wrong_clock_end_in_one_line(finished: Federation, name: str, reason: str) -> None:
    process = finished.processes[name]
    wait_for("the refusal", lambda: process.poll() is not None, 120, finished)
    log = finished.log(name)
    assert process.returncode == AuthenticationError.exit_code, log
    lines = [line for line in log.splitlines() if line.startswith("fedlora: ")]
    assert len(lines) == 1
    assert reason in lines[0]


def test_metrics_and_readiness_are_served_while_it_runs(finished: Federation) -> None:
    assert all(page["server ready"] == page["trainer ready"] == "ready\n" for page in PAGES)
    rounds = {line["round"]: line for line in finished.rounds_done()}
    shown = [found for page in PAGES if (found := gauges(page["server"]))]
    assert shown
    for found in shown:
        line = rounds[int(found["fedlora_round"])]
        known = {
            name: float(line[name]) for name in ("accepted", "asked", "epsilon") if line.get(name) is not None
        }
        assert found == {"fedlora_round": line["round"]} | {
            f"fedlora_round_{name}": value for name, value in known.items()
        }, "a page shows half of a round"
    trained = [page["trainer"] for page in PAGES if 'fedlora_rounds_total{status="ok"}' in page["trainer"]]
    assert 'fedlora_epsilon_spent{client="site-a"}' in trained[-1]


def test_the_trainers_own_work_between_rounds_is_small_and_loads_nothing(finished: Federation) -> None:
    entries = [json.loads(line) for line in (finished.root / "site-a" / "audit.jsonl").open()]
    second = next(one for one in entries if one["what"] == "round" and one["round"] == 2)
    assert second["overhead_cpu_seconds"] < 0.2, second


def test_every_client_trained_from_the_servers_adapter(finished: Federation) -> None:
    lines = {line["round"]: line for line in finished.rounds_done()}
    for site in ("site-a", "site-b"):
        entries = [json.loads(line) for line in (finished.root / site / "audit.jsonl").open()]
        for one in (one for one in entries if one["what"] == "round"):
            assert one["adapter"] == lines[one["round"] - 1]["adapter"]


def test_the_server_says_in_the_run_folder_what_happened(finished: Federation) -> None:
    log = (finished.run_folder() / "server.log").read_text()
    assert "Traceback" not in log
    shown = finished.start("status", "status", "server-state", "--json")
    assert shown.wait(240) == 0
    record = json.loads(finished.log("status").splitlines()[-1])
    assert record["roles"][0]["status"] == "finished"


def test_clients_stop_gracefully(finished: Federation) -> None:
    process = finished.processes["site-a"]
    process.terminate()
    assert process.wait(240) == 0, finished.log("site-a")
    audit = [json.loads(line)["what"] for line in (finished.root / "site-a" / "audit.jsonl").open()]
    assert audit[-1] == "trainer stopped"


def test_h13_the_killed_clients_spend_is_never_below_the_truth(finished: Federation) -> None:
    epsilon, rounds = spent(finished, "site-c")
    assert rounds[0] == (1, "committed", STEPS)
    assert epsilon >= true_epsilon(STEPS * len(rounds)) * (1 - 1e-3)


def test_h33_an_unknown_key_is_refused_in_one_line_with_its_exit_code(finished: Federation) -> None:
    process = finished.processes["stranger"]
    wait_for("the refusal", lambda: process.poll() is not None, 120, finished)
    assert process.returncode == AuthenticationError.exit_code
    log = finished.log("stranger")
    lines = [line for line in log.splitlines() if line.startswith("fedlora: ")]
    assert len(lines) == 1
    assert "does not know this key" in lines[0]
    assert "Traceback" not in log
    record = json.loads(next(line for line in log.splitlines() if line.startswith("{")))
    assert record["error"] == "AuthenticationError"
    _, fingerprint = keyring.read_public(finished.root / "site-x" / "keys" / "site-x.pub")
    assert fingerprint in record["message"]


def test_audit_logs_tell_what_happened_and_hold_no_records(finished: Federation) -> None:
    text = (finished.root / "site-a" / "audit.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert [entry["round"] for entry in entries if entry["what"] == "round"] == [1, 2]
    words = (finished.root / "site-a" / "records.jsonl").read_text().split('"')[3]
    assert words not in text
    server = [json.loads(line)["what"] for line in (finished.root / "server-state" / "audit.jsonl").open()]
    assert server.count("site registered") == 3
    assert server[-1] == "run finished"


def test_nothing_is_left_running(finished: Federation) -> None:
    finished.stop()
    left = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(finished.root) in command:
            left.append(command)
    assert left == []
