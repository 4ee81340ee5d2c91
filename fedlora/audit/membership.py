"""Membership attacks through whole training steps, on public random records: loss, release and calibrated loss.

The static-poison game: a public data set D, and a canary that is a random record with the label that a model trained
on D finds least likely. Shadow clients train on D (each record of a step by a fair coin) with the canary in every
step, or never. Their canary losses are compared (`loss`), or their releases (`release`): the auditor knows lora_A, D
and the start, removes what D's gradients can explain, and looks for the rest of the canary's gradient.

Source: "LoRA and Privacy: When Random Projections Help (and When They Don't)", Prop. 2 and Appendix F.1;
    "LoRA Provides Differential Privacy by Design via Random Sketching", Eq. 16, for the calibrated attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fedlora.accounting import epsilon_of
from fedlora.adapters.records import batch_to_device
from fedlora.aggregation import build_aggregator
from fedlora.audit.planning import bound_at
from fedlora.audit.statistics import best_one_run_bound, roc_figures
from fedlora.audit.verdict import Verdict, judge
from fedlora.config.schema import NoPrivacy, RecordPrivacy, SgdConfig
from fedlora.data import Encoded
from fedlora.errors import UnsupportedCombinationError
from fedlora.mechanisms.base import Mechanism, build_mechanism
from fedlora.mechanisms.noise import NoiseSource, OsNoise
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.cohort_passes import PassRunner
from fedlora.training.groups import public_records
from fedlora.training.session import Workbench
from fedlora.wire.payload import AdapterPayload

Floats = npt.NDArray[np.float64]
_CANDIDATES: Final = 16
_TOKENS: Final = 24
CONFIDENCE: Final = 0.95
_ADVERSARY: Final = "knows all records but the canary, lora_A and the start; sees one client's update"


@dataclass(frozen=True)
class Shadows:
    """PUBLIC. Clients that trained with and without the canary.

    Attributes:
        truth: (n,) whether the canary was in.
        payloads: (n,) what each one sent.
        canary: the static poison.
        records: D.
        mechanism: what they ran (every record that is in is in every step: rate 1).
        steps: local steps.
        start: the adapter that came down.
    """

    truth: npt.NDArray[np.bool_]
    payloads: Sequence[AdapterPayload]
    canary: Encoded
    records: Sequence[Encoded]
    mechanism: Mechanism
    steps: int
    start: AdapterPayload


def noise_free(bench: Workbench, *, lr: float = 0.5) -> Workbench:
    """Return the same model under DP-LoRA-FA without clip and noise: the release that is not private.

    Args:
        bench: any workbench with LoRA layers.
        lr: of plain gradient descent.
    """
    config = bench.config.model_copy(
        update={
            "privacy": NoPrivacy(unit="none"),
            "mechanism": _lora_fa(bench),
            "training": bench.config.training.model_copy(update={"optimizer": SgdConfig(kind="sgd", lr=lr)}),
            "derived": None,
        }
    )
    mechanism = build_mechanism(config, bench.layout)
    return replace(bench, config=config, mechanism=mechanism, event=mechanism.step_event())


def _lora_fa(bench: Workbench) -> Any:
    from fedlora.config.schema import LoraFaMechanism

    if not bench.layout.modules:
        raise UnsupportedCombinationError(
            f"audit: mechanism {bench.mechanism.kind} has no LoRA layers to attack; audit a LoRA mechanism"
        )
    return LoraFaMechanism(kind="lora_fa")


def make_shadows(
    bench: Workbench, *, trials: int = 64, records: int = 8, steps: int = 4, noise: NoiseSource | None = None
) -> Shadows:
    """Train `trials` shadow clients as one cohort, half of them (by fair coins) with the canary.

    Args:
        bench: model and mechanism.
        trials: shadow clients.
        records: size of D.
        steps: local steps (1 under a shared projection).
        noise: each client's noise source; the operating system's by default.
    """
    public = public_records(bench.task, records + _CANDIDATES, _TOKENS)
    base, candidates = public[:records], public[records:]
    mechanism = _every_step(bench.mechanism)
    engine = CohortEngine(bench.adapted, mechanism, bench.task, bench.config)
    if getattr(bench.config.mechanism, "projection_source", "client") == "shared":
        steps = 1
    source = OsNoise() if noise is None else noise
    generator = np.random.default_rng()
    payload = bench.initial_payload()
    reference = _train(engine, payload, [base], steps, source, generator)[0]
    losses = _losses(bench, _adapter(bench, payload, reference), candidates)
    canary = candidates[int(np.argmax(losses))]
    truth = generator.permutation(np.arange(trials) % 2 == 0)
    draws = [[*base] for _ in range(trials)]
    sent = _train(engine, payload, draws, steps, source, generator, [canary if t else None for t in truth])
    return Shadows(truth, sent, canary, base, mechanism, steps, payload)


def _every_step(mechanism: Mechanism) -> Mechanism:
    return replace(mechanism, privacy=replace(mechanism.privacy, sample_rate=1.0))


def _train(
    engine: CohortEngine,
    payload: AdapterPayload,
    pools: Sequence[Sequence[Encoded]],
    steps: int,
    source: NoiseSource,
    generator: np.random.Generator,
    always: Sequence[Encoded | None] | None = None,
) -> list[AdapterPayload]:
    def job(number: int) -> ClientJob:
        extra = None if always is None else always[number]

        def draw() -> list[Encoded]:
            coins = generator.random(len(pools[number])) < 0.5
            drawn = [one for one, coin in zip(pools[number], coins, strict=True) if coin]
            return drawn if extra is None else [*drawn, extra]

        return ClientJob(f"shadow-{number:04d}", draw, source)

    jobs = [job(number) for number in range(len(pools))]
    return [update.payload for update in engine.train(payload, jobs, steps)]


def _adapter(bench: Workbench, start: AdapterPayload, sent: AdapterPayload) -> AdapterPayload:
    """Return the adapter that one client's update makes of the start."""
    if sent.kind in ("lora_b", "factors", "frames"):
        return sent
    federation = bench.config.federation.model_copy(update={"min_replies": 1})
    config = bench.config.model_copy(update={"federation": federation})
    aggregator = build_aggregator(
        config, bench.layout, bench.adapted.recipe.sha256, num_clients=1, uplink=bench.mechanism.uplink
    )
    aggregator.begin(start)
    aggregator.add("shadow", sent)
    return aggregator.finish().payload


