"""The report shows the run's own numbers, says what epsilon means, and asks the network for nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from fedlora.errors import DataError
from fedlora.report.compare import comparison, render_comparison
from fedlora.report.page import render
from fedlora.report.run_data import read_run

STATEMENT = {
    "unit": "record",
    "adjacency": "add_or_remove",
    "adversary": "anyone who sees the updates, the server included",
    "delta": 1e-4,
    "accountant": "pld",
    "sampling": "Poisson, rate 0.07",
    "mechanism": "lora_fa",
    "conditions": ["noise from the operating system"],
}


@pytest.fixture
def run_folder(tmp_path):
    rounds = [{"round": 0, "status": "initial", "metrics": {"accuracy": 0.25, "loss": 1.6}, "seconds": {}}]
    for number in range(1, 7):
        rounds.append(
            {
                "round": number,
                "status": "ok",
                "asked": 3,
                "accepted": 3 if number != 4 else 2,
                "refused": {"site-2": "BudgetExceededError"} if number == 4 else {},
                "failed": {},
                "epsilon": 0.7 * number,
                "residual": None,
                "metrics": {"accuracy": 0.25 + 0.1 * number, "loss": 1.6 / number},
                "seconds": {"clients": 1.5, "aggregate": 0.25},
                "bytes_up": 1000,
                "bytes_down": 3000,
                "adapter": "ab",
            }
        )
    summary = {
        "run_id": "demo-1",
        "status": "finished",
        "rounds": 6,
        "metrics": {"accuracy": 0.85, "loss": 0.2666},
        "epsilon": 4.2,
        "statement": STATEMENT,
        "seconds": {"total": 10.5},
        "warnings": ["client site-1 reports less than its events imply"],
    }
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.yaml").write_text("run: {name: <script>alert(1)</script>}\n")
    (tmp_path / "environment.json").write_text(
        json.dumps({"python": "3.11.7", "packages": {"torch": "2.13.0"}})
    )
    table = {
        "site-1": {"events": [{"event": {}, "steps": 6}], "epsilon_reported": 4.2, "epsilon_from_events": 4.2}
    }
    (tmp_path / "ledger-mirror.json").write_text(json.dumps(table))
    (tmp_path / "partition.json").write_text(json.dumps({"clients": {"site-1": {"sport": 3, "tech": 9}}}))
    (tmp_path / "audit-canary.json").write_text(
        json.dumps(
            {
                "attack": "canary",
                "verdict": "passed",
                "claimed_epsilon": 4.2,
                "lower_bound": 1.1,
                "confidence": 0.95,
            }
        )
    )
    return tmp_path


def embedded(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1)
    )


def test_every_number_equals_the_run(run_folder):
    page = render(read_run(run_folder))
    shown = embedded(page)
    assert shown["summary"] == json.loads((run_folder / "summary.json").read_text())
    assert shown["rounds"] == [
        json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert shown["clients"] == json.loads((run_folder / "ledger-mirror.json").read_text())


def test_epsilon_stands_with_its_meaning(run_folder):
    page = render(read_run(run_folder))
    for name, value in STATEMENT.items():
        text = value[0] if isinstance(value, list) else value
        assert name.replace("_", " ") in page
        assert html.escape(str(text)) in page or "0.0001" in page
    assert "4.2" in page


def test_no_privacy_is_said_loudly(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    (run_folder / "summary.json").write_text(json.dumps({**summary, "epsilon": None, "statement": {}}))
    assert "no privacy guarantee" in render(read_run(run_folder))


def test_nothing_is_fetched_and_nothing_is_executed(run_folder):
    page = render(read_run(run_folder))
    assert not re.search(r'(src|href)="', page)
    assert "default-src 'none'" in page
    assert "<script>alert" not in page
    assert page.count("<script") == 1
    assert 'name="viewport"' in page


def test_what_went_wrong_is_named(run_folder):
    page = render(read_run(run_folder))
    assert "site-2: BudgetExceededError" in page
    assert "reports less than its events imply" in page
    assert "passed" in page


def test_a_cut_last_line_is_tolerated_and_a_damaged_one_named(run_folder):
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"round": 7, "sta')
    assert len(read_run(run_folder).rounds) == 7
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(DataError, match="line 1"):
        read_run(run_folder)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        read_run(tmp_path)


def test_runs_side_by_side(run_folder):
    data = read_run(run_folder)
    rows = comparison([data, data])
    assert rows[0]["accuracy"] == 0.85
    assert rows[0]["bytes_up"] == 6000
    assert embedded(render_comparison([data, data])) == rows


@pytest.mark.long
def test_page_opens_in_a_real_browser(run_folder, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs a headless Chromium")
    page = tmp_path / "report.html"
    page.write_text(render(read_run(run_folder)))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += [
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    for name, size in (("wide", "1280,1600"), ("phone", "390,2400")):
        picture = tmp_path / f"{name}.png"
        done = subprocess.run(
            [browser, *flags, f"--window-size={size}", f"--screenshot={picture}", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert picture.stat().st_size > 10_000, done.stderr[-500:]
    dumped = subprocess.run(
        [browser, *flags, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "What the epsilon means" in dumped.stdout
    assert "CONSOLE" not in dumped.stderr
