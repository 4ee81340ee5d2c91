"""The report shows the run's own numbers, says what epsilon means, and asks the network for nothing."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess

import pytest

from fedlora.errors import DataError
from fedlora.report.compare import comparison, render_comparison
from fedlora.report.figures import epsilon_curves
from fedlora.report.html import lower, upper
from fedlora.report.html import number as shown_as
from fedlora.report.page import render
from fedlora.report.run_data import read_run

STATEMENT = {
    "unit": "record",
    "adjacency": "add_or_remove",
    "adversary": "anyone who sees the updates, the server included",
    "delta": 1e-4,
    "accountant": "pld",
    "sampling_assumption": "Poisson, rate 0.07",
    "budget": {"epsilon": 5.0, "delta": 1e-4, "window": "lifetime"},
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
                "epsilon_by_client": {"site-1": 0.7 * number, "site-2": 0.6 * min(number, 3)},
                "diagnostics": {
                    "gauge_drift": 0.1 + 0.01 * number,
                    "intrinsic_noise": 2.5,
                    "preconditioned_noise": 0.031 * number,
                },
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
        "site-1": {
            "events": [{"event": {}, "steps": 6}],
            "epsilon_reported": 4.2,
            "epsilon_from_events": 4.1,
        },
        "site-2": {
            "events": [{"event": {}, "steps": 3}],
            "epsilon_reported": 1.8,
            "epsilon_from_events": 1.8,
        },
    }
    account = {
        "account": {"client": "site-1", "dataset": "news-2026"},
        "epsilon": 4.2,
        "budget": {"epsilon": 6.5, "delta": 1e-4},
        "left": 2.3,
        "conditions": ["records do not repeat across clients"],
    }
    (tmp_path / "ledger.json").write_text(json.dumps({"dataset": "news-2026", "accounts": [account]}))
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
                "power": 0.97,
                "delta": 1e-4,
                "conditions": {**STATEMENT, "attacked_steps": 6},
                "figures": {"auc": 0.731},
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
        if name == "budget":
            continue
        text = value[0] if isinstance(value, list) else value
        assert name.replace("_", " ") in page
        assert html.escape(str(text)) in page or "0.0001" in page
    assert "4.2" in page


def _tables(page: str) -> dict[str, list[list[str]]]:
    """Return the text of every table, by the title of its part."""
    found: dict[str, list[list[str]]] = {}
    for body in re.findall(r"<section>(.*?)</section>", page, re.S):
        title = re.search(r"<(?:h2|summary)>(.*?)</", body)
        rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
        cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in rows]
        found[html.unescape(title.group(1)) if title else "head"] = cells
    return found


def test_every_epsilon_has_its_conditions_beside_it(run_folder):
    """Unit, adjacency, adversary, delta, accountant and sampling in every part that shows an epsilon."""
    page = render(read_run(run_folder))
    sections = re.findall(r"<section>.*?</section>", page, re.S)
    showing = [
        one for one in sections if re.search(r"epsilon", one) and "<h2>Conf" not in one and "pre>" not in one
    ]
    assert len(showing) >= 5  # head, meaning, curves, clients, audits and their figures
    for part in showing:
        text = html.unescape(re.sub(r"<[^>]*>", " ", part))
        for word in ("record", "add_or_remove", "the server included", "0.0001", "pld", "Poisson"):
            assert word in text, (word, text[:300])


def test_every_part_of_a_run_is_on_the_page(run_folder):
    page = render(read_run(run_folder))
    for chart in (
        "accuracy",
        "loss",
        "epsilon per client",
        "clients accepted",
        "gauge drift",
        "preconditioned noise",
    ):
        assert f"<title>{chart}</title>" in page
    for part in (
        "Where the time went",
        "Rounds: who took part, refused or failed",
        "Clients",
        "Partition of the simulated clients",
        "Audits",
        "Configuration",
        "Environment",
        "What the epsilon means",
    ):
        assert html.escape(part) in page
    assert re.search(r"constant over rounds.*intrinsic noise</td><td class=n>2.5", page, re.S)
    assert "do not leave a client" in page


def test_what_is_left_of_each_budget_is_shown(run_folder):
    rows = {row[0]: row for row in _tables(render(read_run(run_folder)))["Clients"]}
    assert rows["client"][-2:] == ["budget", "budget left"]
    assert rows["site-1"][2:] == ["4.2", "4.1", "6.5", "2.3"]  # its own ledger's terms
    assert rows["site-2"][2:] == ["1.8", "1.8", "5", "3.2"]  # the run's terms, no ledger here


def test_epsilon_is_drawn_for_every_client_and_never_falls(run_folder):
    rounds, curves = epsilon_curves(read_run(run_folder))
    assert rounds == [1, 2, 3, 4, 5, 6]
    assert curves["site-1"] == pytest.approx([0.7 * n for n in rounds])
    assert curves["site-2"] == pytest.approx([0.6 * min(n, 3) for n in rounds])


def test_many_clients_are_drawn_as_groups(run_folder):
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["epsilon_by_client"] = {f"c{i:03d}": (1 + i % 20) * line["round"] for i in range(200)}
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    _, curves = epsilon_curves(read_run(run_folder))
    assert len(curves) == 6
    assert {curve[-1] for curve in curves.values()} >= {6.0, 120.0}  # the largest and the smallest
    assert all(name.startswith("10 clients like") for name in curves)


def _numbers(value) -> set[str]:
    """Every way in which a page may write the numbers of a JSON value."""
    if isinstance(value, dict):
        return set().union(*(_numbers(one) for one in value.values()), *(_numbers(k) for k in value), set())
    if isinstance(value, list):
        return set().union(*(_numbers(one) for one in value), set())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return set()
    return {shown_as(kind(value), digits) for kind in (float, upper, lower, lambda v: v) for digits in (4, 6)}


def test_every_number_that_is_shown_stands_in_the_runs_json(run_folder):
    """No figure of a table or card comes from anywhere but the run's files, or the sums stated under "derived"."""
    page = render(read_run(run_folder))
    data = embedded(page)
    known = _numbers(data)
    shown = re.findall(r'<td class=n>(.*?)</td>|<td class="n">(.*?)</td>', page)
    shown = [a or b for a, b in shown] + [
        text for text in re.findall(r"</span><b>(.*?)</b>", page) if re.fullmatch(r"[-0-9. e]+", text)
    ]
    assert len(shown) > 60
    assert [one for one in shown if one not in known] == []
    lines = data["rounds"]
    assert data["derived"]["bytes_up"] == sum(one.get("bytes_up", 0) for one in lines) == 6000
    assert data["derived"]["seconds"] == {"clients": 9.0, "aggregate": 1.5}
    assert data["derived"]["clients"]["site-1"] == [6, 4.2, 4.1, 6.5, 2.3]


