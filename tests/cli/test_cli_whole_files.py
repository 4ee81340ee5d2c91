"""Files that others may read at any time, or that a kill may cut, are whole: replaced at once, appended by lines."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from fedlora.cli.state import AuditLog
from fedlora.files import replace_text
from fedlora.simulation.sweep import SweepPlan, TrialResult, finished_trials, plan_trials, run_sweep


def test_a_reader_sees_the_old_text_or_the_new_one_and_writers_do_not_meet(tmp_path: Path) -> None:
    path, texts = tmp_path / "report.html", {letter: letter * 200_000 for letter in "abcd"}
    replace_text(path, texts["a"])
    together, seen = threading.Barrier(5), []

    def write(letter: str) -> None:
        together.wait(60)
        for _ in range(20):
            replace_text(path, texts[letter])

    threads = [threading.Thread(target=write, args=(letter,)) for letter in texts]
    for thread in threads:
        thread.start()
    together.wait(60)
    while any(thread.is_alive() for thread in threads):
        seen.append(path.read_text())
    assert set(seen) <= set(texts.values())
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_text_that_does_not_fit_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    replace_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "report.html"
    link.symlink_to(tmp_path / "folder" / "page.html")
    replace_text(link, "page")
    assert link.is_symlink()
    assert (tmp_path / "folder" / "page.html").read_text() == "page"
    replace_text(Path(os.devnull), "page")
    assert not Path(os.devnull).is_file()


def test_a_cut_line_of_a_killed_sweep_does_not_swallow_the_next_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlora.simulation.sweep.load_config", lambda *_: None)
    monkeypatch.setattr("fedlora.simulation.sweep.config_hash", lambda _: "the same")
    monkeypatch.setattr("fedlora.simulation.sweep.ledger_file", lambda _: tmp_path / "ledger")
    plan = SweepPlan("run.yaml", seeds=(1, 2))
    first, second = plan_trials(plan)

    def run(_plan: object, trial: object, *_: object) -> TrialResult:
        return TrialResult(name=trial.name, overrides=(), seed=1, status="finished")  # type: ignore[attr-defined, call-arg]

    monkeypatch.setattr("fedlora.simulation.sweep.run_trial", run)
    (tmp_path / "trials.jsonl").write_text(json.dumps({"name": first.name})[:-4])
    run_sweep(plan, tmp_path, in_process=True)
    assert set(finished_trials(tmp_path)) == {first.name, second.name}


def test_an_audit_log_cut_by_a_power_failure_keeps_its_next_entry_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"what": "first"}\n{"what": "sec')
    for what in ("third", "fourth"):
        log = AuditLog(path)
        log.write(what)
        log.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"what": "first"}', '{"what": "sec']
    assert [json.loads(line)["what"] for line in lines[2:]] == ["third", "fourth"]