def _losses(bench: Workbench, adapter: AdapterPayload, records: Sequence[Encoded]) -> Floats:
    """Return each record's loss under an adapter; the model is left as it was."""
    saved = bench.adapted.write_factors()
    bench.adapted.load(adapter)
    model = bench.adapted.model
    model.eval()
    batch = batch_to_device(bench.task.collate(list(records)), bench.adapted.device)
    try:
        with torch.no_grad():
            found: Floats = bench.task.per_record_loss(model, batch).double().cpu().numpy()
    finally:
        bench.adapted.load(saved)
    return found


def loss_attack(bench: Workbench, shadows: Shadows, *, confidence: float = CONFIDENCE) -> Verdict:
    """Compare the canary's loss over shadow clients; lower means member. `confidence` is the bound's."""
    adapters = (_adapter(bench, shadows.start, payload) for payload in shadows.payloads)
    losses = [_losses(bench, adapter, [shadows.canary])[0] for adapter in adapters]
    return _verdict(bench, shadows, "loss", -np.asarray(losses), confidence)


def release_attack(bench: Workbench, shadows: Shadows, *, confidence: float = CONFIDENCE) -> Verdict:
    """Look for the canary's gradient in the releases themselves, with lora_A and D known.

    Args:
        bench: model and mechanism.
        shadows: what was released.
        confidence: of the lower bound.

    Raises:
        UnsupportedCombinationError: if the mechanism does not send values in its own coordinates.
    """
    if bench.mechanism.uplink not in ("lora_b", "factors") or bench.mechanism.coordinates.kind == "projected":
        raise UnsupportedCombinationError(
            f"audit: the release attack reads values; mechanism {bench.mechanism.kind} sends "
            f"{bench.mechanism.uplink}; use the gradient-canary attack"
        )
    names = bench.mechanism.coordinates.adapters
    if not names:
        raise UnsupportedCombinationError(
            f"audit: the release attack reads LoRA blocks; mechanism {bench.mechanism.kind} has none; use the "
            "gradient-canary attack"
        )
    start = _flat(shadows.start, names)
    moves = np.stack([start - _flat(payload, names) for payload in shadows.payloads])
    gradients = _gradients(bench, [*shadows.records, shadows.canary])
    explained, _ = np.linalg.qr(gradients[:-1].T)
    rest = gradients[-1] - explained @ (explained.T @ gradients[-1])
    return _verdict(bench, shadows, "release", moves @ rest / max(float(rest @ rest), 1e-300), confidence)


def _flat(payload: AdapterPayload, names: Sequence[str]) -> Floats:
    return np.concatenate([np.asarray(payload.blocks[n], dtype=np.float64).reshape(-1) for n in names])


def _gradients(bench: Workbench, records: Sequence[Encoded]) -> Floats:
    """Return (records, size) unclipped gradients of the adapter blocks at the start."""
    open_bound = replace(bench.mechanism.privacy, record_level=False, max_grad_norm=math.inf)
    mechanism = replace(bench.mechanism, privacy=open_bound)
    payload = mechanism.initial_payload(bench.adapted)
    state = mechanism.stages.open(mechanism, bench.adapted, payload, len(records))
    state = mechanism.stages.prepare(mechanism, state)
    sums = PassRunner(bench.adapted, bench.task).clipped_sums(mechanism, state, [[one] for one in records])
    parts = [sums.blocks[name].flatten(1) for name in mechanism.coordinates.adapters]
    found: Floats = torch.cat(parts, 1).double().cpu().numpy()
    return found