def test_shares_of_time_stand_in_the_pages_data(run_folder):
    """A percentage is a number on the page like any other."""
    page = render(read_run(run_folder))
    percent = embedded(page)["derived"]["seconds_percent"]
    assert percent == pytest.approx({"clients": 100 * 9.0 / 10.5, "aggregate": 100 * 1.5 / 10.5})
    shown = re.findall(r"(-?[0-9.]+) %", page)
    assert shown == [f"{value:.1f}" for value in percent.values()]


def test_curves_pass_through_the_runs_numbers(run_folder):
    page = render(read_run(run_folder))
    chart = re.search(r"<svg[^>]*>(?:(?!</svg>).)*<title>accuracy</title>.*?</svg>", page, re.S).group(0)
    path = re.findall(r'<path d="(M[^"]*L[^"]*)" fill="none"', chart)[0]
    points = [tuple(map(float, one.split())) for one in re.split("[ML]", path)[1:]]
    values = [0.25] + [0.25 + 0.1 * number for number in range(1, 7)]
    heights = [420 - y for _, y in points]  # the plot's floor is zero
    assert len(points) == len(values)
    assert [h / heights[-1] for h in heights] == pytest.approx([v / values[-1] for v in values], abs=0.002)


def test_values_below_zero_are_drawn(run_folder):
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines):
        line["metrics"] = {"matthews": 0.2 * place - 0.5}
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    page = render(read_run(run_folder))
    chart = re.search(r"<svg[^>]*>(?:(?!</svg>).)*<title>matthews</title>.*?</svg>", page, re.S).group(0)
    path = re.findall(r'<path d="(M[^"]*)" fill="none"', chart)[0]
    heights = [float(one.split()[1]) for one in re.split("[ML]", path)[1:]]
    assert len(heights) == 7
    steps = [a - b for a, b in itertools.pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 6, abs=0.2)
    assert min(heights) >= 46
    assert max(heights) <= 420
    assert ">-0.5<" in chart
    compared = render_comparison([read_run(run_folder)] * 2)
    assert ">-0.5<" in compared


