"""`fedlora account`: stable keys, one JSON object, exit codes, plots."""

from __future__ import annotations

import html
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlora.accounting import plot
from fedlora.cli import account_table
from fedlora.cli.account import app
from fedlora.errors import FedLoraError, PrivacyParameterError

KEYS = {
    "epsilon",
    "delta",
    "accountant",
    "adjacency",
    "conditions",
    "num_events",
    "unit",
    "alternatives",
    "parameters",
}


def run(line: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*line.split(), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    assert set(data) >= KEYS
    return data


def test_gaussian_and_human_text() -> None:
    line = "gaussian --sample-rate 1.0 --noise-multiplier 10 --steps 100 --delta 1e-5"
    assert run(line)["epsilon"] == pytest.approx(4.377178, rel=1e-6)
    assert run(line + " --adjacency replace-one")["epsilon"] == pytest.approx(9.997256, rel=1e-6)
    assert run(line + " --accountant rdp")["accountant"] == "Renyi moments"
    text = CliRunner().invoke(app, line.split()).output
    assert text.startswith("epsilon 4.37718 at delta 1e-05")
    assert run("gaussian --noise-multiplier 0 --delta 1e-5")["epsilon"] == "inf"


def test_projection_bounds() -> None:
    line = (
        "projection --width 768 --rank 8 --noise-multiplier 0.2 --sample-rate 0.01 --steps 1000 --delta 1e-5"
    )
    ours = run(line)
    assert ours["epsilon"] == pytest.approx(1.8564517, rel=1e-6)
    published = run(line + " --bound theorem5 --out-width 768 --accountant rdp")
    assert published["epsilon"] == pytest.approx(6.43, abs=0.01)
    one = run(
        "projection --width 2000 --rank 16 --noise-multiplier 0.5 --delta 1e-5 --out-width 10 --bound theorem5"
    )
    assert one["epsilon"] == pytest.approx(1.588, abs=2e-3)
    with pytest.raises(PrivacyParameterError, match="bound"):
        run(line + " --bound other")


def test_groups_and_the_refusal_of_one_clip_over_all() -> None:
    layer, head = "--group layer:768:8:1:0.5", "--group head:none::1:5"
    tail = "--sample-rate 0.01 --steps 10 --delta 1e-5"
    with pytest.raises(PrivacyParameterError, match="--clip"):
        run(f"projection {layer} {head} {tail}")
    shared = run(f"projection {layer} {head.replace(':5', ':0.5')} --clip shared {tail}")
    separate = run(f"projection {layer} {head} --clip separate {tail}")
    alone = run(f"projection {layer} {tail}")
    assert alone["epsilon"] < separate["epsilon"] < shared["epsilon"]
    for bad in ("x", "a:b:c:1:1", "a:8:2:0:1", "a:8:9:1:1", "a:8:2:1:nan"):
        with pytest.raises(FedLoraError):
            run(f"projection --group {bad} {tail}")
    with pytest.raises(PrivacyParameterError):
        run(f"projection --width 8 --rank 2 {layer} {tail}")
    with pytest.raises(PrivacyParameterError):
        run(f"projection --width 8 {tail}")


def test_conditional_families_print_their_conditions() -> None:
    for line in (
        "vector --width 400 --rank 32 --alignment 0.999 --delta 0.01",
        "vector --width 400 --rank 32 --alignment 0.3 --delta 0.01 --preprocess-radius 60 --preprocess-delta 0.001",
        "m1 --width 60 --rank 20 --span 5 --alignment 0.999 --residual 0.3 --column-distance 0.05 --noise-std 2 "
        "--delta 1e-3",
        "sketch --rank 16 --tau 64 --gamma 1000 --delta 1e-5 --order 2",
        "pave --rank 8 --dimension 8 --gamma 0.01 --delta 1e-5 --order 2",
        "pave --layer 8:8:0.01 --layer 4:4:0.02 --delta 1e-5",
    ):
        data = run(line)
        assert any("secret" in text for text in data["conditions"])
        assert data["adjacency"] == "replace_one"
        assert 0 < data["epsilon"] < math.inf
    pave = run("pave --rank 8 --dimension 8 --gamma 0.01 --delta 1e-5 --order 2")
    assert pave["alternatives"]["theorem_3_5_order_2"] == pytest.approx(11.516125625, rel=1e-9)
    assert pave["renyi"]["divergence"] == pytest.approx(-32 * math.log1p(-1e-4), rel=1e-9)
    assert pave["risk"]["gain_increase"] == pave["risk"]["advantage_total_variation"] / 2
    sketch = run("sketch --rank 16 --tau 64 --gamma 1000 --delta 1e-5")
    assert sketch["epsilon"] <= sketch["alternatives"]["corollary_7_3_proposition_4_4"]


def test_pave_with_noise_shows_the_printed_claim_as_no_bound() -> None:
    data = run("pave-noisy --noise-multiplier 8 --layers 4 --sample-rate 1 --steps 3 --delta 1e-5")
    assert "theorem_3_9_as_printed" in data["not_a_bound"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("gaussian --target-epsilon 3 --delta 1e-5 --noise-multiplier 10 --solve-for steps", "steps"),
        ("gaussian --target-epsilon 3 --delta 1e-5 --steps 10", "noise_multiplier"),
        ("pave --target-epsilon 0.5 --delta 1e-5 --rank 8 --dimension 8", "gamma"),
        ("sketch --target-epsilon 3 --delta 1e-5 --rank 16 --tau 64", "gamma"),
    ],
)
def test_the_text_of_a_calibration_begins_with_the_value_found(line: str, name: str) -> None:
    """The text named what was solved for without its value, except for noise."""
    text = CliRunner().invoke(app, f"calibrate {line}".split()).output
    assert text.startswith(f"{name} {run(f'calibrate {line}')[name]}\nepsilon ")


