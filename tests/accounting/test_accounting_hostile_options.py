"""`fedlora account` from outside: hostile numbers in every option, options without effect, what the report lists."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlora.accounting import accountant
from fedlora.cli.main import main
from fedlora.errors import PrivacyParameterError

REALS = [
    "0",
    "-1",
    "1e-320",
    "1e-160",
    "1e-5",
    "0.5",
    "1",
    "2",
    "1e9",
    "1e160",
    "1e300",
    "inf",
    "nan",
    "1e400",
]
COUNTS = ["-1", "0", "1", "2", "8", "768", "100000", "1000000000000", "1" + "0" * 30]
RATES, CHOICE = ["--sample-rate", *REALS], ["--adjacency", "add-or-remove", "replace-one"]
FAMILIES: dict[str, list[list[str]]] = {
    "gaussian": [["--noise-multiplier", *REALS], ["--delta", *REALS], RATES, ["--steps", *COUNTS], CHOICE],
    "projection": [
        ["--width", *COUNTS],
        ["--rank", *COUNTS],
        ["--noise-multiplier", *REALS],
        ["--delta", *REALS],
        RATES,
        ["--steps", *COUNTS],
        ["--out-width", *COUNTS],
        ["--bound", "moment", "profile", "theorem5"],
        CHOICE,
    ],
    "vector": [
        ["--width", *COUNTS],
        ["--rank", *COUNTS],
        ["--alignment", *REALS, "0.999"],
        ["--delta", *REALS],
        ["--preprocess-radius", *REALS],
        ["--preprocess-delta", *REALS],
    ],
    "m1": [
        ["--width", *COUNTS],
        ["--rank", *COUNTS],
        ["--span", *COUNTS],
        ["--alignment", *REALS],
        ["--residual", *REALS],
        ["--column-distance", *REALS],
        ["--noise-std", *REALS],
        ["--delta", *REALS],
        ["--changed-columns", *COUNTS],
    ],
    "sketch": [
        ["--rank", *COUNTS],
        ["--tau", *COUNTS],
        ["--gamma", *REALS],
        ["--delta", *REALS],
        ["--layers", *COUNTS],
        ["--order", *REALS],
    ],
    "pave": [
        ["--rank", *COUNTS],
        ["--dimension", *COUNTS],
        ["--gamma", *REALS],
        ["--delta", *REALS],
        ["--order", *REALS],
    ],
    "pave-noisy": [
        ["--noise-multiplier", *REALS],
        ["--layers", *COUNTS],
        RATES,
        ["--steps", *COUNTS],
        ["--delta", *REALS],
        CHOICE,
    ],
    "calibrate gaussian": [
        ["--target-epsilon", *REALS],
        ["--delta", *REALS],
        RATES,
        ["--steps", *COUNTS],
        ["--noise-multiplier", *REALS],
        ["--solve-for", "noise_multiplier", "steps", "sample_rate", "width"],
    ],
    "calibrate projection": [
        ["--target-epsilon", *REALS],
        ["--delta", *REALS],
        ["--width", *COUNTS],
        ["--rank", *COUNTS],
        RATES,
        ["--steps", *COUNTS],
        ["--noise-multiplier", *REALS],
    ],
    "calibrate vector": [
        ["--target-epsilon", *REALS],
        ["--delta", *REALS],
        ["--width", *COUNTS],
        ["--rank", *COUNTS],
    ],
    "calibrate sketch": [
        ["--target-epsilon", *REALS],
        ["--delta", *REALS],
        ["--rank", *COUNTS],
        ["--tau", *COUNTS],
        ["--layers", *COUNTS],
    ],
    "calibrate pave": [
        ["--target-epsilon", *REALS],
        ["--delta", *REALS],
        ["--rank", *COUNTS],
        ["--dimension", *COUNTS],
    ],
}
DEFAULTS = {
    "--delta": "1e-5",
    "--width": "768",
    "--rank": "8",
    "--noise-multiplier": "1",
    "--alignment": "0.999",
    "--span": "5",
    "--residual": "0.3",
    "--column-distance": "0.05",
    "--noise-std": "2",
    "--tau": "64",
    "--gamma": "0.01",
    "--dimension": "8",
    "--layers": "4",
    "--sample-rate": "0.01",
    "--steps": "10",
    "--target-epsilon": "1",
}


def call(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(["account", *line.split(), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_number_ends_in_a_traceback(
    family: str, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    """One or two options take a hostile value, the others an ordinary one: an answer, or a code of its own."""
    options = FAMILIES[family]
    hostile = data.draw(st.sets(st.integers(0, len(options) - 1), min_size=1, max_size=2))
    words = family.split()
    for index, (name, *values) in enumerate(options):
        if index in hostile:
            words.append(f"{name}={data.draw(st.sampled_from(values))}")
        elif name in DEFAULTS:
            known = "1000" if (family, name) == ("sketch", "--gamma") else DEFAULTS[name]
            words.append(f"{name}={known}")
    code, record = call(" ".join(words), capsys)
    assert code in (0, 2, 21, 23, 24), (words, record)
    if code == 0:
        epsilon = float(record["epsilon"])
        assert epsilon >= 0.0, words


@pytest.mark.parametrize(
    "line",
    [
        "sketch --rank 8 --tau 8 --gamma 1e300 --delta 1e-5",
        "projection --width 768 --rank 8 --noise-multiplier 1e-160 --delta 1e-5",
        "pave-noisy --noise-multiplier 1e160 --layers 1000000000000 --sample-rate 1e-12 --steps 3 --delta 0.5",
    ],
)
def test_numbers_beyond_double_precision_have_the_code_of_invalid_parameters(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(line, capsys)[0] == PrivacyParameterError.exit_code


def test_a_billion_steps_end(capsys: pytest.CaptureFixture[str]) -> None:
    """dp_accounting raises the size of a small distribution to the power of the count: never with 1e9."""
    line = "gaussian --noise-multiplier 50 --sample-rate 0.999 --steps 1000000000 --delta 0.01"
    code, record = call(line, capsys)
    assert code == 0
    assert record["epsilon"] < 1e7


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("projection --group a:768:8:1:0.5 --noise-multiplier 3 --delta 1e-5", "--noise-multiplier"),
        ("projection --width 768 --rank 8 --noise-multiplier 1 --clip shared --delta 1e-5", "--clip"),
        ("projection --group a:768:8:1:1 --group h:none:5:1:1 --clip shared --delta 1e-5", "RANK"),
        ("projection --width 768 --rank 8 --noise-multiplier 1 --delta 1e-5 --sweep steps:1:2:3", "--sweep"),
        (
            "projection --width 768 --rank 8 --noise-multiplier 1 --delta 1e-5 --bound profile --accountant rdp",
            "--bound profile",
        ),
        (
            "vector --width 400 --rank 32 --alignment 0.99 --delta 0.01 --preprocess-delta 0.001",
            "--preprocess-delta",
        ),
        (
            "vector --width 400 --rank 32 --alignment 0.99 --delta 0.01 --preprocess-radius 9 --preprocess-delta 0.01",
            "--preprocess-delta",
        ),
        (
            "vector --width 400 --rank 32 --alignment 0.99 --delta 0.01 --preprocess-radius 9",
            "--preprocess-delta",
        ),
        ("calibrate gaussian --target-epsilon 1 --delta 1e-5 --noise-multiplier 1", "--noise-multiplier"),
        (
            "calibrate gaussian --target-epsilon 1 --delta 1e-5 --noise-multiplier 1 --solve-for steps --steps 3",
            "--steps",
        ),
        ("calibrate projection --target-epsilon 1 --delta 1e-5 --group a:768:8:1:0.5", "--group"),
        ("pave --layer 8:8:0.1 --delta 1e-5 --plot /tmp/never.svg", "--plot"),
    ],
)
def test_options_without_effect_are_refused_by_name(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = call(line, capsys)
    assert code == PrivacyParameterError.exit_code
    assert named in record["message"]


def test_plots_that_cannot_be_written_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in (tmp_path, tmp_path / "missing" / "x.svg"):
        assert call(f"gaussian --noise-multiplier 1 --delta 1e-5 --plot {target}", capsys)[0] == 2


def test_the_report_lists_every_group_and_its_clip(capsys: pytest.CaptureFixture[str]) -> None:
    line = "projection --group a:768:8:1:0.5 --group head:none::0.5:8 --clip separate --sample-rate 0.01 --delta 1e-5"
    for family in (
        line,
        line.replace("projection", "calibrate projection --target-epsilon 1", 1).replace(":0.5 ", ": "),
    ):
        code, record = call(family, capsys)
        assert code == 0
        groups = record["parameters"]["groups"]
        assert [(g["name"], g["width"], g["rank"]) for g in groups] == [("a", 768, 8), ("head", None, None)]
        assert groups[1]["kappa"] == pytest.approx(0.25)
        assert record["parameters"]["clip"] == "separate"


def test_the_bound_says_which_one_gave_the_figure(capsys: pytest.CaptureFixture[str]) -> None:
    separate = (
        "projection --group a:768:8:1:0.2 --group h:none::1:5 --clip separate --sample-rate 0.01 --steps 99"
    )
    code, record = call(f"{separate} --delta 1e-5 --bound profile", capsys)
    assert (code, record["bound"], record["bound_asked"]) == (0, "profile", "profile")
    assert record["accountant"].startswith("projection profile")
    assert call(f"{separate} --delta 1e-14 --bound profile", capsys)[0] == 23
    few = "projection --width 768 --rank 8 --noise-multiplier 1 --sample-rate 0.01 --steps 10 --delta 1e-5"
    record = call(f"{few} --adjacency replace-one", capsys)[1]
    assert record["bound"] == "rare_projections"
    one = call(f"{few} --out-width 1", capsys)[1]
    published = call(f"{few} --out-width 1 --bound theorem5", capsys)[1]
    assert one["epsilon"] <= published["epsilon"]


@pytest.mark.parametrize("what", ["noise_multiplier", "steps", "sample_rate"])
@pytest.mark.parametrize("tool", ["best", "rdp", "pld"])
def test_calibration_takes_few_distributions_and_meets_the_target(
    what: str, tool: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool asked for is the one that is met; a full evaluation takes half a second, so few are allowed."""
    given_ = {"noise_multiplier": "1", "steps": "100", "sample_rate": "0.01"}
    line = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in given_.items() if k != what)
    seen: list[float] = []
    real = accountant._evaluate
    accountant.clear_caches()

    def counted(*arguments: Any) -> Any:
        seen.append(arguments[4])
        return real(*arguments)

    monkeypatch.setattr(accountant, "_evaluate", counted)
    code, record = call(
        f"calibrate gaussian --target-epsilon 1.5 --delta 1e-6 --solve-for {what} {line} --accountant {tool}",
        capsys,
    )
    assert code == 0
    assert 1.5 * (1 - 2e-3) <= record["epsilon"] <= 1.5
    assert sum(1 for coarse in seen if coarse == 1.0) <= 10
    assert math.isfinite(record[what])
