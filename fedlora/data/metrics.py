"""Metrics on public records, written with numpy and scipy; undefined values are NaN, never 0."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LOWER_IS_BETTER: Final = frozenset({"loss", "perplexity"})
"""Metrics of which less is better."""


def accuracy(truth: Ints, guess: Ints) -> float:
    """Return the share of equal entries.

    Example:
        >>> accuracy(np.array([0, 1]), np.array([0, 0]))
        0.5
    """
    return float(np.mean(truth == guess)) if truth.size > 0 else math.nan


def macro_f1(truth: Ints, guess: Ints) -> float:
    """Return the unweighted mean F1 over the labels that occur in truth or guess.

    Example:
        >>> round(macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1])), 4)
        0.6667
    """
    if truth.size == 0:
        return math.nan
    scores = []
    for label in np.union1d(truth, guess):
        hits = int(np.sum((truth == label) & (guess == label)))
        total = int(np.sum(truth == label) + np.sum(guess == label))
        scores.append(2 * hits / total)
    return float(np.mean(scores))


def matthews(truth: Ints, guess: Ints) -> float:
    """Return the (multi-class) Matthews correlation; 0 if truth or guess is constant.

    Reference: Gorodkin, "Comparing two K-category assignments by a K-category correlation
    coefficient", 2004, Eq. 8.

    Example:
        >>> matthews(np.array([0, 1, 1, 0]), np.array([0, 1, 1, 0]))
        1.0
    """
    if truth.size == 0:
        return math.nan
    labels = np.union1d(truth, guess)
    true_counts = np.array([np.sum(truth == label) for label in labels], dtype=np.float64)
    guess_counts = np.array([np.sum(guess == label) for label in labels], dtype=np.float64)
    size, hits = float(truth.size), float(np.sum(truth == guess))
    cover = hits * size - float(true_counts @ guess_counts)
    spread = (size**2 - float(guess_counts @ guess_counts)) * (size**2 - float(true_counts @ true_counts))
    return cover / math.sqrt(spread) if spread > 0 else 0.0


def correlations(truth: Floats, guess: Floats) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation (NaN below two records or for constants)."""
    from scipy import stats

    if truth.size < 2 or np.ptp(truth) == 0 or np.ptp(guess) == 0:
        return {"pearson": math.nan, "spearman": math.nan}
    return {
        "pearson": float(stats.pearsonr(truth, guess).statistic),
        "spearman": float(stats.spearmanr(truth, guess).statistic),
    }


def classification_metrics(truth: Sequence[int], guess: Sequence[int]) -> dict[str, float]:
    """Return accuracy, macro_f1, matthews and the majority label's share."""
    true, guessed = np.asarray(truth, dtype=np.int64), np.asarray(guess, dtype=np.int64)
    majority = float(np.unique(true, return_counts=True)[1].max() / true.size) if true.size > 0 else math.nan
    return {
        "accuracy": accuracy(true, guessed),
        "macro_f1": macro_f1(true, guessed),
        "matthews": matthews(true, guessed),
        "majority": majority,
    }


def perplexity(nll_sum: float, tokens: float) -> float:
    """Return exp(mean negative log-likelihood per token); infinity beyond floats.

    Example:
        >>> perplexity(0.0, 3)
        1.0
    """
    if not (tokens > 0):
        return math.nan
    try:
        return math.exp(nll_sum / tokens)
    except OverflowError:
        return math.inf


def normalise_answer(text: str) -> str:
    """Return a text as exact match compares it: NFC, lower case, single blanks, no final full stop."""
    return " ".join(unicodedata.normalize("NFC", text).lower().split()).rstrip(".").strip()


def exact_match(truth: Sequence[str], guess: Sequence[str]) -> float:
    """Return the share of answers that agree after normalisation."""
    pairs = list(zip(truth, guess, strict=True))
    hits = sum(normalise_answer(want) == normalise_answer(got) for want, got in pairs)
    return hits / len(pairs) if pairs else math.nan


_NUMBER = re.compile(r"-?\$?-?\d[\d,]*(?:\.\d+)?|-?\$?-?\.\d+")


def extract_number(text: str) -> str | None:
    """Return the final answer of a worked solution as a plain number, or None.

    The number after the last "####" counts (the GSM8K convention), else the one after the last
    "answer is", else the last number. Thousands separators, currency signs and a fraction of
    zeros are dropped.

    Example:
        >>> extract_number("48 + 24 = 72 clips. #### 1,072.00")
        '1072'
    """
    for marker in ("####", "answer is"):
        where = text.lower().rfind(marker)
        if where >= 0:
            found = _NUMBER.search(text, where + len(marker))
            if found is not None:
                return _plain_number(found.group())
    numbers = _NUMBER.findall(text)
    return _plain_number(numbers[-1]) if numbers else None


def _plain_number(text: str) -> str:
    plain = text.replace(",", "").replace("$", "")
    sign, digits = ("-", plain.lstrip("-")) if plain.startswith("-") else ("", plain)
    whole, _, fraction = digits.partition(".")
    fraction = fraction.rstrip("0")
    number = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return number if number == "0" else sign + number


def number_accuracy(truth: Sequence[str], guess: Sequence[str]) -> float:
    """Return the share of generated solutions whose final number is right; no number is wrong."""
    pairs = [(extract_number(want), extract_number(got)) for want, got in zip(truth, guess, strict=True)]
    return sum(want is not None and want == got for want, got in pairs) / len(pairs) if pairs else math.nan


def span_f1(truth: Sequence[Sequence[str]], guess: Sequence[Sequence[str]]) -> float:
    """Return micro F1 over labelled spans in BIO tags (exact boundaries and type)."""
    hits = wanted = found = 0
    for want, got in zip(truth, guess, strict=True):
        true_spans, guess_spans = bio_spans(want), bio_spans(got)
        hits += len(true_spans & guess_spans)
        wanted += len(true_spans)
        found += len(guess_spans)
    return 2 * hits / (wanted + found) if wanted + found > 0 else math.nan


def bio_spans(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return (start, end, type) of the spans of one BIO sequence.

    Example:
        >>> sorted(bio_spans(["B-PER", "I-PER", "O", "B-LOC"]))
        [(0, 2, 'PER'), (3, 4, 'LOC')]
    """
    spans: set[tuple[int, int, str]] = set()
    start, kind = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind and (prefix != "I" or name != kind):
            spans.add((start, place, kind))
            kind = ""
        if prefix in ("B", "I") and not kind:
            start, kind = place, name
    return spans


def mean_over_clients(per_client: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float]:
    """Average each metric over the clients that have it; clients without data take no part.

    Args:
        per_client: client id to its metrics, or None where it had no validation records.

    Example:
        >>> mean_over_clients({"a": None, "b": {"accuracy": 0.5}})
        {'accuracy': 0.5}
    """
    values: dict[str, list[float]] = {}
    for metrics in per_client.values():
        for name, value in (metrics or {}).items():
            if math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(found)) for name, found in values.items()}
