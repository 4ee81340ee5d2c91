"""The live view on a terminal: what is logged meanwhile stays, a small terminal cuts no meaning, resumed runs."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from fedlora.report.live import LiveView

MEANS = {"unit": "one record", "adjacency": "add_or_remove", "adversary": "everyone", "delta": 1e-4}
MEANS |= {"accountant": "best", "sampling_assumption": "Poisson " * 20}


def _round(number, **changes):
    return {"round": number, "asked": 2, "accepted": 2, "epsilon": 0.5 * number, **changes}


@pytest.fixture
def logger():
    found = logging.getLogger("fedlora.test-live")
    found.propagate = False
    yield found
    found.propagate = True
    for handler in list(found.handlers):
        found.removeHandler(handler)


def _terminal(logger, monkeypatch):
    """Let standard error be a terminal; the logger was set up before."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    return handler, written


def test_a_warning_that_is_logged_meanwhile_is_not_drawn_over(logger, monkeypatch):
    """Handlers kept the stream from before the view: the next drawing wiped their lines."""
    handler, written = _terminal(logger, monkeypatch)
    console = Console(stderr=True, force_terminal=True, width=100, height=30)
    with LiveView(console, 3, MEANS) as view:
        assert handler.stream is not written
        assert handler.stream is sys.stderr
        view.note(_round(1))
        logger.warning("a client was left out")
        view.note(_round(2))
    assert handler.stream is sys.stderr is written
    text = written.getvalue()
    place = text.index("a client was left out")
    assert text[:place].endswith("\x1b[2K")  # the view was taken away first
    assert text[place:].startswith("a client was left out\n")
    assert "\x1b[?25h" in text[place:]  # the cursor is back


def test_a_view_that_fails_gives_the_streams_back(logger, monkeypatch):
    handler, written = _terminal(logger, monkeypatch)
    console = Console(stderr=True, force_terminal=True, width=100, height=30)
    with pytest.raises(KeyboardInterrupt), LiveView(console, 3, MEANS):
        raise KeyboardInterrupt
    assert handler.stream is sys.stderr is written
    assert written.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(("height", "shown"), [(8, 1), (13, 5), (40, 8)])
def test_a_short_terminal_shows_fewer_rounds_and_all_of_what_epsilon_means(height, shown):
    """The end of the view was cut, with the meaning of the epsilon at its top."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=height)
    view = LiveView(console, 20, MEANS)
    for number in range(1, 15):
        view.note(_round(number))
    plain = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=60, height=height)
    lines = plain.render_lines(view.view(), pad=False)
    texts = ["".join(part.text for part in line) for line in lines]
    assert len(lines) <= height
    assert sum("2/2" in text for text in texts) == shown
    assert "Poisson" in texts[-1]


def test_a_resumed_run_begins_with_the_rounds_behind_it():
    """It said "round 0" until its first round was over."""
    console = Console(file=io.StringIO(), width=120)
    earlier = [_round(number, refused={"a": "E"}) for number in range(4)]
    view = LiveView(console, 9, MEANS, earlier)
    console.print(view.view())
    said = console.file.getvalue()
    assert "round 3/9" in said
    assert "epsilon 1.5000" in said
    assert "4 refusals, 0 failures" in said
    view.note(_round(3, failed={"b": "F"}))  # trained anew after a damaged checkpoint
    console.print(view.view())
    assert "3 refusals, 1 failures" in console.file.getvalue()
    assert [one["round"] for one in view._records] == [0, 1, 2, 3]


def test_the_command_shows_a_resumed_runs_rounds(tmp_path):
    from fedlora.cli.simulate import _rounds_of

    assert list(_rounds_of(None)) == list(_rounds_of(tmp_path)) == []
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1, "epsilon": 0.5}\n{"rou')
    assert [one["round"] for one in _rounds_of(tmp_path)] == [0, 1]


class _Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment"),
    [(io.StringIO, {"FORCE_COLOR": "1", "TERM": "xterm"}), (_Screen, {"TERM": "dumb"})],
    ids=["forced colours in a log", "a terminal that only writes on"],
)
def test_where_nothing_can_be_drawn_rounds_are_lines(monkeypatch, stream, environment):
    """Forced colours drew the view into logs; a dumb terminal showed nothing until the end."""
    from fedlora.cli.simulate import progress_display
    from fedlora.simulation.settings import RoundRecord

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    with progress_display(3, quiet=False) as note:
        note(RoundRecord(1, "ok", asked=2, accepted=2, metrics={"accuracy": 0.5}, epsilon=1.0))
        assert written.getvalue() == "round 1: accuracy 0.500, epsilon 1.000, 2/2 clients\n"
    assert "\x1b" not in written.getvalue()


def test_a_terminal_gets_the_view(monkeypatch):
    from fedlora.cli.simulate import progress_display
    from fedlora.simulation.settings import RoundRecord

    monkeypatch.setenv("TERM", "xterm")
    written = _Screen()
    monkeypatch.setattr(sys, "stderr", written)
    with progress_display(3, quiet=False) as note:
        note(RoundRecord(1, "ok", asked=2, accepted=2))
    assert "round 1/3" in written.getvalue()
    assert written.getvalue().rstrip().endswith("\x1b[?25h")
