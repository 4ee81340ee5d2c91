"""A client's side of secure aggregation: four steps, each at most once a round.

Protocol: "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (Bonawitz et al., Figure 4,
honest-but-curious server), on a sparse graph of neighbours as in "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead" (Bell et al., Algorithm 2). With identity signatures on the keys a server cannot
put keys of its own between clients; the signed lists (Figure 4's consistency check) stop it from telling clients
different stories about who dropped out.

```
keys     -> two public keys (masks, sealed shares), optionally signed
shares   -> for each neighbour: sealed shares of the mask key and of the self-mask seed
masked   -> encoded update + self mask +- pairwise masks
confirm  -> signature over the lists of answering and dropped clients (only where keys are signed)
unmask   -> per neighbour ONE share: of the seed if it answered, of the mask key if it dropped out
```
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlora.aggregation.secagg_field import FixedPoint, share_secret
from fedlora.aggregation.secagg_keys import (
    KEY_BYTES,
    agree,
    derive,
    mask_of,
    new_private,
    public_of,
    seal,
    unseal,
)
from fedlora.errors import PeerIdentityError, StaleRoundError, TooFewRepliesError

Verify = Callable[[str, bytes, bytes], bool]
"""(client, message, signature) -> whether that client's pinned identity key signed it."""


