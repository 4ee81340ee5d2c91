"""A server whose certificate does not fit: the relay ends at once, in one line, with its exit code."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from deploy_helpers import ROOT

from fedlora.cli import keyring, pki
from fedlora.errors import AuthenticationError

DAY = datetime.timedelta(days=1)
CASES = {
    "expired": ((-10, -1), "localhost", "has expired"),
    "not yet valid": ((2, 10), "localhost", "clock"),
    "another name": ((-1, 10), "fl.example.org", "another name"),
}


def certificate(folder: Path, days: tuple[int, int], name: str) -> tuple[Path, Path]:
    """Issue a certificate of the folder's CA for one name and any time."""
    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    files = folder / f"{days[0]}.crt", folder / f"{days[0]}.key"
    files[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(*encoding))
    return files


@contextlib.contextmanager
def listening(files: tuple[Path, Path]) -> Iterator[int]:
    """A TLS server that does nothing but the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, ssl.SSLError), stream:
                stream.settimeout(10)
                context.wrap_socket(stream, server_side=True).recv(1)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.close()


@pytest.mark.parametrize("name", list(CASES))
def test_a_certificate_that_does_not_fit_ends_the_relay_in_one_line(tmp_path: Path, name: str) -> None:
    days, host, reason = CASES[name]
    pki.make_ca(tmp_path)
    keyring.new_deployment_key(tmp_path / "keys", "site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with listening(certificate(tmp_path, days, host)) as port:
        arguments = ["--superlink", f"localhost:{port}", "--ca", "ca.crt", "--key", "keys/site"]
        place = ["--trainer-socket", "none", "--token", "none", "--state", "state"]
        done = subprocess.run(
            [sys.executable, "-m", "fedlora.cli.main", "client", *arguments, *place],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == AuthenticationError.exit_code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fedlora: ")]
    assert len(lines) == 1
    assert reason in lines[0]
    assert "Traceback" not in done.stderr
