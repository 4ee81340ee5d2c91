"""Pinned identities of secure aggregation: who a site takes for whom, whatever the server says.

A site signs the keys that its clients announce with the Ed25519 identity key that signs its receipts too; a
prefix of its own keeps the uses apart (a signed receipt can never pass for a key, nor the other way round). Peers are
pinned in the site's own file, by their `.pub` files or in hex; they were handed over by people, not by the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedlora.config.trainer import TrainerConfig, site_path
from fedlora.errors import AuthenticationError, PeerIdentityError
from fedlora.training.secure import SecureDesk

DOMAIN: Final = b"fedlora-secagg-identity-v1\n"
HONEST_BUT_CURIOUS: Final = (
    "an honest-but-curious server and any minority of the clients; the server is trusted to route the clients' "
    "own keys"
)
PINNED: Final = (
    "a server that may deviate (it cannot put keys of its own between pinned clients, nor tell them different lists "
    "of dropouts) together with fewer than a third of a client's neighbours"
)


class PinnedIdentities:
    """Signs with a site's identity key (SENSITIVE) and verifies its peers by their pinned public keys.

    Args:
        key: the site's identity key.
        own: clients that live at this site; their identity is the site's.
        peers: client elsewhere to the pinned public key of its site.

    Raises:
        PeerIdentityError: if a client of this site is pinned to another key.
    """

    def __init__(
        self, key: Ed25519PrivateKey, own: Sequence[str], peers: Mapping[str, Ed25519PublicKey]
    ) -> None:
        """Bind the keys."""
        mine = key.public_key()
        for client in own:
            if client in peers and peers[client] != mine:
                raise PeerIdentityError(
                    f"secure_sums.peers: client {client!r} lives here, but another identity is pinned"
                )
        self._key, self._known = key, {**peers, **dict.fromkeys(own, mine)}

    def sign(self, message: bytes) -> bytes:
        """Sign what a client of this site announces."""
        return self._key.sign(DOMAIN + message)

    def verify(self, client: str, message: bytes, signature: bytes) -> bool:
        """Return whether the pinned identity of a client signed a message.

        Raises:
            PeerIdentityError: if no identity is pinned for that client.
        """
        known = self._known.get(client)
        if known is None:
            raise PeerIdentityError(
                f"secure aggregation: no identity is pinned for client {client!r}; add its .pub file to "
                "secure_sums.peers of this site's file, or keep it out of the run"
            )
        try:
            known.verify(signature, DOMAIN + message)
        except InvalidSignature:
            return False
        return True


def read_peer(value: str, config_file: str | Path, client: str) -> Ed25519PublicKey:
    """Return a pinned public key: 64 hex digits, or a `.pub` file in OpenSSH's format.

    Raises:
        AuthenticationError: if it is neither, or another kind of key.
    """
    where = f"secure_sums.peers: client {client!r}"
    if len(value) == 64 and set(value) <= set("0123456789abcdef"):
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(value))
    try:
        raw = site_path(config_file, value).read_bytes()
    except OSError:
        raise AuthenticationError(
            f"{where}: {value} cannot be read; give the peer's .pub file or 64 hex digits"
        ) from None
    if b"PRIVATE KEY" in raw:
        raise AuthenticationError(f"{where}: {value} is a private key; it must never leave its site")
    try:
        key = serialization.load_ssh_public_key(raw)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise AuthenticationError(
            f"{where}: {value} is no Ed25519 identity; give the .pub file beside the peer's identity key"
        )
    return key


def secure_desk(
    config: TrainerConfig, config_file: str | Path, clients: Sequence[str], key: Ed25519PrivateKey | None
) -> SecureDesk:
    """Return a site's desk for secure aggregation: it signs if the site has a key, and verifies if peers are pinned.

    Args:
        config: the site's own file.
        config_file: where it lies.
        clients: logical clients that live here.
        key: the site's identity key, or None.

    Raises:
        AuthenticationError: if a pinned key cannot be used, or peers are pinned and the site has no key.
    """
    sums = config.secure_sums
    if key is None:
        if sums.peers:
            raise AuthenticationError(
                "secure_sums.peers: pinned peers need site.identity_key (`fedlora keys new`)"
            )
        return SecureDesk(least_clients=sums.least_clients)
    peers = {client: read_peer(value, config_file, client) for client, value in sums.peers.items()}
    identities = PinnedIdentities(key, clients, peers)
    return SecureDesk(
        least_clients=sums.least_clients,
        sign=identities.sign,
        verify=identities.verify if peers else None,
    )


def sums_hold_against(config: TrainerConfig) -> str:
    """Return against whom this site's updates stay hidden in secure sums."""
    return PINNED if config.secure_sums.peers else HONEST_BUT_CURIOUS
