from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data.metrics import (
    accuracy,
    bio_spans,
    classification_metrics,
    correlations,
    exact_match,
    extract_number,
    macro_f1,
    matthews,
    number_accuracy,
    perplexity,
    span_f1,
)

labels = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


@pytest.mark.filterwarnings("ignore:A single label")
@given(labels)
@settings(max_examples=100, deadline=None)
def test_classification_metrics_agree_with_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    truth, guess = np.array(pairs).T
    assert accuracy(truth, guess) == pytest.approx(sklearn.accuracy_score(truth, guess))
    assert macro_f1(truth, guess) == pytest.approx(
        sklearn.f1_score(truth, guess, average="macro", zero_division=0)
    )
    assert matthews(truth, guess) == pytest.approx(sklearn.matthews_corrcoef(truth, guess), abs=1e-12)


def test_metrics_by_hand() -> None:
    found = classification_metrics([0, 0, 0, 1], [0, 0, 1, 1])
    assert found["accuracy"] == 0.75
    assert found["majority"] == 0.75
    assert found["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert found["matthews"] == pytest.approx(2 / math.sqrt(12))
    assert all(math.isnan(value) for value in classification_metrics([], []).values())
    assert correlations(np.array([1.0, 2, 4]), np.array([1.0, 2, 3]))["spearman"] == pytest.approx(1.0)
    assert math.isnan(correlations(np.array([1.0, 1]), np.array([1.0, 2]))["pearson"])
    assert perplexity(math.log(4) * 3, 3) == pytest.approx(4)
    assert math.isnan(perplexity(0.0, 0))
    assert perplexity(1e9, 1) == math.inf


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48/2 = <<48/2=24>>24\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### $18.50", "18.5"),
        ("#### -3", "-3"),
        ("so -$4.00 it is", "-4"),
        ("The answer is 5. Not 7.", "5"),
        ("first 3 then 9.0", "9"),
        ("#### 0.0", "0"),
        ("0072", "72"),
        ("no number", None),
        ("", None),
        ("#### none, but 8 above", "8"),
    ],
)
def test_gsm8k_answers_are_extracted(text: str, number: str | None) -> None:
    assert extract_number(text) == number


def test_answer_scores() -> None:
    assert number_accuracy(["#### 72", "#### 5", "x"], ["It is 72.0", "4", "x"]) == pytest.approx(1 / 3)
    assert exact_match(["The  Cat.", "dog"], ["the cat", "dogs"]) == 0.5
    assert math.isnan(exact_match([], []))


def test_spans() -> None:
    assert bio_spans(["B-A", "B-A", "I-A", "I-B", "O"]) == {(0, 1, "A"), (1, 3, "A"), (3, 4, "B")}
    assert span_f1([["B-A", "I-A", "O"]], [["B-A", "I-A", "O"]]) == 1.0
    assert span_f1([["B-A", "I-A", "O"]], [["B-A", "O", "O"]]) == 0.0
    assert math.isnan(span_f1([["O"]], [["O"]]))
