"""`fedlora audit`: attack a run's mechanism and compare the proven epsilon with the claimed one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fedlora.cli.common import JsonOption, OverlayOption, OverridesArgument, emit
from fedlora.errors import AuditFailedError, ConfigError, UnsupportedCombinationError, WeakAuditError
from fedlora.figures import at_least_digits, at_most_digits

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedlora.audit.verdict import Verdict
    from fedlora.mechanisms.noise import NoiseSource
    from fedlora.training.checked import SelfCheck
    from fedlora.training.session import Workbench

HELP = """Attack a run's mechanism and compare what the attack proves with the claimed epsilon.

No private record is read: canaries and public random records are attacked, through the very clip, noise and training
code that a run uses. Exit code 30 means that a lower bound lies above the claim, that a self-check failed, or that a
run states less than its own events imply. "weak attack" means that the attack would not have noticed half the
noise either; with --strict that is exit code 31.

Examples:

  fedlora audit runs/demo

  fedlora audit run.yaml privacy.noise_multiplier=0.5 --json

  fedlora audit runs/demo --attack all
"""

ATTACKS = ("gradient", "client", "loss", "release", "calibrated", "noise-free")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

AttackOption = Annotated[
    str,
    typer.Option(
        "--attack",
        help="quick (gradient canaries; under client-level privacy client canaries), all, or one of gradient, client, "
        "loss, release, calibrated, noise-free (the control: a DP-LoRA-FA release without noise, which leaks).",
    ),
]
FEWEST_REPEATS: Final = 5
"""Repeats from which a power is worth stating: an attack of power one half passes all of them once in 32 audits."""


def _enough_repeats(repeats: int) -> int:
    """Refuse a power that one lucky run decides."""
    if 0 < repeats < FEWEST_REPEATS:
        raise typer.BadParameter(
            f"got {repeats}; allowed: 0 (the power stays open, nothing passes) or {FEWEST_REPEATS} to 1000"
        )
    return repeats


RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        min=0,
        max=1000,
        callback=_enough_repeats,
        help=f"Runs with half the noise that measure the power; 0 or {FEWEST_REPEATS} and more.",
    ),
]
CanariesOption = Annotated[
    int, typer.Option("--canaries", min=200, max=1_000_000, help="Gradient or client canaries at most.")
]
TrialsOption = Annotated[
    int, typer.Option("--trials", min=8, max=10_000, help="Shadow clients of an attack.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="Folder for audit-*.json; the run's folder by default.")
]

StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit code 31 unless an attack passed with the required power.")
]


@app.command(help=HELP)
def audit(
    target: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="A run's folder or a YAML file.")],
    overrides: OverridesArgument = None,
    overlay: OverlayOption = None,
    attack: AttackOption = "quick",
    repeats: RepeatsOption = 10,
    canaries: CanariesOption = 60_000,
    trials: TrialsOption = 64,
    output: OutputOption = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Audit one run or configuration."""
    from fedlora.audit.client_checks import run_client_checks
    from fedlora.audit.noise_check import check_noise_scale
    from fedlora.audit.run_claim import hold_to_claim, hold_to_noise, read_claim
    from fedlora.training.selfcheck import run_selfchecks

    chosen = _chosen(attack)
    bench, folder = open_target(target, overrides or [], overlay or [])
    checks = [*run_selfchecks(bench), *run_client_checks(bench), *check_noise_scale(bench)]
    verdicts, left_out = run_attacks(
        bench, chosen, repeats=repeats, canaries=canaries, trials=trials, quick=attack == "quick"
    )
    if folder is not None:
        claim = read_claim(folder, bench.config, bench.event)
        checks.append(claim.check())
        verdicts = [hold_to_claim(one, claim) for one in verdicts]
    verdicts = [hold_to_noise(one, bench.config) for one in verdicts]
    failed = any(one.verdict == "failed" for one in verdicts) or not all(one.passed for one in checks)
    result: dict[str, Any] = {
        "ok": not failed,
        "selfchecks": [vars(one) for one in checks],
        "audits": [one.to_json() for one in verdicts],
        "left_out": left_out,
        "written": _written(output or folder, verdicts),
    }
    emit(result, as_json=as_json, text=_text(verdicts, checks, left_out))
    if failed:
        raise typer.Exit(AuditFailedError.exit_code)
    if strict and not any(one.verdict == "passed" for one in verdicts):
        raise typer.Exit(WeakAuditError.exit_code)


def _written(place: Path | None, verdicts: list[Verdict]) -> list[str]:
    """Write each verdict as a file of its own, where there is a place for them."""
    from fedlora.audit.verdict import write_verdict

    if place is None:
        return []
    place.mkdir(parents=True, exist_ok=True)
    return [str(write_verdict(place, verdict)) for verdict in verdicts]


def _chosen(attack: str) -> tuple[str, ...]:
    known = {"quick": ("gradient",), "all": ATTACKS, **{name: (name,) for name in ATTACKS}}
    if attack not in known:
        raise ConfigError(f"--attack: got {attack!r}; allowed are {', '.join(known)}")
    return known[attack]


