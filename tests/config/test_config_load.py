"""Loading: every problem at once, with key and line; numbers, open values, precedence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_sample import SAMPLE
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.config import (
    config_container,
    config_from_container,
    config_hash,
    load,
    load_config,
    save_resolved,
    split_overrides,
)
from fedlora.config.migrate import migrate
from fedlora.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(SAMPLE)
    return path


def changed(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def problems(file: Path, *overrides: str, **arguments: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, **arguments)  # type: ignore[arg-type]
    assert caught.value.exit_code != 0
    return caught.value.problems


def line_of(file: Path, text: str) -> int:
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_the_sample_loads_and_is_frozen(file: Path) -> None:
    config = load_config(file)
    assert config.privacy.target_epsilon == 8.0
    with pytest.raises(ValueError, match="frozen"):
        config.privacy.target_epsilon = 9.0  # type: ignore[misc]


SPELLINGS = [
    ("1e-5", 1e-5),
    ("1E-5", 1e-5),
    (".5e-3", 5e-4),
    ("5.e-4", 5e-4),
    ("+1e-5", 1e-5),
    ("0.00001", 1e-5),
]


@pytest.mark.parametrize(("text", "value"), SPELLINGS)
def test_h36_scientific_notation_is_the_same_number_by_every_route(
    file: Path, text: str, value: float
) -> None:
    by_override = load_config(file, [f"training.optimizer.lr={text}"])
    by_run_config = load_config(file, split_overrides(f"training.optimizer.lr={text} run.name=x"))
    overlay = file.with_name("over.yaml")
    overlay.write_text(f"training:\n  optimizer:\n    lr: {text}\n")
    by_overlay = load_config(file, overlays=[overlay])
    by_file = load_config(changed(file, "lr: 3.0e-3", f"lr: {text}"))
    for config in (by_override, by_run_config, by_overlay, by_file):
        assert config.training.optimizer.lr == value
        assert isinstance(config.training.optimizer.lr, float)


@pytest.mark.parametrize("text", ["'1e-5'", '"1E-5"', "'.5e-3'"])
def test_h36_a_quoted_number_is_refused_with_key_and_line(file: Path, text: str) -> None:
    changed(file, "lr: 3.0e-3", f"lr: {text}")
    (found,) = problems(file)
    assert "training.optimizer.lr" in found
    assert "without quotes" in found
    assert f"conf.yaml:{line_of(file, 'lr:')}" in found
    assert problems(file, f"training.optimizer.lr={text}")


@pytest.mark.parametrize(("text", "what"), [("010", "base 8"), ("1:30", "base 8 or 60"), ("0_7", "base 8")])
def test_h36_numbers_in_base_8_and_60_are_refused(file: Path, text: str, what: str) -> None:
    assert any(what in one for one in problems(changed(file, "rounds: 60", f"rounds: {text}")))


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400"])
@pytest.mark.parametrize("key", ["privacy.max_grad_norm", "adapter.lora_alpha", "training.optimizer.lr"])
def test_numbers_that_are_not_finite_are_refused_by_name(file: Path, key: str, value: str) -> None:
    assert any(one.startswith(f"{key}:") for one in problems(file, f"{key}={value}"))


def test_h37_all_open_values_are_listed_at_once(file: Path) -> None:
    changed(file, "target_delta: 1.0e-4", "target_delta: '???'")
    changed(file, "target_epsilon: 8.0", "target_epsilon: ${vars.eps}")
    changed(file, "label: label}", 'label: "${oc.env:FEDLORA_NOPE}"}')
    file.write_text(file.read_text() + "vars:\n  eps: ???\n")
    found = problems(file)
    for key in ("privacy.target_delta", "privacy.target_epsilon", "data.columns.label", "vars.eps"):
        assert any(one.startswith(f"{key}:") for one in found), (key, found)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("rank: 8", "rank: '???'", "adapter.rank"),
        ("[query, value]", "[query, '???']", "adapter.target_modules.1"),
        ("name: news-2026", 'name: "${data.missing}"', "data.name"),
    ],
)
def test_h37_open_values_anywhere_are_refused_by_full_key(file: Path, old: str, new: str, key: str) -> None:
    assert any(one.startswith(f"{key}:") for one in problems(changed(file, old, new)))


def test_h37_an_open_value_that_yaml_cannot_read_says_what_to_do(file: Path) -> None:
    (found,) = problems(changed(file, "rank: 8", "rank: ???"))
    assert "quote ???" in found
    assert f"conf.yaml:{line_of(file, 'rank:')}" in found


@pytest.mark.parametrize("key", ["privacy.target_delta", "federation.rounds", "privacy", "data.max_length"])
def test_h37_an_open_value_of_a_higher_layer_is_refused_and_never_falls_back(file: Path, key: str) -> None:
    assert any(
        one.startswith(f"{key}: is still open") and "command line" in one
        for one in problems(file, f"{key}=???")
    )
    overlay = file.with_name("over.yaml")
    *sections, last = key.split(".")
    lines = [
        *(f"{'  ' * depth}{name}:" for depth, name in enumerate(sections)),
        f"{'  ' * len(sections)}{last}: ???",
    ]
    overlay.write_text("\n".join(lines))
    found = problems(file, overlays=[overlay])
    assert any(
        one.startswith(f"{key}: is still open") and f"over.yaml:{len(lines)}" in one for one in found
    ), found


def test_h37_an_open_value_that_a_higher_layer_fills_is_used(file: Path) -> None:
    changed(file, "target_delta: 1.0e-4", "target_delta: ???")
    assert load_config(file, ["privacy.target_delta=1e-4"]).privacy.target_delta == 1e-4


def test_keys_behind_a_merge_key_have_the_line_of_their_anchor(file: Path) -> None:
    changed(file, "schema: 1", "vars: {o: &o {kind: adam, lrr: 1.0}}\nschema: 1")
    changed(file, "optimizer: {kind: adam, lr: 3.0e-3}", "optimizer: {<<: *o, lr: -1.0}")
    found = problems(file)
    assert any("training.optimizer.lrr: unknown key" in one and "(conf.yaml:1)" in one for one in found), (
        found
    )
    place = f"(conf.yaml:{line_of(file, 'optimizer')})"
    assert any(one.startswith("training.optimizer.lr: ") and one.endswith(place) for one in found), found


@pytest.mark.parametrize("key", ["yes", "no", "on", "true", "~", "null"])
def test_a_key_that_yaml_reads_as_no_text_is_refused_as_it_was_written(file: Path, key: str) -> None:
    file.write_text(SAMPLE.replace("{text: text,", f"{{{key}: text,"))
    (found,) = problems(file)
    assert found.startswith(f"data.columns.{key}: ")
    assert "quotes" in found
    assert f"conf.yaml:{line_of(file, 'columns')}" in found


def test_every_interpolation_that_cannot_be_read_has_its_key_and_line(file: Path) -> None:
    changed(file, "name: demo,", 'name: "${run.seed",')
    changed(file, "name: news-2026", 'name: "${oc.env:A"')
    found = problems(file)
    assert [one.partition(":")[0] for one in found] == ["data.name", "run.name"]
    assert all(
        f"conf.yaml:{line_of(file, name)}" in one
        for name, one in zip(("oc.env", "run.seed"), found, strict=True)
    )


def test_aliases_of_aliases_are_refused_in_time(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    levels = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    path.write_text("\n".join(["vars:", "  a0: &a0 [x]", *levels, SAMPLE]))
    assert problems(path)


def test_interpolations_that_resolve_are_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLORA_TEST_NAME", "from-env")
    changed(file, "name: demo,", 'name: "${oc.env:FEDLORA_TEST_NAME}",')
    changed(file, "target_epsilon: 8.0", "target_epsilon: ${privacy.budget.epsilon}")
    config = load_config(file)
    assert (config.run.name, config.privacy.target_epsilon) == ("from-env", 8.0)


def test_h38_precedence_is_file_overlay_command_line_and_is_shown(file: Path) -> None:
    overlay = file.with_name("over.yaml")
    overlay.write_text("federation:\n  rounds: 7\n  min_replies: 5\n")
    loaded = load(file, ["federation.rounds=9", "federation.rounds=11"], [overlay])
    assert (loaded.config.federation.rounds, loaded.config.federation.min_replies) == (11, 5)
    shown = "\n".join(loaded.overridden())
    assert (
        "federation.rounds = 11 from command line, over 9 from command line, 7 from over.yaml:2, 60" in shown
    )
    assert "federation.min_replies = 5 from over.yaml:3, over 6 from conf.yaml" in shown


def test_h38_an_override_reaches_the_resolved_file_and_the_wire(file: Path, tmp_path: Path) -> None:
    overrides = ["privacy.noise_multiplier=4.0", "privacy.target_epsilon=null", "run.name=my-run"]
    config = load_config(file, overrides)
    again = load_config(save_resolved(config, tmp_path / "resolved.yaml"))
    over_wire = config_from_container(json.loads(json.dumps(config_container(config))))
    assert again == over_wire == config
    assert config_hash(again) == config_hash(over_wire) == config_hash(config)
    assert again.privacy.noise_multiplier == 4.0


@pytest.mark.parametrize(
    "text", ["privacy.target_epsilon 3", "=3", "a..b=3", "run.name=[1", "run.name=", ".a=1"]
)
def test_h38_bad_override_syntax_is_one_line(file: Path, text: str) -> None:
    (found,) = problems(file, text)
    assert "\n" not in found
    assert "command line" in found


def test_unquoted_text_with_spaces_is_a_text(file: Path) -> None:
    assert load_config(file, ["data.template=Topic of {text}"]).data.template == "Topic of {text}"


def test_every_problem_is_listed_with_key_and_place(file: Path) -> None:
    changed(file, "rank: 8", "ranks: 8")
    changed(file, "max_grad_norm: 1.0", "max_grad_norm: -1.0")
    changed(file, "kind: lora_fa", "kind: lora_fb")
    found = problems(file, "federation.roundz=3", "run.seed=true")
    expected = {
        "adapter.ranks": f"conf.yaml:{line_of(file, 'ranks')}",
        "adapter.rank": f"conf.yaml:{line_of(file, 'ranks')}",
        "privacy.max_grad_norm": f"conf.yaml:{line_of(file, 'max_grad_norm')}",
        "mechanism.kind": f"conf.yaml:{line_of(file, 'lora_fb')}",
        "federation.roundz": "command line",
        "run.seed": "command line",
    }
    for key, place in expected.items():
        assert any(one.startswith(f"{key}: ") and place in one for one in found), (key, found)
    assert any("did you mean adapter.rank?" in one for one in found)
    assert any("did you mean federation.rounds?" in one for one in found)


@pytest.mark.parametrize("override", ["privacy=null", "mechanism=null", "training=null"])
def test_a_section_that_is_null_is_refused(file: Path, override: str) -> None:
    found = problems(file, override)
    key = override.partition("=")[0]
    assert any(one.startswith(f"{key}: null is not allowed") for one in found), found


@pytest.mark.parametrize(
    "key", ["adjacency", "target_delta", "max_grad_norm", "noise_source", "budget", "unit", "target_epsilon"]
)
def test_no_privacy_parameter_has_a_silent_default(file: Path, key: str) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"  {key}:")]
    file.write_text("\n".join(lines))
    assert any(key in one for one in problems(file))


@pytest.mark.parametrize("key", ["epsilon", "delta", "on_exhausted"])
def test_no_part_of_the_budget_has_a_default(file: Path, key: str) -> None:
    budget = {"epsilon": "8.0", "delta": "1.0e-4", "on_exhausted": "refuse"}
    del budget[key]
    left = ", ".join(f"{name}: {value}" for name, value in budget.items())
    changed(file, "budget: {epsilon: 8.0, delta: 1.0e-4, on_exhausted: refuse}", f"budget: {{{left}}}")
    assert any(one.startswith(f"privacy.budget.{key}: missing") for one in problems(file))


def test_a_changed_kind_drops_the_old_kinds_keys_and_says_so(file: Path) -> None:
    loaded = load(file, ["privacy.unit=none", "mechanism.kind=none", "federation.aggregation.kind=product"])
    assert loaded.config.privacy.unit == "none"
    assert any("privacy.max_grad_norm" in note and "dropped" in note for note in loaded.notes)
    assert any("no privacy" in note for note in loaded.notes)


def test_keys_given_together_with_a_changed_kind_are_never_dropped(file: Path) -> None:
    assert any(
        "privacy.max_grad_norm" in one for one in problems(file, "privacy={unit: none, max_grad_norm: 1.0}")
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\xff\xfes\x00c\x00", "UTF-8"),
        (b"run: {}\nrun: {}\n", "duplicate"),
        (b"- a\n- b\n", "key: value"),
        (b"run: [1\n", "not valid YAML"),
        (b"just text\n", "key: value"),
    ],
)
def test_files_that_are_no_configuration_are_refused_in_one_line(
    tmp_path: Path, content: bytes, what: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    (found,) = problems(path)
    assert what in found
    assert "bad.yaml" in found


def test_a_missing_file_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "none.yaml")[0]
    (tmp_path / "empty.yaml").write_text("")
    assert any("schema" in one for one in problems(tmp_path / "empty.yaml"))


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SAMPLE.replace("\n", "\r\n").encode())
    assert load_config(path).run.name == "demo"


@pytest.mark.parametrize("version", ["2", "0", "'1'", "true", "1.0"])
def test_other_schema_versions_are_refused(file: Path, version: str) -> None:
    found = problems(changed(file, "schema: 1", f"schema: {version}"))
    assert any(one.startswith("schema:") and "conf.yaml:1" in one for one in found)


def test_an_older_schema_is_migrated_step_by_step() -> None:
    steps = {1: lambda c: {**c, "b": c["a"]}, 2: lambda c: {**c, "c": c["b"] + 1}}
    before = {"schema": 1, "a": 1}
    after, notes, found = migrate(before, migrations=steps, current=3)
    assert after == {"schema": 3, "a": 1, "b": 1, "c": 2}
    assert (len(notes), found, before) == (2, [], {"schema": 1, "a": 1})


def test_secrets_do_not_appear_in_messages(file: Path) -> None:
    url = "data.source={kind: sql, url: 'postgresql://u:hunter2@db/x', query: 3}"
    assert "hunter2" not in "\n".join(problems(file, url, "data.source.url=7"))


def test_a_key_with_a_dot_keeps_its_line(file: Path) -> None:
    changed(
        file,
        "modules_to_save: [classifier]}",
        "modules_to_save: [classifier], rank_pattern: {layers.0.q: x}}",
    )
    (found,) = problems(file)
    assert found.startswith("adapter.rank_pattern[layers.0.q]")


def test_the_hash_does_not_depend_on_how_a_value_was_written(file: Path) -> None:
    first = config_hash(load_config(file))
    changed(file, "target_delta: 1.0e-4", "target_delta: 0.0001")
    assert config_hash(load_config(file)) == first
    assert config_hash(load_config(file, ["run.seed=43"])) != first


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "schema",
                        "run",
                        "privacy",
                        "unit",
                        "kind",
                        "budget",
                        "training",
                        "data",
                        "source",
                        "x.y",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_container_gives_a_list_of_problems_and_never_another_error(value: object) -> None:
    container = value if isinstance(value, dict) else {"run": value}
    with pytest.raises(ConfigError):
        config_from_container(container)
