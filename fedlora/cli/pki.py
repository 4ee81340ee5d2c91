"""The federation's own certificate authority and the server's certificate.

The CA signs server certificates only (clients authenticate by their own keys), so `ca.key` may lie
offline between renewals. Rotation of the CA is done with an overlap: `ca.crt` holds the new and the old
certificate until every site has it.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlora.cli.files import PUBLIC, read_file, require_private, write_file
from fedlora.errors import AuthenticationError, DeploymentError

CA_CERT, CA_KEY = "ca.crt", "ca.key"
SERVER_CERT, SERVER_KEY = "server.crt", "server.key"
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Always in the server's certificate: the server's own processes connect over the loopback."""
CLOCK_SKEW = datetime.timedelta(minutes=10)
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True)
class CertificateFacts:
    """PUBLIC. What a certificate says: subject, alternative names, validity in UTC, fingerprint, days left."""

    subject: str
    names: tuple[str, ...]
    not_before: datetime.datetime
    not_after: datetime.datetime
    sha256: str

    def days_left(self, now: datetime.datetime | None = None) -> float:
        """Return days until it expires (negative once expired)."""
        moment = datetime.datetime.now(datetime.UTC) if now is None else now
        return (self.not_after - moment).total_seconds() / 86400


def make_ca(
    folder: Path, *, name: str = "fedlora federation", days: int = 3650, replace: bool = False
) -> Path:
    """Make a certificate authority: `ca.key` (0600) and `ca.crt`.

    With `replace`, the old certificate stays in `ca.crt` behind the new one, so that sites that have either
    keep trusting the server while certificates are exchanged.

    Raises:
        DeploymentError: if there is one already and `replace` is not set.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, subject, key.public_key(), days)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    target = folder / CA_CERT
    if replace and target.exists():
        old = x509.load_pem_x509_certificates(target.read_bytes())[0]
        pem += old.public_bytes(serialization.Encoding.PEM)
    write_file(folder / CA_KEY, _key_pem(key), replace=replace)
    return write_file(target, pem, mode=PUBLIC, replace=replace)


def check_hosts(hosts: Sequence[str]) -> None:
    """Check the names and addresses of a certificate before anything is written.

    Raises:
        DeploymentError: if there is none, or one is neither a DNS name in ASCII nor an IP address.
    """
    if not hosts:
        raise DeploymentError(
            "server certificate: no host; give each name or address that clients connect to"
        )
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if len(host) > 253 or not _DNS_NAME.fullmatch(host):
                raise DeploymentError(
                    f"--host {host!r}: give a DNS name (other scripts as xn--...) or an IP address"
                ) from None


def issue_server(folder: Path, hosts: Sequence[str], *, days: int = 397, replace: bool = False) -> Path:
    """Issue the server's certificate for these DNS names and IP addresses: `server.key`, `server.crt`.

    Raises:
        DeploymentError: if the CA is missing, a host is unusable, or the files exist and `replace` is not set.
    """
    check_hosts(hosts)
    if (folder / CA_KEY).exists():
        require_private(folder / CA_KEY, "CA key")
    ca = _certificates(folder / CA_CERT, "CA certificate")[0]
    ca_key = _ca_key(folder / CA_KEY, ca)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    hosts = list(dict.fromkeys([*hosts, *LOCAL_NAMES]))
    certificate = (
        _builder(subject, ca.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    write_file(folder / SERVER_KEY, _key_pem(key), replace=replace)
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return write_file(folder / SERVER_CERT, pem, mode=PUBLIC, replace=replace)


def certificate_facts(path: Path) -> list[CertificateFacts]:
    """Return the facts of every certificate in a PEM file.

    Raises:
        DeploymentError: if the file is missing or holds no certificate.
    """
    return [_facts(certificate) for certificate in _certificates(path, "certificate")]


def check_server_certificate(folder: Path, now: datetime.datetime | None = None) -> CertificateFacts:
    """Check that the server's certificate is valid now and signed by a certificate of `ca.crt`.

    Raises:
        AuthenticationError: if it has expired, is not valid yet, or another CA signed it.
    """
    moment = datetime.datetime.now(datetime.UTC) if now is None else now
    cas = _certificates(folder / CA_CERT, "CA certificate")
    certificate = _certificates(folder / SERVER_CERT, "server certificate")[0]
    facts = _facts(certificate)
    if moment > facts.not_after:
        raise AuthenticationError(
            f"server certificate: expired at {facts.not_after:%Y-%m-%d %H:%M} UTC; run `fedlora certs renew`"
        )
    if moment < facts.not_before:
        raise AuthenticationError(
            f"server certificate: valid only from {facts.not_before:%Y-%m-%d %H:%M} UTC; check this machine's clock"
        )
    for ca in cas:
        try:
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            continue
        if not ca.not_valid_before_utc <= moment <= ca.not_valid_after_utc:
            raise AuthenticationError(
                f"CA certificate: valid from {ca.not_valid_before_utc:%Y-%m-%d} to {ca.not_valid_after_utc:%Y-%m-%d} "
                "only; run `fedlora certs renew --new-ca` and send ca.crt to every site"
            )
        return facts
    raise AuthenticationError(
        "server certificate: not signed by a certificate in ca.crt; run `fedlora certs renew`"
    )


def check_server_key(folder: Path) -> None:
    """Check that the server's key is private and belongs to its certificate.

    Raises:
        DeploymentError: if it is missing, unreadable or open to others.
        AuthenticationError: if it belongs to another certificate.
    """
    path = folder / SERVER_KEY
    data = read_file(path, "server key", "run `fedlora certs renew`")
    require_private(path, "server key", group=True)
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        raise DeploymentError(f"server key {path}: not a private key; run `fedlora certs renew`") from None
    kind = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    certificate = _certificates(folder / SERVER_CERT, "server certificate")[0]
    if key.public_key().public_bytes(*kind) != certificate.public_key().public_bytes(*kind):
        raise AuthenticationError(
            "server key: belongs to another certificate than server.crt; run `fedlora certs renew`"
        )


def _ca_key(path: Path, ca: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    data = read_file(path, "CA key", "bring it back for the renewal, or run `fedlora certs init` first")
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        raise DeploymentError(f"CA key {path}: not a private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeploymentError("CA key: not an elliptic-curve key; run `fedlora certs init` in another folder")
    if key.public_key() != ca.public_key():
        raise DeploymentError(f"CA key {path}: belongs to another certificate than the first one in ca.crt")
    return key


def _certificates(path: Path, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(read_file(path, what, "run `fedlora certs init`"))
    except ValueError:
        raise DeploymentError(f"{what} {path}: not a PEM certificate") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _facts(certificate: x509.Certificate) -> CertificateFacts:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = tuple(str(name.value) for name in extension)
    except x509.ExtensionNotFound:
        names = ()
    return CertificateFacts(
        subject=certificate.subject.rfc4514_string(),
        names=names,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        sha256=certificate.fingerprint(hashes.SHA256()).hex(),
    )