def test_a_failed_audit_is_said_at_the_top(run_folder):
    path = run_folder / "audit-canary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verdict": "failed", "lower_bound": 7.0}))
    page = render(read_run(run_folder))
    assert page.index("AUDIT FAILED (canary)") < page.index("What the epsilon means")


def test_a_run_that_is_not_over_has_a_page(run_folder):
    for name in ("summary.json", "ledger-mirror.json", "ledger.json", "partition.json", "audit-canary.json"):
        (run_folder / name).unlink()
    page = render(read_run(run_folder))
    assert "the run has not ended" in page
    assert "no privacy guarantee" not in page
    assert "was not audited" in page


def test_client_level_pages_warn_before_they_are_handed_on(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    statement = {**summary["statement"], "unit": "one client"}
    (run_folder / "summary.json").write_text(json.dumps({**summary, "statement": statement}))
    assert "do not hand it on" in render(read_run(run_folder))


def test_hostile_names_stay_text(run_folder):
    evil = "</script><script>alert(1)</script><!--"
    summary = json.loads((run_folder / "summary.json").read_text())
    (run_folder / "summary.json").write_text(json.dumps({**summary, "run_id": evil, "warnings": [evil]}))
    (run_folder / "partition.json").write_text(json.dumps({"clients": {evil: {evil: 3}}}))
    page = render(read_run(run_folder))
    assert page.count("<script") == 1
    assert "<!--" not in page
    assert embedded(page)["summary"]["run_id"] == evil


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
    page = render_comparison([data, data])
    assert embedded(page) == rows
    assert page.count("<svg") == 2  # accuracy and loss, both runs in each
    for word in ("add_or_remove", "the server included", "0.0001", "pld", "Poisson, rate 0.07"):
        assert word in rows[0]["epsilon_means"]
        assert word in page
    assert rows[0]["audits"] == "canary: passed"


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


@pytest.mark.long
def test_pages_do_not_scroll_sideways_on_a_phone(run_folder, tmp_path):
    """360 pixels, everything unfolded: the page itself is no wider (wide tables scroll in their own box)."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs a headless Chromium")
    data = read_run(run_folder)
    frames = []
    for page in (render(data), render_comparison([data] * 6)):
        measured = re.sub(
            r"<meta[^>]*Content-Security-Policy[^>]*>", "", page
        )  # else no frame may be measured
        unfolded = html.escape(measured.replace("<details>", "<details open>"), quote=True)
        frames.append(f'<iframe width=360 height=600 srcdoc="{unfolded}"></iframe>')
    widths = (
        "[...document.querySelectorAll('iframe')].map(f => f.contentDocument.documentElement)"
        ".map(e => e.scrollWidth + '/' + e.clientWidth).join(' ')"
    )
    script = f"<pre id=found></pre><script>onload = () => found.textContent = {widths}</script>"
    outer = tmp_path / "phone.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8>{''.join(frames)}{script}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    sizes = [tuple(map(int, one.split("/"))) for one in found.split()]
    assert len(sizes) == 2
    assert all(0 < shown <= 360 and wide == shown for wide, shown in sizes), sizes
