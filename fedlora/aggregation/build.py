"""The checked way to an aggregator: combinations that make no sense are refused by name."""

from __future__ import annotations

from typing import Final

from fedlora.adapters.projection_recipe import seed_of_test_run
from fedlora.aggregation.client_privacy import ClientPlan, client_plan
from fedlora.aggregation.folded import FoldedMean
from fedlora.aggregation.linear import MeanB, TangentMean
from fedlora.aggregation.products import AlignedMean, FactorMean, ProductMode, StackMode
from fedlora.aggregation.round import Aggregator, RoundRules
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.aggregation.types import Charge, Mode, NormalSource
from fedlora.config.schema import ClientPrivacy, FederationConfig, FedLoraConfig, NoPrivacy, PrivacyConfig
from fedlora.errors import PrivacyParameterError, UnsupportedCombinationError
from fedlora.names import split_block_name
from fedlora.wire.payload import AdapterLayout, PayloadKind

MODES: Final = ("mean_b", "tangent", "product", "stack", "aligned", "factor_mean")
LINEAR: Final = ("mean_b", "tangent")


def aggregation_problems(federation: FederationConfig, privacy: PrivacyConfig) -> list[str]:
    """Return every reason why these settings cannot go together, one line each (empty if they can)."""
    kind, agg = federation.aggregation.kind, federation.aggregation
    problems = []
    client = privacy if isinstance(privacy, ClientPrivacy) else None
    if client is not None and kind not in LINEAR:
        problems.append(
            f"federation.aggregation.kind: {kind} under privacy.unit: client would release components without "
            "noise (the noised mean of products is recovered exactly outside the tangent space); use mean_b or "
            "tangent, or privacy.unit: record, where aggregation is post-processing"
        )
    if agg.weights == "num_examples" and not isinstance(privacy, NoPrivacy):
        problems.append(
            "federation.aggregation.weights: num_examples under privacy gives one client nearly all the weight and "
            "releases its record count; use weights: equal"
        )
    if agg.robust != "none":
        problems += _robust_problems(federation, client is not None)
    if federation.secure_aggregation and (kind not in LINEAR or agg.weights != "equal"):
        problems.append(
            f"federation.secure_aggregation shows the server sums only; aggregation.kind: {kind} with weights: "
            f"{agg.weights} needs single updates; use mean_b or tangent with weights: equal"
        )
    if federation.secure_aggregation and client is not None and client.noise_at == "server":
        problems.append(
            "federation.secure_aggregation hides single updates, so the server cannot clip them; use "
            "privacy.noise_at: clients"
        )
    if client is not None and client.noise_at == "clients" and client.clipping != "fixed":
        problems.append(
            "privacy.clipping: adaptive-quantile needs privacy.noise_at: server; use clipping: fixed"
        )
    return problems


def _rate_problems(federation: FederationConfig, layout: AdapterLayout) -> list[str]:
    rates = federation.server_optimizer.head_rates
    heads = sorted(module for module, block in map(split_block_name, layout.extra) if block == "weight")
    return [
        f"federation.server_optimizer.head_rates: {module} is no trained head; allowed are {', '.join(heads) or 'none'}"
        for module in ([] if rates == "auto" else rates)
        if module not in heads
    ]


def _robust_problems(federation: FederationConfig, client_level: bool) -> list[str]:
    agg = federation.aggregation
    problems = []
    if agg.kind not in LINEAR:
        problems.append(
            f"federation.aggregation.robust: {agg.robust} needs common coordinates; use kind: mean_b or tangent"
        )
    if client_level:
        problems.append(
            f"federation.aggregation.robust: {agg.robust} has no client-level sensitivity bound; client-level "
            "privacy clips each update already; use robust: none"
        )
    if agg.robust == "norm_bounded" and agg.max_update_norm is None:
        problems.append("federation.aggregation.robust: norm_bounded needs max_update_norm")
    if federation.secure_aggregation:
        problems.append("federation.aggregation.robust needs single updates, secure_aggregation hides them")
    if agg.weights != "equal":
        problems.append("federation.aggregation.robust uses equal weights; set weights: equal")
    return problems