def open_target(target: str, overrides: list[str], overlays: list[str]) -> tuple[Workbench, Path | None]:
    """Load a run's (or a file's) configuration and model.

    Returns:
        The workbench, and the run's folder or None.

    Raises:
        ConfigError: if the target is neither, or overrides are given for a run.
    """
    from fedlora.config import load_config
    from fedlora.training.session import build_workbench, check_claims

    path = Path(target)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{target}: no config.yaml in it; give a run's folder or a YAML file")
        if overrides or overlays:
            raise ConfigError("audit RUN: a run is audited as it ran; leave overrides out")
        bench = build_workbench(load_config(path / "config.yaml"))
        check_claims(bench)
        return bench, path
    return _from_file(target, overrides, overlays), None


def _from_file(target: str, overrides: list[str], overlays: list[str]) -> Workbench:
    from fedlora.config import load
    from fedlora.simulation.prepare import complete, make_federation

    config = load(target, overrides, overlays).config
    stated = config.data.labels is not None or config.model.num_labels is not None
    if not stated and config.data.partition is not None:
        config = make_federation(config).config  # label names stand in the data only
    return complete(config).bench


def run_attacks(
    bench: Workbench, attacks: tuple[str, ...], *, repeats: int, canaries: int, trials: int, quick: bool
) -> tuple[list[Verdict], dict[str, str]]:
    """Run the named attacks.

    Returns:
        Verdicts, and attack to reason for those that do not fit the mechanism (only where several were asked for).

    Raises:
        UnsupportedCombinationError: if the only attack that was asked for does not fit.
    """
    if quick:
        fitting = {"record": ("gradient",), "client": ("client",), "none": ("release", "loss")}
        attacks = fitting[bench.config.privacy.unit]
    elif len(attacks) > 1 and bench.config.privacy.unit != "client":
        attacks = tuple(name for name in attacks if name != "client")
    runs = _attacks(bench, repeats, canaries, trials, _confidence(bench, attacks))
    found, left_out = [], {}
    for name in attacks:
        try:
            found.append(runs[name]())
        except UnsupportedCombinationError as error:
            if len(attacks) == 1:
                raise
            left_out[name] = str(error)
    return found, left_out


def _confidence(bench: Workbench, attacks: tuple[str, ...]) -> float:
    """Return each attack's confidence: those that test the same run's claim share one probability of a false alarm."""
    from fedlora.audit.membership import CONFIDENCE

    client = bench.config.privacy.unit == "client"
    testing = [name for name in attacks if name != "noise-free" and (name == "client") == client]
    return 1.0 - (1.0 - CONFIDENCE) / max(1, len(testing))


def _attacks(
    bench: Workbench, repeats: int, canaries: int, trials: int, confidence: float
) -> dict[str, Callable[[], Verdict]]:
    from dataclasses import replace

    from fedlora.audit import membership
    from fedlora.audit.client import ClientAudit
    from fedlora.audit.faults import with_power
    from fedlora.audit.gradient import GradientAudit

    def shadows(noise: NoiseSource, steps: int) -> membership.Shadows:
        return membership.make_shadows(bench, trials=trials, steps=steps, noise=noise)

    def control() -> Verdict:
        free = membership.noise_free(bench)
        made = membership.make_shadows(free, trials=trials, steps=1)
        return replace(membership.release_attack(free, made), attack="noise-free")

    return {
        "gradient": lambda: GradientAudit(bench, canaries=canaries, confidence=confidence).run(
            repeats=repeats
        ),
        "client": lambda: ClientAudit(bench, canaries=canaries, confidence=confidence).run(repeats=repeats),
        "loss": lambda: with_power(
            lambda n: membership.loss_attack(bench, shadows(n, 4), confidence=confidence), repeats
        ),
        "release": lambda: with_power(
            lambda n: membership.release_attack(bench, shadows(n, 1), confidence=confidence), repeats
        ),
        "calibrated": lambda: with_power(
            lambda n: membership.calibrated_attack(bench, noise=n, confidence=confidence), repeats
        ),
        "noise-free": control,
    }


def _text(verdicts: list[Verdict], checks: list[SelfCheck], left_out: dict[str, str]) -> str:
    lines = [f"self-check: {one.name}: {'ok' if one.passed else 'FAILED'} ({one.detail})" for one in checks]
    for one in verdicts:
        claimed = (
            "no privacy claimed"
            if one.claimed_epsilon is None
            else f"claimed epsilon {at_least_digits(one.claimed_epsilon)}"
        )
        power = "" if one.power is None else f", power at half the noise {one.power:.2f} ({_repeats(one)})"
        lines.append(
            f"{one.attack}: {one.verdict}; lower bound {at_most_digits(one.lower_bound)} at confidence "
            f"{one.confidence:g}, {claimed}{power}, AUC {one.figures['auc']:.3f}"
        )
        lines += [f"  {key}: {value}" for key, value in one.conditions.items() if value not in (None, [])]
        if one.delta is not None:
            lines.append(f"  delta: {one.delta:g}")
    lines += [f"{name}: left out: {why}" for name, why in left_out.items()]
    return "\n".join(lines)


def _repeats(verdict: Verdict) -> str:
    done = verdict.figures.get("power_repeats")
    return "1 repeat" if done == 1 else f"{done} repeats"