def test_a_target_that_sampling_alone_meets_is_answered_with_a_warning() -> None:
    line = "calibrate gaussian --target-epsilon 1000 --delta 0.1 --sample-rate 0.01 --steps 10"
    data = run(line)
    assert data["epsilon"] == 0.0
    assert any(text.startswith("warning: delta is at least the chance") for text in data["conditions"])
    assert "warning: delta is at least the chance" in CliRunner().invoke(app, line.split()).output
    assert not any("warning" in text for text in run(line.replace("0.1 ", "0.01 "))["conditions"])


def test_calibrate_families() -> None:
    g = run("calibrate gaussian --target-epsilon 3 --delta 1e-5 --steps 10")
    assert g["epsilon"] <= 3.0
    assert g["solved"] == "noise_multiplier"
    s = run("calibrate gaussian --target-epsilon 3 --delta 1e-5 --noise-multiplier 10 --solve-for steps")
    assert s["steps"] == s["num_events"]
    assert (
        run("calibrate projection --target-epsilon 2 --delta 1e-5 --width 768 --rank 8 --steps 3")["epsilon"]
        <= 2.0
    )
    assert run("calibrate pave --target-epsilon 0.5 --delta 1e-5 --rank 8 --dimension 8")["epsilon"] <= 0.5
    assert run("calibrate sketch --target-epsilon 3 --delta 1e-5 --rank 16 --tau 64")["epsilon"] <= 3.0
    assert run("calibrate vector --target-epsilon 1 --delta 0.01 --width 40 --rank 8")["epsilon"] <= 1.0
    with pytest.raises(PrivacyParameterError):
        run("calibrate gaussian --target-epsilon 3 --delta 1e-5 --solve-for width")
    with pytest.raises(PrivacyParameterError):
        run("calibrate gaussian --target-epsilon 3 --delta 1e-5 --solve-for steps")


