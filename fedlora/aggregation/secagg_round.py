"""Secure aggregation as a few exchanges of plain records, whatever carries them.

`secure_sum` runs at the server over any `Exchange`; `SecAggNode` answers at a node for its clients. A client
that does not answer a step, or refuses it, is a dropout from then on; a refusal comes back with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedlora.aggregation.secagg_client import ClientKeys, SecAggClient, SecAggPlan, Verify
from fedlora.aggregation.secagg_server import SecAggServer
from fedlora.errors import FedLoraError, WireError

STEPS: Final = ("keys", "shares", "masked", "confirm", "unmask")
"""In order; "confirm" is asked for only where a client signs its keys."""
REFUSED: Final = "refused"
Body = Mapping[str, Any]
"""JSON-ready values, and under "vector" a numpy array."""

Exchange = Callable[[str, Mapping[str, Body]], Mapping[str, Body]]
"""(step, client to question) -> client to answer, of those that answered in time."""


def secure_sum(
    exchange: Exchange,
    plan: SecAggPlan,
    clients: Sequence[str],
    count: int,
    degree: int | None = None,
    before_open: Callable[[tuple[str, ...]], None] | None = None,
    on_refused: Callable[[str, str], None] | None = None,
) -> tuple[npt.NDArray[np.float64], tuple[str, ...]]:
    """Return the sum of the clients' vectors without seeing one of them.

    Args:
        exchange: carries one step.
        plan: PUBLIC constants.
        clients: who takes part.
        count: numbers per client.
        degree: neighbours per client, None for everybody.
        before_open: called with the answering clients before anything is unmasked; raising keeps the
            sum hidden (ledger charge, honest-count check).
        on_refused: called with a client and its reason where it refuses a step (keys without its peers'
            signatures, contradicting lists) or its answer is not used (unusable keys, missing or wrong shares).

    Returns: (sum, clients in it).

    Raises:
        TooFewRepliesError: too many dropouts; nothing was opened.
        InconsistentRepliesError: a client lied about its secrets, so that the masks cannot be taken off.
    """
    server = SecAggServer(plan, count, degree, on_refused)

    def ask(step: str, questions: Mapping[str, Body]) -> dict[str, Body]:
        return _without_refusals(exchange(step, questions), on_refused)

    announced = ask("keys", {client: {} for client in clients})
    keys = [
        read for client, body in sorted(announced.items()) if (read := _read_keys(client, body)) is not None
    ]
    questions = server.take_keys(keys)
    sealed = ask("shares", {c: {"neighbours": [_write_keys(k) for k in ks]} for c, ks in questions.items()})
    routed = server.take_shares(
        {c: blobs for c, body in sealed.items() if (blobs := _read_blobs(body)) is not None}
    )
    masked = ask("masked", {c: {"sealed": {p: b.hex() for p, b in own.items()}} for c, own in routed.items()})
    for client in sorted(masked):
        try:
            server.take_masked(client, np.asarray(masked[client].get("vector")))
        except WireError as error:
            if on_refused is not None:
                on_refused(client, str(error))
    if before_open is not None:
        before_open(server.answered)
    lists: dict[str, Any] = {"answered": list(server.answered), "dropped": list(server.dropped)}
    if any(one.signature for one in keys):
        signed = ask("confirm", dict.fromkeys(server.answered, lists))
        lists["confirmed"] = {c: str(body.get("signature", "")) for c, body in sorted(signed.items())}
    opened = ask("unmask", dict.fromkeys(server.answered, lists))
    for client in sorted(opened):
        read_shares = _read_shares(opened[client])
        if read_shares is not None and client in server.answered:
            server.take_unmask(client, *read_shares)
    return server.open()


def _without_refusals(
    answers: Mapping[str, Body], on_refused: Callable[[str, str], None] | None
) -> dict[str, Body]:
    kept: dict[str, Body] = {}
    for client, body in answers.items():
        if REFUSED not in body:
            kept[client] = body
        elif on_refused is not None:
            on_refused(client, str(body[REFUSED])[:1000])
    return kept


class SecAggNode:
    """Answers the four steps for the logical clients of one node.

    Args:
        plan: PUBLIC constants of the round.
        update: client to its vector (float32, already clipped and noised where the run is private);
            called once, at step "masked".
        sign: client to signer with its identity key, or None.
        verify: checks peers' signatures, or None.
    """

    def __init__(
        self,
        plan: SecAggPlan,
        update: Callable[[str], npt.NDArray[np.float32]],
        *,
        sign: Callable[[bytes], bytes] | None = None,
        verify: Verify | None = None,
    ) -> None:
        """Start before step "keys"."""
        self._plan, self._update, self._sign, self._verify = plan, update, sign, verify
        self._clients: dict[str, SecAggClient] = {}

    def handle(self, step: str, questions: Mapping[str, Body]) -> dict[str, Body]:
        """Answer one step; a client whose step fails drops out, with its reason under "refused".

        Raises:
            WireError: if there is no such step.
        """
        if step not in STEPS:
            raise WireError(f"secure aggregation: step {step!r}; allowed: {STEPS}")
        answers: dict[str, Body] = {}
        for client, body in sorted(questions.items()):
            try:
                answers[client] = self._answer(step, client, body)
            except FedLoraError as error:
                self._clients.pop(client, None)
                answers[client] = {REFUSED: f"{type(error).__name__} (exit code {error.exit_code}): {error}"}
            except (KeyError, ValueError, TypeError, AttributeError):
                self._clients.pop(client, None)
        return answers

    def _answer(self, step: str, client: str, body: Body) -> Body:
        if step == "keys":
            self._clients[client] = SecAggClient(client, self._plan, sign=self._sign, verify=self._verify)
            return _write_keys(self._clients[client].keys())
        own = self._clients[client]
        if step == "shares":
            peers = [
                keys for raw in body["neighbours"] if (keys := _read_keys(raw["client"], raw)) is not None
            ]
            return {"sealed": {peer: blob.hex() for peer, blob in own.shares(peers).items()}}
        if step == "masked":
            sealed = {str(peer): bytes.fromhex(blob) for peer, blob in body["sealed"].items()}
            return {"vector": own.masked(sealed, self._update(client))}
        answered, dropped = list(body["answered"]), list(body["dropped"])
        if step == "confirm":
            return {"signature": own.confirm(answered, dropped).hex()}
        confirmed = {str(peer): bytes.fromhex(one) for peer, one in body.get("confirmed", {}).items()}
        seeds, privates = own.unmask(answered, dropped, confirmed)
        return {
            "seeds": {peer: hex(share) for peer, share in seeds.items()},
            "keys": {peer: hex(share) for peer, share in privates.items()},
        }


def _write_keys(keys: ClientKeys) -> dict[str, str]:
    return {
        "client": keys.client,
        "mask": keys.mask_key.hex(),
        "seal": keys.seal_key.hex(),
        "signature": keys.signature.hex(),
    }


def _read_keys(client: str, body: Body) -> ClientKeys | None:
    try:
        parts = [bytes.fromhex(body[name]) for name in ("mask", "seal", "signature")]
    except (KeyError, ValueError, TypeError):
        return None
    return ClientKeys(client, parts[0], parts[1], parts[2]) if len(parts[0]) == len(parts[1]) == 32 else None


def _read_blobs(body: Body) -> dict[str, bytes] | None:
    try:
        return {str(peer): bytes.fromhex(blob) for peer, blob in body["sealed"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _read_shares(body: Body) -> tuple[dict[str, int], dict[str, int]] | None:
    try:
        seeds = {str(peer): int(share, 16) for peer, share in body["seeds"].items()}
        return seeds, {str(peer): int(share, 16) for peer, share in body["keys"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
