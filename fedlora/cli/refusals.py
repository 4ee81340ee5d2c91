"""What the output of Flower's SuperNode says about why it ended, as an error of this library and a remedy."""

from __future__ import annotations

from fedlora.errors import AuthenticationError, FedLoraError

REFUSALS: tuple[tuple[str, type[FedLoraError], str], ...] = (
    (
        "[code: 2004]",
        AuthenticationError,
        "the server does not know this key; ask its operator to allow it, or make a new one with "
        "`fedlora keys rotate` if it was revoked (or a relay with this key is connected already)",
    ),
    (
        "[code: 2001]",
        AuthenticationError,
        "the server accepts registered keys only; ask its operator to allow it",
    ),
    (
        "certificate has expired",
        AuthenticationError,
        "the server's certificate has expired; its operator must run `fedlora certs renew`",
    ),
    (
        "not yet valid",
        AuthenticationError,
        "the server's certificate is not valid yet; check this machine's clock",
    ),
    (
        "Hostname mismatch",
        AuthenticationError,
        "the server's certificate is for another name; use a name it lists",
    ),
    (
        "IP address mismatch",
        AuthenticationError,
        "the server's certificate is for another address; use one it lists",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        AuthenticationError,
        "the server's certificate is not signed by the CA given with "
        "--ca; get the federation's ca.crt from its operator over a safe way",
    ),
)
"""Text in Flower's output, the error it means, and what to do; the first that occurs decides."""


def reason_of(lines: list[str]) -> tuple[type[FedLoraError] | None, str]:
    """Return (error class for refusals that waiting does not cure, one-line reason)."""
    text = "\n".join(lines)
    for pattern, error, remedy in REFUSALS:
        if pattern in text:
            return error, remedy
    last = [line.strip() for line in lines if "rror" in line and "Exit Code" not in line]
    return None, (last[-1][:200] if last else "no reason given; see supernode.log")
