"""The server optimisers' moments over several rounds, against dense matrices that know no frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import KINDS, aggregator, dense, random_payload, relative, truncated

from fedlora.names import block_name
from fedlora.wire import AdapterLayout, ModuleSpec

OUT, IN, RANK = 12, 9, 3
LAYOUT = AdapterLayout({"m": ModuleSpec(OUT, IN, RANK, 2.0)}, {}, "base")
OPTIMIZERS = [
    {"kind": "momentum", "lr": 0.5, "beta1": 0.9},
    {"kind": "adam", "lr": 0.2, "beta1": 0.8, "beta2": 0.9, "eps": 0.05},
]


class DenseOptimizer:
    """Momentum and Adam on out x in matrices at a rank-r point; P and Q project onto its column and row space."""

    def __init__(self, lr, beta1, kind, beta2=0.0, eps=0.0):
        self.lr, self.beta1, self.kind, self.beta2, self.floor = lr, beta1, kind, beta2, eps**2
        self.lifts = self.grams = None

    def step(self, bases, change):
        """Return lr times the step for the mean change (out x in) at a point with these orthonormal bases."""
        u, v = bases
        p, q = u @ u.T, v @ v.T
        core = p @ change @ q
        new = [change @ q - core / 2, p @ change - core / 2]
        gain = 1 - self.beta1 if self.kind == "adam" else 1.0
        old = [0, 0] if self.lifts is None else [self.lifts[0] @ q, p @ self.lifts[1]]
        self.lifts = [self.beta1 * was + gain * now for was, now in zip(old, new, strict=True)]
        if self.kind == "momentum":
            return self.lr * (self.lifts[0] + self.lifts[1])
        grams = [(change @ q).T @ (change @ q) / OUT - self.floor * q]
        grams += [(p @ change) @ (p @ change).T / IN - self.floor * p]
        before = [0 * q, 0 * p] if self.grams is None else [q @ self.grams[0] @ q, p @ self.grams[1] @ p]
        self.grams = [self.beta2 * b + (1 - self.beta2) * g for b, g in zip(before, grams, strict=True)]
        return self.lr * (
            self.lifts[0] @ self._root(self.grams[0], v) + self._root(self.grams[1], u) @ self.lifts[1]
        )

    def _root(self, gram, basis):
        values, vectors = np.linalg.eigh(basis.T @ gram @ basis + 2 * self.floor * np.eye(RANK))
        return basis @ (vectors / np.sqrt(values)) @ vectors.T @ basis.T


def bases_of(payload):
    if payload.kind == "frames":
        return tuple(np.linalg.qr(payload.blocks[f"m|{q}"].astype(float))[0] for q in ("q_out", "q_in"))
    sides = payload.blocks["m|lora_B"], payload.blocks["m|lora_A"].T
    return tuple(np.linalg.qr(side.astype(float))[0] for side in sides)


def change_of(kind, current, updates):
    """The dense mean change that the clients' updates are."""
    if kind != "tangent":
        return np.mean([dense(p, "m") for p in updates], axis=0) - dense(current, "m")
    u, v = bases_of(current)
    x, y = (np.mean([p.blocks[f"m|{b}"].astype(float) for p in updates], axis=0) for b in ("x_out", "x_in"))
    frames = [current.blocks[f"m|{q}"].astype(float) for q in ("q_out", "q_in")]
    core = (frames[0].T @ x + y.T @ frames[1]) / 2
    p, q = u @ u.T, v @ v.T
    return (x - p @ x) @ frames[1].T + frames[0] @ (y - q @ y).T + frames[0] @ core @ frames[1].T