@dataclass(frozen=True)
class SecAggPlan:
    """PUBLIC. One round's constants, the same at every client.

    Attributes:
        run_id: unique name of the run.
        server_round: 1, 2, ...
        encoding: fixed-point ring.
        threshold_share: share of a client's neighbours (itself included) whose shares restore a secret; above 1/2.
        least_clients: fewest answering clients whose sum may be opened.
    """

    run_id: str
    server_round: int
    encoding: FixedPoint
    threshold_share: float = 2 / 3
    least_clients: int = 2

    def threshold(self, holders: int) -> int:
        """Shares needed of `holders`: more than half, so that no two different halves can be told two stories."""
        return max(holders // 2 + 1, math.ceil(self.threshold_share * holders))

    def context(self, what: str, *clients: str) -> bytes:
        """Bytes that bind a key or a message to run, round, use and clients."""
        parts = ["fedlora-secagg-1", self.run_id, str(self.server_round), what, *clients]
        return json.dumps(parts, separators=(",", ":")).encode()


@dataclass(frozen=True)
class ClientKeys:
    """PUBLIC. What a client announces: two X25519 public keys and the signature over them."""

    client: str
    mask_key: bytes
    seal_key: bytes
    signature: bytes = b""


@dataclass
class _Secrets:
    mask_private: bytes
    seal_private: bytes
    seed: bytes
    peers: dict[str, ClientKeys] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    received: dict[str, tuple[int, int]] = field(default_factory=dict)


class SecAggClient:
    """One client in one round; a new object for every round.

    Args:
        client: own logical client id.
        plan: PUBLIC constants.
        sign: signs the announced keys with the identity key, or None.
        verify: checks the peers' signatures against pinned identities, or None (the server is then
            trusted not to replace keys).
    """

    def __init__(
        self,
        client: str,
        plan: SecAggPlan,
        *,
        sign: Callable[[bytes], bytes] | None = None,
        verify: Verify | None = None,
    ) -> None:
        """Draw fresh keys and a fresh self-mask seed."""
        self.client, self._plan, self._sign, self._verify = client, plan, sign, verify
        self._secrets = _Secrets(new_private(), new_private(), os.urandom(KEY_BYTES))
        self._step = 0
        self._lists: bytes | None = None

    def _next(self, step: int) -> None:
        if self._step != step:
            raise StaleRoundError(
                f"secure aggregation: client {self.client!r} is at step {self._step}, was asked for step {step}; "
                "no step is answered twice"
            )
        self._step += 1

    def keys(self) -> ClientKeys:
        """Step 1: announce the public keys."""
        self._next(0)
        own = self._secrets
        keys = ClientKeys(self.client, public_of(own.mask_private), public_of(own.seal_private))
        signature = b"" if self._sign is None else self._sign(self._signed(keys))
        return ClientKeys(keys.client, keys.mask_key, keys.seal_key, signature)

    def _signed(self, keys: ClientKeys) -> bytes:
        return self._plan.context("keys", keys.client) + keys.mask_key + keys.seal_key

    def shares(self, neighbours: Sequence[ClientKeys]) -> dict[str, bytes]:
        """Step 2: seal one share of both secrets for each neighbour.

        Args:
            neighbours: announced keys of the neighbours in the graph (not this client's own).

        Raises:
            PeerIdentityError: keys are not signed by the pinned identity of their client.
            TooFewRepliesError: too few neighbours to hide among.
        """
        self._next(1)
        own = self._secrets
        for keys in neighbours:
            if self._verify is not None and not self._verify(keys.client, self._signed(keys), keys.signature):
                raise PeerIdentityError(
                    f"secure aggregation: the keys of client {keys.client!r} are not signed by its pinned identity; "
                    f"client {self.client!r} sends nothing. Somebody may stand between the clients"
                )
        own.peers = {keys.client: keys for keys in neighbours if keys.client != self.client}
        if len(own.peers) + 1 < self._plan.least_clients or len(own.peers) < 1:
            raise TooFewRepliesError(
                f"secure aggregation: {len(own.peers) + 1} clients, {self._plan.least_clients} needed to hide among"
            )
        holders = sorted(own.peers)
        own.points = {name: index + 1 for index, name in enumerate(holders)}
        threshold = self._plan.threshold(len(holders))
        of_key = share_secret(own.mask_private, list(own.points.values()), threshold)
        of_seed = share_secret(own.seed, list(own.points.values()), threshold)
        sealed = {}
        for name, point in own.points.items():
            plain = json.dumps([point, hex(of_key[point]), hex(of_seed[point])]).encode()
            sealed[name] = seal(self._pair_key(name), plain, self._plan.context("share", self.client, name))
        return sealed

    def _pair_key(self, peer: str) -> bytes:
        first, second = sorted((self.client, peer))
        context = self._plan.context("seal", first, second)
        return agree(self._secrets.seal_private, self._secrets.peers[peer].seal_key, context)

    def masked(self, sealed: Mapping[str, bytes], values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Step 3: return the encoded update under all masks.

        Args:
            sealed: sender to the share that it sealed for this client; senders are the neighbours
                that completed step 2.
            values: (n,) float32, the update (with the client's own noise where it adds a share).

        Returns: (n,) ring elements, uniform to anyone who lacks this client's or its neighbours' secrets.

        Raises:
            TooFewRepliesError: fewer neighbours than the threshold completed step 2.
            AuthenticationError: a sealed share does not open.
        """
        self._next(2)
        own = self._secrets
        strangers = set(sealed) - set(own.peers)
        if strangers or len(sealed) < self._plan.threshold(len(own.peers)):
            raise TooFewRepliesError(
                f"secure aggregation: shares of {len(sealed)} neighbours ({len(strangers)} unknown); "
                f"{self._plan.threshold(len(own.peers))} known ones needed"
            )
        for peer, blob in sorted(sealed.items()):
            plain = unseal(self._pair_key(peer), blob, self._plan.context("share", peer, self.client))
            _, of_key, of_seed = json.loads(plain)
            own.received[peer] = (int(of_key, 16), int(of_seed, 16))
        encoding = self._plan.encoding
        total = encoding.encode(values, np.random.default_rng())
        total += mask_of(self_mask_key(self._plan, self.client, own.seed), total.size, encoding.dtype)
        for peer in sorted(own.received):
            key = pair_mask_key(self._plan, self.client, own.mask_private, peer, own.peers[peer].mask_key)
            mask = mask_of(key, total.size, encoding.dtype)
            if self.client < peer:
                total += mask
            else:
                total -= mask
        return total

    def confirm(self, answered: Sequence[str], dropped: Sequence[str]) -> bytes:
        """Step 4, where keys are signed: accept the lists and sign them; `unmask` takes no others afterwards.

        Raises:
            StaleRoundError: if the lists contradict each other or this client's own view.
            TooFewRepliesError: too few answers: the sum would hide nobody.
        """
        self._next(3)
        self._check_lists(answered, dropped)
        self._lists = self._listed(answered, dropped)
        return b"" if self._sign is None else self._sign(self._lists)

    def _listed(self, answered: Sequence[str], dropped: Sequence[str]) -> bytes:
        return self._plan.context("answered", *sorted(answered)) + self._plan.context(
            "dropped", *sorted(dropped)
        )

    def _check_lists(self, answered: Sequence[str], dropped: Sequence[str]) -> None:
        alive, gone = set(answered), set(dropped)
        known = set(self._secrets.received)
        if alive & gone or not known <= alive | gone or self.client not in alive:
            raise StaleRoundError(
                "secure aggregation: the lists of answering and dropped clients contradict each other or this "
                "client's own view; nothing is revealed"
            )
        if len(alive) < self._plan.least_clients:
            raise TooFewRepliesError(
                f"secure aggregation: {len(alive)} answers, {self._plan.least_clients} needed; nothing is revealed"
            )
        if len(known & alive) < self._plan.threshold(len(self._secrets.peers)):
            raise TooFewRepliesError("secure aggregation: too few of this client's neighbours answered")

    def _check_confirmed(self, lists: bytes, confirmed: Mapping[str, bytes]) -> None:
        if self._verify is None:
            return
        if lists != self._lists:
            raise StaleRoundError(
                "secure aggregation: the lists of clients are not those that this client signed; nothing is revealed"
            )
        peers = self._secrets.peers
        agreed = [p for p, sig in confirmed.items() if p in peers and self._verify(p, lists, sig)]
        if len(agreed) < self._plan.threshold(len(peers)):
            raise PeerIdentityError(
                f"secure aggregation: {len(agreed)} neighbours of client {self.client!r} signed the same lists; "
                f"{self._plan.threshold(len(peers))} needed. The server may tell clients different stories"
            )

    def unmask(
        self, answered: Sequence[str], dropped: Sequence[str], confirmed: Mapping[str, bytes] | None = None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Last step: reveal one share per neighbour - never both of anybody's.

        Args:
            answered: clients whose masked update is in the sum (this client among them).
            dropped: clients that completed step 2 and did not answer step 3.
            confirmed: client to its signature over the same lists; needed where signatures are verified.

        Returns: (shares of self-mask seeds of neighbours that answered, shares of mask keys of dropped ones).

        Raises:
            StaleRoundError: if the lists contradict each other, this client's own view or what it signed.
            TooFewRepliesError: too few answers: the sum would hide nobody.
            PeerIdentityError: too few neighbours signed the same lists.
        """
        self._next(3 if self._lists is None else 4)
        self._check_lists(answered, dropped)
        self._check_confirmed(self._listed(answered, dropped), confirmed or {})
        received, alive = self._secrets.received, set(answered)
        seeds = {peer: share[1] for peer, share in sorted(received.items()) if peer in alive}
        keys = {peer: share[0] for peer, share in sorted(received.items()) if peer not in alive}
        self._secrets.received = {}
        return seeds, keys


def self_mask_key(plan: SecAggPlan, client: str, seed: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derive(seed, plan.context("self", client))


def pair_mask_key(plan: SecAggPlan, client: str, private: bytes, peer: str, public: bytes) -> bytes:
    """Return the key of the mask that `client` and `peer` share."""
    first, second = sorted((client, peer))
    return agree(private, public, plan.context("mask", first, second))
