"""What a client-level epsilon rests on: who is trusted, how clients are sampled, what "without a client" means.

One place for the ledger's conditions, the run's statement and the report.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedlora.config.schema import ClientPrivacy, FederationConfig

ROUTED_HONESTLY = (
    "the server is honest-but-curious, unless sites pin each other's identities (secure_sums.peers): then it may "
    "deviate"
)


@dataclass(frozen=True)
class ClientTerms:
    """PUBLIC. Conditions of a client-level guarantee.

    Attributes:
        adversary: against whom it holds.
        sampling: how clients must be drawn for it to hold.
        neighbour: what a data set with one client less (or another) is.
        assumptions: everything else that must hold.
    """

    adversary: str
    sampling: str
    neighbour: str
    assumptions: tuple[str, ...]

    def conditions(self) -> tuple[str, ...]:
        """Return all of it as sentences, for a ledger's reservation."""
        return (
            f"holds against: {self.adversary}",
            f"client sampling: {self.sampling}",
            f"neighbouring: {self.neighbour}",
            *self.assumptions,
        )


def client_terms(privacy: ClientPrivacy, federation: FederationConfig) -> ClientTerms:
    """Return the conditions of a configuration's client-level guarantee."""
    shares = privacy.noise_at == "clients"
    adversary = (
        "anyone who sees all released adapters; the server sees every update and is trusted to clip and noise"
    )
    assumptions: tuple[str, ...] = ()
    if shares:
        adversary = "anyone who sees all released adapters, and the server, which sees noised sums only"
        assumptions = (
            f"at least {privacy.honest_clients} clients of every sum are honest: each clips and adds its share",
            ROUTED_HONESTLY,
            "noise is rounded to secure aggregation's grid and cut at 6 standard deviations of a share",
        )
    if privacy.noise_source != "os":
        assumptions += ("noise source seeded for tests: NO PRIVACY",)
    return ClientTerms(adversary, _sampling(federation, shares), _neighbour(privacy, federation), assumptions)


def _sampling(federation: FederationConfig, shares: bool) -> str:
    asked = federation.clients_per_round
    if not isinstance(asked, float) or asked >= 1.0:
        return "no amplification by sampling is claimed"
    if shares:
        return (
            "no amplification by sampling is claimed: the server draws the coins, so it knows who takes part"
        )
    return f"Poisson sampling of clients at the public rate {asked:g}, each by its own secret coin"


def _neighbour(privacy: ClientPrivacy, federation: FederationConfig) -> str:
    if privacy.adjacency == "replace_one":
        return "one client's records are replaced by any others; the list of clients is public and the same"
    if privacy.noise_at == "clients":
        return (
            "one client's update becomes zero; it answers all the same with its share of noise, so that it takes "
            "part is no secret"
        )
    if isinstance(federation.clients_per_round, int):
        return "one client does not answer; the list of clients that the draw is made from is public and the same"
    return "one client with all its records is added or removed"