@pytest.mark.parametrize(
    "line",
    [
        "gaussian --noise-multiplier nan --delta 1e-5",
        "gaussian --noise-multiplier inf --delta 1e-5",
        "gaussian --noise-multiplier -1 --delta 1e-5",
        "gaussian --noise-multiplier 1 --delta 0",
        "gaussian --noise-multiplier 1 --delta 1",
        "gaussian --noise-multiplier 1 --delta 1e-5 --steps 0",
        "gaussian --noise-multiplier 1 --delta 1e-5 --sample-rate 1.5",
        "gaussian --noise-multiplier 1 --delta 1e-5 --adjacency other",
        "gaussian --noise-multiplier 1 --delta 1e-5 --accountant other",
        "projection --width 8 --rank 9 --noise-multiplier 1 --delta 1e-5",
        "vector --width 8 --rank 2 --alignment 1.1 --delta 1e-5",
        "sketch --rank 8 --tau 2 --gamma 1 --delta 1e-5",
        "pave --rank 8 --dimension 2 --gamma 1 --delta 1e-5",
        "pave --rank 8 --delta 1e-5",
    ],
)
def test_bad_values_raise_privacy_errors(line: str) -> None:
    with pytest.raises(PrivacyParameterError) as caught:
        run(line)
    assert caught.value.exit_code == 21


def test_plots_draw_the_alternatives(tmp_path: Path) -> None:
    target = tmp_path / "vector.svg"
    data = run(
        f"vector --width 40 --rank 8 --alignment 0.999 --delta 0.01 --sweep rank:1:8:4 --plot {target}"
    )
    assert data["plot"] == str(target)
    root = ElementTree.fromstring(target.read_text())
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {"exact profile", "Theorem 1", "rank"} <= set(texts)
    chart = tmp_path / "projection.svg"
    run(
        f"projection --width 200 --rank 8 --noise-multiplier 0.5 --delta 1e-5 "
        f"--sweep noise_multiplier:0.5:2:3 --plot {chart}"
    )
    assert "Theorem 5" in chart.read_text()
    with pytest.raises(PrivacyParameterError, match="sweep"):
        run(f"pave --rank 8 --dimension 8 --gamma 0.1 --delta 1e-5 --sweep colour:1:2:3 --plot {chart}")


def test_chart_escapes_and_leaves_gaps() -> None:
    text = plot.svg("<a & b>", "x", [1.0, 2.0, 3.0], {"c<d": [1.0, math.inf, 200.0]}, log_x=True)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "inf" not in text


@pytest.mark.parametrize(
    ("rate", "sampling"),
    [((), "none: that unit may be in every release"), (("--sample-rate", "0.1"), "at rate 0.1")],
)
def test_every_figure_states_unit_adversary_and_sampling(
    tmp_path: Path, rate: tuple[str, ...], sampling: str
) -> None:
    chart = tmp_path / "chart.svg"
    options = ["gaussian", "--noise-multiplier", "1", "--delta", "1e-5", "--steps", "3", *rate]
    said = json.loads(CliRunner().invoke(app, [*options, "--json", "--plot", str(chart)]).output)
    assert all(said[name] for name in ("unit", "adversary", "accountant"))
    assert said["adjacency"] == "add_or_remove"
    assert said["sampling_assumption"].endswith(sampling)
    assert f"sampling:   {said['sampling_assumption']}" in CliRunner().invoke(app, options).output
    drawn = html.unescape(chart.read_text())
    for word in ("delta 1e-05", "add_or_remove", "per clipped unit", "who sees all releases", sampling):
        assert word in drawn


def test_the_table_states_what_its_figures_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict.fromkeys(account_table._COLUMNS, 1.0)
    monkeypatch.setattr(account_table.measured, "table", lambda delta: [row])
    said = json.loads(CliRunner().invoke(app, ["table", "--delta", "1e-6", "--json"]).output)
    text = CliRunner().invoke(app, ["table", "--delta", "1e-6"]).output
    for name in ("delta", "unit", "adjacency", "adversary", "accountant", "sampling_assumption"):
        assert f"{name.replace('_', ' ')}: {said[name]}" in text