def client_sampling(federation: FederationConfig, num_clients: int) -> tuple[float, float | None]:
    """Return (public expected number of clients a round, Poisson rate or None if nothing is amplified).

    A share samples each client by its own coin (Poisson); a fixed number or "all" claims no amplification.
    """
    asked = federation.clients_per_round
    if asked == "all":
        return float(num_clients), None
    if isinstance(asked, float):
        return asked * num_clients, asked
    return float(min(asked, num_clients)), None


def build_mode(
    federation: FederationConfig, uplink: PayloadKind | None = None, test_seed: int | None = None
) -> Mode:
    """Return the mode that a configuration names.

    Args:
        federation: PUBLIC.
        uplink: what the mechanism's clients send, where it differs from the mode's usual coordinates
            ("projected" under mean_b).
        test_seed: TEST ONLY. Makes shared projections repeatable.

    Raises:
        UnsupportedCombinationError: if the mode cannot take such updates.
    """
    optimizer = ServerOptimizer(federation.server_optimizer)
    agg = federation.aggregation
    mode: Mode
    if agg.kind == "mean_b":
        mode = FoldedMean(optimizer, test_seed) if uplink == "projected" else MeanB(optimizer)
    elif agg.kind == "tangent":
        mode = TangentMean(optimizer)
    else:
        classes = {
            "product": ProductMode,
            "stack": StackMode,
            "aligned": AlignedMean,
            "factor_mean": FactorMean,
        }
        mode = classes[agg.kind](optimizer, agg.max_rank)
    if uplink is not None and uplink != mode.uplink:
        raise UnsupportedCombinationError(
            f"federation.aggregation.kind: {agg.kind} needs {mode.uplink!r} updates, the mechanism sends {uplink!r}; "
            "see docs/aggregation.md for which go together"
        )
    return mode


def build_aggregator(
    config: FedLoraConfig,
    layout: AdapterLayout,
    recipe: str | None,
    *,
    num_clients: int | None = None,
    noise: NormalSource | None = None,
    charge: Charge | None = None,
    uplink: PayloadKind | None = None,
) -> Aggregator:
    """Build the aggregator of a run.

    Args:
        config: resolved configuration.
        layout: PUBLIC shapes of the adapter.
        recipe: sha256 of the shared lora_A recipe (`ARecipe.sha256`), or None.
        num_clients: how many logical clients the federation has (public); needed under client-level
            privacy for the divisor.
        noise: server's noise source; needed under client-level privacy with noise at the server.
        charge: durable ledger write of each round's client-level event; needed under client-level privacy.
        uplink: what the mechanism's clients send, if it is not the mode's usual kind.

    Raises:
        UnsupportedCombinationError: all reasons at once.
        PrivacyParameterError: if client-level privacy lacks the number of clients.
    """
    federation, privacy = config.federation, config.privacy
    problems = aggregation_problems(federation, privacy)
    single = federation.aggregation.robust != "none" or federation.secure_aggregation
    if uplink == "projected" and (isinstance(privacy, ClientPrivacy) or single):
        problems.append(
            "mechanism.kind: noisy_projection sends updates under a projection that changes every round; they are "
            "averaged plainly: use robust: none, secure_aggregation: false and privacy.unit: record"
        )
    problems += _rate_problems(federation, layout)
    if problems:
        raise UnsupportedCombinationError("these settings cannot go together", tuple(problems))
    agg = federation.aggregation
    plan: ClientPlan | None = None
    if isinstance(privacy, ClientPrivacy):
        if num_clients is None or num_clients < 1:
            raise PrivacyParameterError(
                f"number of clients: got {num_clients}; client-level privacy divides by the public expected number "
                "of clients, so it must be known (deployment.expected_clients)"
            )
        expected, rate = client_sampling(federation, num_clients)
        plan = client_plan(privacy, expected_clients=expected, sample_rate=rate)
    rules = RoundRules(
        min_replies=federation.min_replies,
        weighted=agg.weights == "num_examples",
        max_bytes=federation.max_payload_bytes,
        max_norm=agg.max_update_norm,
        robust=None if agg.robust == "none" else agg.robust,
        trim_fraction=agg.trim_fraction,
    )
    mode = build_mode(federation, uplink, seed_of_test_run(config))
    return Aggregator(mode, layout, recipe, rules, plan=plan, noise=noise, charge=charge)