def run_rounds(kind, optimizer, seed, agg, current, rounds):
    """Step the aggregator and the dense reference side by side; return the largest difference and the end."""
    reference, worst = DenseOptimizer(**optimizer), 0.0
    for number in range(rounds):
        updates = [
            random_payload(KINDS[kind][1], 100 * seed + 10 * number + i, LAYOUT, scale=0.5) for i in range(3)
        ]
        agg.begin(current)
        for index, update in enumerate(updates):
            assert agg.add(f"c{index}", update)
        result = agg.finish()
        point, change = dense(current, "m"), change_of(kind, current, updates)
        expected = truncated(point + reference.step(bases_of(current), change), RANK)
        worst = max(worst, relative(dense(result.payload, "m"), expected))
        current = result.payload
    return worst, current


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one["kind"])
@pytest.mark.parametrize("kind", ["product", "stack", "tangent"])
def test_moments_carried_between_frames_equal_a_dense_reference(kind, optimizer, seed):
    """Frames found again from factors differ by signs and rotations; moments must not notice."""
    start = random_payload(KINDS[kind][0], seed, LAYOUT)
    worst, _ = run_rounds(kind, optimizer, seed, aggregator(kind, LAYOUT, optimizer=optimizer), start, 6)
    assert worst < 5e-6


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one["kind"])
@pytest.mark.parametrize("kind", ["product", "tangent"])
def test_moments_follow_the_point_when_clients_rewrite_the_global_adapter(kind, optimizer):
    """The same point in other factors or frames (a server that stored it otherwise) gives the same next point."""
    start = random_payload(KINDS[kind][0], 5, LAYOUT)
    ends = []
    for turned in (False, True):
        agg = aggregator(kind, LAYOUT, optimizer=optimizer)
        _, middle = run_rounds(kind, optimizer, 5, agg, start, 3)
        if turned:
            middle = _rewritten(middle)
        agg.begin(middle)
        change = random_payload("factors", 77, LAYOUT)
        if kind == "product":
            agg.add("c", change)
        else:
            g = dense(change, "m")
            q_out, q_in = (middle.blocks[f"m|{q}"].astype(float) for q in ("q_out", "q_in"))
            blocks = {"m|x_out": (g @ q_in).astype(np.float32), "m|x_in": (g.T @ q_out).astype(np.float32)}
            agg.add("c", replace(change, kind="tangent", blocks=blocks))
        ends.append(dense(agg.finish().payload, "m"))
    assert relative(ends[1], ends[0]) < 5e-6


def _rewritten(payload):
    rng = np.random.default_rng(0)
    blocks = dict(payload.blocks)
    if payload.kind == "factors":
        gauge = rng.standard_normal((RANK, RANK)) + 2 * np.eye(RANK)
        blocks["m|lora_B"] = (blocks["m|lora_B"] @ np.linalg.inv(gauge)).astype(np.float32)
        blocks["m|lora_A"] = (gauge @ blocks["m|lora_A"]).astype(np.float32)
        return replace(payload, blocks=blocks)
    left, right = (np.linalg.qr(rng.standard_normal((RANK, RANK)))[0] for _ in range(2))
    blocks[block_name("m", "q_out")] = (blocks["m|q_out"] @ left).astype(np.float32)
    blocks[block_name("m", "q_in")] = (blocks["m|q_in"] @ right).astype(np.float32)
    blocks[block_name("m", "core")] = (left.T @ blocks["m|core"] @ right).astype(np.float32)
    return replace(payload, blocks=blocks)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one["kind"])
def test_moments_start_at_an_untrained_adapter(optimizer):
    """lora_B = 0 leaves the column space open; from the first round on the step is the dense one."""
    start = random_payload("factors", 4, LAYOUT)
    start = replace(start, blocks={**start.blocks, "m|lora_B": np.zeros((OUT, RANK), dtype=np.float32)})
    agg = aggregator("product", LAYOUT, optimizer=optimizer)
    agg.begin(start)
    agg.add("c", random_payload("factors", 8, LAYOUT))
    first = agg.finish().payload
    assert np.isfinite(dense(first, "m")).all()
    assert np.linalg.norm(dense(first, "m")) > 0
    agg.begin(first)
    agg.add("c", random_payload("factors", 9, LAYOUT))
    assert np.isfinite(dense(agg.finish().payload, "m")).all()
