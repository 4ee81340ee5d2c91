"""The server's side of secure aggregation: routes sealed shares, adds masked vectors, opens only their sum.

A client that announces unusable keys or does not seal a share for each neighbour is left out before anybody masks with
it; one wrong share of another's secret is found and left out. What cannot be mended fails the round
(`AggregationError`), never the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlora.aggregation.secagg_client import ClientKeys, SecAggPlan, pair_mask_key, self_mask_key
from fedlora.aggregation.secagg_field import combine_shares
from fedlora.aggregation.secagg_keys import KEY_BYTES, mask_of, new_private, public_of, usable
from fedlora.errors import (
    InconsistentRepliesError,
    LayoutMismatchError,
    PrivacyParameterError,
    TooFewRepliesError,
)


def neighbours(plan: SecAggPlan, clients: Sequence[str], degree: int | None) -> dict[str, tuple[str, ...]]:
    """Return each client's neighbours: everybody, or the `degree` next to it on a shuffled ring.

    The ring is shuffled by a hash of run, round and client ids, so that everyone can recompute it.
    """
    names = sorted(clients)
    if degree is None or degree >= len(names) - 1:
        return {name: tuple(other for other in names if other != name) for name in names}
    order = sorted(names, key=lambda name: hashlib.sha256(plan.context("ring", name)).digest())
    half, count = max(degree // 2, 1), len(order)
    ring = {}
    for place, name in enumerate(order):
        near = {order[(place + step) % count] for step in range(-half, half + 1)} - {name}
        ring[name] = tuple(sorted(near))
    return ring


class SecAggServer:
    """One round at the server; a new object for every round.

    Args:
        plan: PUBLIC constants.
        count: numbers per client.
        degree: neighbours per client; None takes everybody (up to about 100 clients).
        on_refused: called with a client and its reason where its answer is not used.
    """

    def __init__(
        self,
        plan: SecAggPlan,
        count: int,
        degree: int | None = None,
        on_refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """Start with nobody."""
        self._plan, self._count, self._degree = plan, count, degree
        self._on_refused = on_refused
        self._liars: set[str] = set()
        self._keys: dict[str, ClientKeys] = {}
        self._graph: dict[str, tuple[str, ...]] = {}
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._total = np.zeros(count, dtype=plan.encoding.dtype)
        self._answered: list[str] = []
        self._seeds: dict[str, dict[str, int]] = {}
        self._privates: dict[str, dict[str, int]] = {}

    def _refuse(self, client: str, reason: str) -> None:
        if self._on_refused is not None:
            self._on_refused(client, f"secure aggregation: {reason}")

    def _enough(self, names: Sequence[str] | Mapping[str, Any], what: str) -> None:
        if len(names) < self._plan.least_clients:
            raise TooFewRepliesError(
                f"secure aggregation: {len(names)} clients {what}; {self._plan.least_clients} needed"
            )

    def take_keys(self, announced: Sequence[ClientKeys]) -> dict[str, list[ClientKeys]]:
        """Take step 1's answers; return what each client gets in step 2 (its neighbours' keys).

        Raises:
            TooFewRepliesError: too few answers.
        """
        probe = new_private()
        self._keys = {}
        for keys in announced:
            if usable(probe, keys.mask_key) and usable(probe, keys.seal_key):
                self._keys[keys.client] = keys
            else:
                self._refuse(keys.client, "step keys: a public key that nobody can agree with")
        self._enough(self._keys, "announced keys")
        if len(self._keys) > self._plan.encoding.clients:
            raise InconsistentRepliesError(
                f"secure aggregation: {len(self._keys)} clients, but the encoding holds the sum of "
                f"{self._plan.encoding.clients}; it would wrap"
            )
        self._graph = neighbours(self._plan, sorted(self._keys), self._degree)
        return {name: [self._keys[peer] for peer in peers] for name, peers in self._graph.items()}

    def take_shares(self, sealed: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Take step 2's answers; return what each client gets in step 3 (shares sealed for it).

        Raises:
            TooFewRepliesError: too few answers.
        """
        self._sealed = {}
        for name, blobs in sealed.items():
            missing = sorted(set(self._graph.get(name, ())) - set(blobs))
            if name in self._keys and not missing:
                self._sealed[name] = blobs
            elif name in self._keys:
                reason = f"step shares: no sealed share for {len(missing)} of its neighbours {missing[:3]}"
                self._refuse(name, reason)
        self._enough(self._sealed, "shared their secrets")
        return {
            name: {
                peer: self._sealed[peer][name]
                for peer in self._graph[name]
                if peer in self._sealed and name in self._sealed[peer]
            }
            for name in self._sealed
        }

    def take_masked(self, client: str, vector: npt.NDArray[Any]) -> None:
        """Add one client's masked vector (any order: ring addition is exact).

        Raises:
            LayoutMismatchError: wrong dtype or length, or a client that is not (or already) in the sum.
        """
        if client not in self._sealed or client in self._answered:
            raise LayoutMismatchError(f"client {client!r} is not expected in this secure sum, or came twice")
        if vector.dtype != self._plan.encoding.dtype or vector.shape != (self._count,):
            raise LayoutMismatchError(
                f"client {client!r} sent {vector.dtype} {vector.shape}; allowed: {self._plan.encoding.dtype} "
                f"({self._count},)"
            )
        self._total += vector
        self._answered.append(client)

    @property
    def answered(self) -> tuple[str, ...]:
        """Clients in the sum, in id order."""
        return tuple(sorted(self._answered))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Clients that shared secrets and are not in the sum."""
        return tuple(sorted(set(self._sealed) - set(self._answered)))

    def take_unmask(self, client: str, seeds: Mapping[str, int], privates: Mapping[str, int]) -> None:
        """Take step 4's answer of one client; the points of the shares are the holders' places.

        Raises:
            LayoutMismatchError: if the client is not in the sum.
        """
        if client not in self._answered:
            raise LayoutMismatchError(f"client {client!r} is not in this secure sum; its shares are not used")
        for target, shares, store in (
            *((t, s, self._seeds) for t, s in seeds.items()),
            *((t, s, self._privates) for t, s in privates.items()),
        ):
            if client in self._graph.get(target, ()):
                store.setdefault(target, {})[client] = shares

    def open(self) -> tuple[npt.NDArray[np.float64], tuple[str, ...]]:
        """Take all masks off the sum.

        Returns: (sum of the answering clients' numbers, those clients).

        Raises:
            TooFewRepliesError: too few answers or shares; the sum stays hidden.
            InconsistentRepliesError: a secret cannot be restored from its shares, or is not what was announced.
        """
        self._enough(self._answered, "answered")
        total = self._total.copy()
        for client in self.answered:
            seed = self._restore(client, self._seeds)
            total -= mask_of(self_mask_key(self._plan, client, seed), self._count, total.dtype)
        for client in self.dropped:
            self._take_off(client, total)
        return self._plan.encoding.decode(total), self.answered

    def _restore(self, client: str, store: Mapping[str, Mapping[str, int]]) -> bytes:
        """Restore a secret of `client`; a holder whose share does not belong to it is named and not asked again."""
        holders = sorted(self._graph[client])
        threshold = self._plan.threshold(len(holders))
        points = {name: index + 1 for index, name in enumerate(holders)}
        given = {name: share for name, share in store.get(client, {}).items() if name not in self._liars}
        for left_out in (None, *sorted(given)):
            rest = {points[name]: share for name, share in given.items() if name != left_out}
            if left_out is not None and len(rest) < threshold:
                break
            try:
                secret = combine_shares(rest, threshold, KEY_BYTES)
            except PrivacyParameterError:
                continue
            if left_out is not None:
                self._liars.add(left_out)
                self._refuse(
                    left_out, f"step unmask: a wrong share of a secret of {client!r}; it is not used"
                )
            return secret
        raise InconsistentRepliesError(
            f"secure aggregation: the shares of a secret of client {client!r} do not belong together; either it or "
            "several of its neighbours lied, and the sum stays hidden"
        )

    def _take_off(self, client: str, total: npt.NDArray[Any]) -> None:
        near = [peer for peer in self._graph[client] if peer in self._answered]
        near = [peer for peer in near if peer in self._sealed and peer in self._sealed[client]]
        if not near:
            return
        private = self._restore(client, self._privates)
        if public_of(private) != self._keys[client].mask_key:
            raise InconsistentRepliesError(
                f"secure aggregation: the restored key of client {client!r} is not the announced one; the sum stays "
                "hidden"
            )
        for peer in near:
            key = pair_mask_key(self._plan, client, private, peer, self._keys[peer].mask_key)
            mask = mask_of(key, self._count, total.dtype)
            if peer < client:
                total -= mask
            else:
                total += mask