def calibrated_attack(
    bench: Workbench,
    *,
    records: int = 32,
    steps: int = 8,
    noise: NoiseSource | None = None,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Score L(x; reference) - L(x; target) of one target model; members were chosen by fair coins.

    The reference is trained on other public records. Beside the bound: AUC, true positive rates, perplexities.

    Args:
        bench: model and mechanism.
        records: audited records, and as many for the reference.
        steps: local steps (1 under a shared projection).
        noise: the target's and the reference's noise source; the operating system's by default.
        confidence: of the lower bound.
    """
    source = OsNoise() if noise is None else noise
    public = public_records(bench.task, 2 * records, _TOKENS)
    audited, auxiliary = public[:records], public[records:]
    generator = np.random.default_rng()
    truth = generator.random(records) < 0.5
    truth[:2] = (True, False)  # both classes must exist; the two are left out of the bound
    mechanism = _every_step(bench.mechanism)
    if getattr(bench.config.mechanism, "projection_source", "client") == "shared":
        steps = 1
    engine = CohortEngine(bench.adapted, mechanism, bench.task, bench.config)
    members = [one for one, inside in zip(audited, truth, strict=True) if inside]
    jobs = [
        ClientJob("target", lambda: members, source),
        ClientJob("reference", lambda: auxiliary, source),
    ]
    start = bench.initial_payload()
    target, reference = (update.payload for update in engine.train(start, jobs, steps))
    of_target = _losses(bench, _adapter(bench, start, target), audited)
    of_reference = _losses(bench, _adapter(bench, start, reference), audited)
    scores = of_reference - of_target
    shadows = Shadows(truth, (), audited[0], audited, mechanism, steps, start)
    perplexity = {
        "perplexity_members": float(np.exp(of_target[truth].mean())),
        "perplexity_others": float(np.exp(of_target[~truth].mean())),
    }
    privacy = bench.config.privacy
    delta = privacy.target_delta if isinstance(privacy, RecordPrivacy) else 0.0
    bound = 0.0
    if 0 < truth[2:].sum() < len(truth) - 2:
        bound, _ = best_one_run_bound(scores[2:], truth[2:], delta=delta, confidence=confidence)
    return _verdict(bench, shadows, "calibrated", scores, confidence, bound=bound, more=perplexity)


def _claim(bench: Workbench, shadows: Shadows) -> tuple[float | None, float, dict[str, Any]]:
    """Return (epsilon claimed against this adversary, if any; delta; the conditions of both)."""
    privacy = bench.config.privacy
    conditions: dict[str, Any] = {
        "unit": "person" if getattr(privacy, "group_by", None) else "record",
        "adjacency": "add_or_remove",
        "adversary": _ADVERSARY,
        "accountant": "none: nothing is claimed against this adversary",
        "sampling": "none: the canary is in every step",
        "attacked_steps": shadows.steps,
    }
    if not isinstance(privacy, RecordPrivacy):
        return None, 0.0, conditions
    event = shadows.mechanism.step_event().times(shadows.steps)
    report = epsilon_of(event, privacy.target_delta, adjacency="add_or_remove", accountant=privacy.accountant)
    return report.epsilon, privacy.target_delta, conditions | {"accountant": report.accountant}


def _verdict(
    bench: Workbench,
    shadows: Shadows,
    attack: str,
    scores: Floats,
    confidence: float,
    *,
    bound: float | None = None,
    more: dict[str, float] | None = None,
) -> Verdict:
    claimed, delta, conditions = _claim(bench, shadows)
    if bound is None:
        bound = _held_out_bound(scores, shadows.truth, delta, confidence)
    roc = roc_figures(scores, shadows.truth)
    figures = {
        "auc": roc.auc,
        "tpr_at_1_percent_fpr": roc.tpr_at_1,
        "tpr_at_10_percent_fpr": roc.tpr_at_10,
        "trials": len(scores),
        **(more or {}),
    }
    word = judge(claimed, bound, None)
    return Verdict(
        attack,
        word,
        claimed,
        bound,
        confidence,
        None,
        delta,
        conditions,
        figures,
        samples_as_the_run=False,
    )


def _held_out_bound(scores: Floats, truth: npt.NDArray[np.bool_], delta: float, confidence: float) -> float:
    """Choose the threshold on the even trials and take the bound from the odd ones."""
    chosen, kept = slice(0, None, 2), slice(1, None, 2)
    if not (0 < truth[kept].sum() < len(truth[kept])) or not (0 < truth[chosen].sum() < len(truth[chosen])):
        return 0.0

    def gap(threshold: float) -> float:
        said = scores[chosen] > threshold
        return float(said[truth[chosen]].mean() - said[~truth[chosen]].mean())

    ordered = np.sort(scores[chosen])
    cut = max(((ordered[1:] + ordered[:-1]) / 2).tolist(), key=gap)
    return bound_at(scores[kept], truth[kept], cut, delta=delta, confidence=confidence)
