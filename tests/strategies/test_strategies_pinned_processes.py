"""Secure sums in a real deployment: TLS, sockets, resident trainers with pinned identities; and a stranger."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools():
    sys.path.insert(0, str(ROOT / "tests" / "deploy"))
    try:
        import deploy_helpers
    finally:
        sys.path.pop(0)
    return deploy_helpers


def pinned_federation(tools, root):
    federation = tools.Federation(root, rounds=2, timeout=120.0, replies=2).make()
    run = (root / "run.yaml").read_text()
    (root / "run.yaml").write_text(run.replace("federation:\n", "federation:\n  secure_aggregation: true\n"))
    for site in federation.sites:
        pins = [f"{peer}: ../{peer}/keys/identity.pem.pub" for peer in federation.sites]
        text = f"secure_sums: {{least_clients: 2, peers: {{{', '.join(pins)}}}}}\n"
        file = root / site / "site.yaml"
        file.write_text(file.read_text() + text)
    return federation


@pytest.mark.long
@pytest.mark.parametrize("stranger", [False, True])
def test_pinned_sites_sum_in_secret_and_a_stranger_is_named(tools, tmp_path, stranger):
    federation = pinned_federation(tools, tmp_path)
    if stranger:  # site-c's identity was never handed to the others: they were given another key
        from fedlora.cli.keyring import new_identity_key

        other = new_identity_key(tmp_path / "other" / "identity.pem")
        for site in ("site-a", "site-b"):
            file = tmp_path / site / "site.yaml"
            file.write_text(file.read_text().replace("../site-c/keys/identity.pem.pub", str(other)))
    try:
        for site in federation.sites:
            federation.start_site(site)
        server = federation.start_server()
        code = server.wait(400)
        lines = federation.rounds_done()
        if stranger:
            assert [line["status"] for line in lines if line["round"] > 0] == ["skipped"] * 2
            assert len({line["adapter"] for line in lines}) == 1
            reasons = json.dumps([line["failed"] for line in lines])
            assert "PeerIdentityError (exit code 73)" in reasons
            assert "site-c" in reasons
        else:
            assert code == 0, federation.log("server")[-3000:]
            assert [line["accepted"] for line in lines if line["round"] > 0] == [3, 3]
            assert all(line["failed"] == {} for line in lines if line["round"] > 0)
    finally:
        federation.stop()
