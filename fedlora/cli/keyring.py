"""Keys of clients: the deployment key of a SuperNode, a site's identity key, and the server's allow-list.

Two keys, on purpose: the *deployment key* (ECDSA P-384) authenticates the connection and is rotated or
revoked like any other; the *identity key* (Ed25519) belongs to the site's trainer, signs receipts and outlives
rotations, so a ledger keeps its owner.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedlora.cli.files import PUBLIC, read_file, write_file
from fedlora.errors import AuthenticationError, DeploymentError

_NAME = re.compile(r"^[\w][\w.@-]{0,99}$")
State = Literal["allowed", "revoked"]


@dataclass(frozen=True)
class Entry:
    """PUBLIC. One line of the allow-list.

    Attributes:
        name: the site's name.
        public_key: OpenSSH text of its deployment key.
        fingerprint: "SHA256:..." as ssh-keygen prints it.
        state: "allowed" or "revoked".
        changed: UTC time of the last change, ISO 8601.
        clients: logical client ids that this site may answer for; empty means its name.
    """

    name: str
    public_key: str
    fingerprint: str
    state: State
    changed: str
    clients: tuple[str, ...] = ()


def new_deployment_key(folder: Path, name: str, *, rotate: bool = False) -> Path:
    """Make a site's deployment key pair: `NAME` (OpenSSH, 0600) and `NAME.pub`.

    Returns:
        The path of the public key, which the server's operator needs.

    Raises:
        DeploymentError: if the name cannot be a file name, the key exists and `rotate` is not set, or the reverse.
    """
    _check_name(name)
    if rotate and not (folder / name).exists():
        raise DeploymentError(f"{folder / name}: there is no key to rotate; make one with `fedlora keys new`")
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path = folder / name
    if rotate and path.exists():
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        write_file(folder / f"{name}.old-{stamp}", path.read_bytes())  # the key's place is never empty
    write_file(path, private, replace=rotate)
    return write_file(
        folder / f"{name}.pub", public + b" " + name.encode() + b"\n", mode=PUBLIC, replace=rotate
    )


def new_identity_key(path: Path) -> Path:
    """Make a site's Ed25519 identity key (PEM, 0600) and its public half beside it; never overwritten.

    Raises:
        DeploymentError: if the file exists.
    """
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_file(path, private)
    return write_file(path.with_name(path.name + ".pub"), public + b"\n", mode=PUBLIC, replace=True)


def read_public(path: Path) -> tuple[str, str]:
    """Return (OpenSSH text without comment, fingerprint) of a public deployment key.

    Raises:
        AuthenticationError: if it is not an ECDSA P-384 OpenSSH public key (a private key is refused too).
    """
    raw = read_file(path, "public key", "give the .pub file that `fedlora keys new` wrote")
    return parse_public(raw.decode("utf-8", "replace"), str(path))


def parse_public(text: str, what: str) -> tuple[str, str]:
    """Return (OpenSSH text without comment, fingerprint) of an OpenSSH public key text.

    Raises:
        AuthenticationError: if it is not an ECDSA P-384 public key.
    """
    if "PRIVATE KEY" in text:
        raise AuthenticationError(
            f"{what}: is a private key; it must never leave its site. Give the .pub file"
        )
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise AuthenticationError(
            f"{what}: not an OpenSSH public key; make one with `fedlora keys new`"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise AuthenticationError(
            f"{what}: got another kind of key; allowed is ECDSA P-384 (`fedlora keys new`)"
        )
    plain = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    digest = hashlib.sha256(base64.b64decode(plain.split()[1])).digest()
    return plain, "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class AllowList:
    """The server's list of sites; a JSON file, replaced in one step."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        """Keep the entries; `load` reads a file."""
        self.path = path
        self._entries = dict(entries)

    @classmethod
    def load(cls, path: Path, *, missing_ok: bool = False) -> AllowList:
        """Read an allow-list.

        Raises:
            DeploymentError: if it is missing (unless allowed) or malformed.
        """
        if missing_ok and not path.exists():
            return cls(path, {})
        raw = read_file(path, "allow-list", "make it with `fedlora keys allow`")
        try:
            record = json.loads(raw)
            if record["schema"] != 1:
                raise DeploymentError(f"allow-list {path}: schema {record['schema']!r}; spoken here 1")
            entries = {}
            for item in record["sites"]:
                entry = Entry(**{**item, "clients": tuple(item.get("clients", ()))})
                parse_public(entry.public_key, f"allow-list {path}, site {entry.name}")
                entries[entry.name] = entry
        except (ValueError, KeyError, TypeError) as error:
            raise DeploymentError(f"allow-list {path}: malformed ({type(error).__name__})") from None
        return cls(path, entries)

    def save(self) -> None:
        """Write the list durably."""
        record = {"schema": 1, "sites": [asdict(entry) for entry in self.entries()]}
        write_file(self.path, (json.dumps(record, indent=2) + "\n").encode(), mode=PUBLIC, replace=True)

    def entries(self) -> list[Entry]:
        """Return all entries by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    def allowed(self) -> list[Entry]:
        """Return the entries that may connect."""
        return [entry for entry in self.entries() if entry.state == "allowed"]

    def allow(
        self, name: str, public_key_file: Path, *, clients: tuple[str, ...] = (), rotate: bool = False
    ) -> Entry:
        """Allow a site; with `rotate`, its new key replaces the old one under the same name.

        Raises:
            AuthenticationError: if the key belongs to another site or was revoked, or the site has a key already.
        """
        _check_name(name)
        text, fingerprint = read_public(public_key_file)
        for other in self.entries():
            if other.fingerprint == fingerprint and (other.name != name or other.state == "revoked"):
                raise AuthenticationError(
                    f"key {fingerprint}: {other.state} as {other.name}; make a new key with `fedlora keys new`"
                )
        known = self._entries.get(name)
        if known is not None and known.state == "allowed" and known.fingerprint != fingerprint and not rotate:
            raise AuthenticationError(f"site {name}: has a key already; give --rotate to replace it")
        if known is not None and known.fingerprint != fingerprint:
            self._retire(known)
        entry = Entry(name, text, fingerprint, "allowed", _now(), clients or (known.clients if known else ()))
        self._entries[name] = entry
        return entry

    def revoke(self, name: str) -> Entry:
        """Revoke a site's key.

        Raises:
            AuthenticationError: if there is no such site.
        """
        known = self._entries.get(name)
        if known is None:
            names = ", ".join(sorted(self._entries)) or "none"
            raise AuthenticationError(f"site {name}: not on the allow-list; it has {names}")
        entry = replace(known, state="revoked", changed=_now())
        self._entries[name] = entry
        return entry

    def _retire(self, entry: Entry) -> None:
        """Keep a replaced key as revoked under a name of its own, so that it can never come back."""
        name = f"{entry.name}@{entry.fingerprint[7:15].replace('/', '-').replace('+', '-')}"
        self._entries[name] = replace(entry, name=name, state="revoked", changed=_now())


def _check_name(name: str) -> None:
    if _NAME.match(name) is None:
        raise DeploymentError(f"name {name!r}: use letters, digits, '.', '-', '_' and '@' (100 at most)")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
