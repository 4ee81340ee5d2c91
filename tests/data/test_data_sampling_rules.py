"""What may decide which records are drawn under privacy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlora.config import load_config
from fedlora.errors import ConfigError

RUN = Path(__file__).parent / "golden" / "run.yaml"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.sampler={type: weighted, by: label}", "training.sampler"),
        ("training.drop_last=true", "training.drop_last"),
        ("training.sampling=weighted", "training.sampling"),
        ("data.shuffle_buffer=100", "data.shuffle_buffer"),
        ("training.sampling=shuffle", "not Poisson draws"),
    ],
)
def test_h39_other_samplers_are_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RUN, [override])
    assert named in str(caught.value)


def test_h39_poisson_is_what_runs_without_saying() -> None:
    assert load_config(RUN).training.sampling == "poisson"
