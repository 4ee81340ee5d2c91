"""What is in deploy/: checked by the tools that run here, and for the separation that it promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_helpers import ROOT

from fedlora.cli.keyring import AllowList
from fedlora.cli.pki import check_server_certificate
from fedlora.config import load_config
from fedlora.config.trainer import load_trainer
from fedlora.ledger import load_or_create_secret, open_ledger

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(
    path for path in (DEPLOY / "docker").glob("Dockerfile.*") if path.suffix != ".dockerignore"
)
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted((DEPLOY / "scripts").glob("*.sh"))


def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def run(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **more)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_lint_are_pinned_and_never_root(path: Path) -> None:
    done = run(tool("hadolint"), str(path))
    assert done.returncode == 0, done.stdout
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+", base) or "@sha256:" in base for base in bases), bases
    assert re.search(r"^USER \d{5}:\d{5}$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
    assert (path.with_name(path.name + ".dockerignore")).exists()


def test_the_relays_image_has_no_torch() -> None:
    text = (DEPLOY / "docker" / "Dockerfile.client").read_text()
    assert "--no-deps /src" in text
    installs = [line for line in text.splitlines() if "pip install" in line or '"flwr' in line]
    assert not any("torch" in line for line in installs)
    code = (
        "import sys, client.app, fedlora.cli.client, fedlora.cli.status, fedlora.training.service; "
        "more = ('torch', 'ray', 'pydantic', 'omegaconf', 'sqlalchemy', 'scipy', 'transformers', 'dp_accounting'); "
        "print([name for name in more if name in sys.modules])"
    )
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.stdout.strip().endswith("[]"), done.stderr


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def mounts(service: dict[str, Any]) -> set[str]:
    return {volume.split(":")[0] for volume in service["volumes"]}


def test_compose_separates_trainers_from_relays() -> None:
    services = compose()["services"]
    assert set(services) == {"server"} | {f"{role}-{n}" for role in ("trainer", "client") for n in (1, 2, 3)}
    for number in (1, 2, 3):
        trainer, client = services[f"trainer-{number}"], services[f"client-{number}"]
        assert trainer["network_mode"] == "none"
        assert mounts(trainer) & mounts(client) == {f"socket-{number}"}
        assert not any("data" in mount or "ledger" in mount or "trainer" in mount for mount in mounts(client))
        for other in (1, 2, 3):
            if other != number:
                theirs = mounts(services[f"trainer-{other}"]) | mounts(services[f"client-{other}"])
                assert (mounts(trainer) | mounts(client)) & theirs <= {"./federation/models"}
    for service in services.values():
        assert "./federation/models:/models" not in service["volumes"]  # read-only wherever it is mounted
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "privileged" not in service
        assert (DEPLOY / "compose" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("part", ["server", "site"])
def test_kubernetes_manifests_build_and_validate(part: str, tmp_path: Path) -> None:
    built = run(tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / part))
    assert built.returncode == 0, built.stderr
    target = tmp_path / "built.yaml"
    target.write_text(built.stdout)
    done = run(tool("kubernetes-validate"), str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    for document in yaml.safe_load_all(built.stdout):
        if document["kind"] == "StatefulSet":
            check_pod(document["spec"]["template"]["spec"])


def check_pod(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert ":" in container["image"]


def test_the_relays_container_mounts_no_data_no_ledger_and_no_identity() -> None:
    built = run(tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / "site"))
    pods = [d for d in yaml.safe_load_all(built.stdout) if d["kind"] == "StatefulSet"]
    containers = {c["name"]: c for c in pods[0]["spec"]["template"]["spec"]["containers"]}
    seen = {name: {mount["name"] for mount in c["volumeMounts"]} for name, c in containers.items()}
    assert seen["trainer"] & seen["relay"] == {"socket"}
    users = {name: c["securityContext"]["runAsUser"] for name, c in containers.items()}
    assert users["trainer"] != users["relay"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_units_verify_and_are_hardened(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    copy = tmp_path / path.name
    copy.write_text(text.replace("/opt/fedlora/bin/fedlora", "/bin/true"))
    for other in UNITS:
        if other != path:
            (tmp_path / other.name).write_text(
                other.read_text().replace("/opt/fedlora/bin/fedlora", "/bin/true")
            )
    done = run(tool("systemd-analyze"), "verify", str(copy))
    assert path.name not in done.stderr, done.stderr
    for wanted in (
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=\n",
        "User=fedlora-",
    ):
        assert wanted in text
    if "trainer" in path.name:
        assert "PrivateNetwork=yes" in text


def test_each_role_has_a_user_of_its_own() -> None:
    users = {re.search(r"^User=(.*)$", path.read_text(), re.MULTILINE)[1] for path in UNITS}  # type: ignore[index]
    assert len(users) == 3


def test_commands_in_artefacts_are_commands_that_exist() -> None:
    """Every option that an entry point passes is an option of that command."""
    text = "\n".join(
        path.read_text() for path in [*DOCKERFILES, *UNITS, *(DEPLOY / "kubernetes").rglob("*.yaml")]
    )
    for name in ("server", "client", "trainer"):
        done = run(sys.executable, "-m", "fedlora.cli.main", name, "--help", cwd=ROOT)
        known = set(re.findall(r"--[a-z-]+", done.stdout))
        used = set()
        for line in text.splitlines():
            if (
                f"fedlora {name} " in line
                or (name == "client" and '"--superlink"' in line)
                or (name == "server" and '"--allow"' in line)
            ):
                used |= set(re.findall(r"--[a-z-]+", line))
        assert used <= known, (name, used - known)


def test_the_ray_clusters_manifest_is_complete() -> None:
    document = yaml.safe_load((DEPLOY / "ray" / "raycluster.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayCluster")
    import ray

    assert document["spec"]["rayVersion"] == ray.__version__
    groups = [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["resources"]["limits"]["memory"]
            assert container["name"].startswith("ray-")
    for group in document["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_errors(path: Path) -> None:
    assert run("bash", "-n", str(path)).returncode == 0
    text = path.read_text()
    assert "set -euo pipefail" in text
    assert os.access(path, os.X_OK)
    assert run("bash", str(path)).returncode != 0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts") / "federation"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FEDLORA": f"{sys.executable} -m fedlora.cli.main"}
    done = run(
        "bash", str(DEPLOY / "scripts" / "new-federation.sh"), str(folder), "server", "2", env=environment
    )
    assert done.returncode == 0, done.stderr
    again = run("bash", str(DEPLOY / "scripts" / "new-federation.sh"), str(folder), env=environment)
    assert again.returncode != 0
    return folder


def test_the_script_makes_a_usable_federation_with_only_what_each_role_needs(federation: Path) -> None:
    found = {str(path.relative_to(federation)) for path in federation.rglob("*") if path.is_file()}
    site = {
        "client/site.key",
        "client/ca.crt",
        "trainer/site.yaml",
        "trainer/identity.pem",
        "data/records.jsonl",
    }
    for number in (1, 2):
        assert {f"site-{number}/{name}" for name in site} <= found
        config = load_trainer(federation / f"site-{number}" / "trainer" / "site.yaml").config
        assert config.site.name == f"site-{number}"
        assert not list((federation / f"site-{number}" / "client").glob("*.pem"))
    assert "ca.key" in found
    assert "server/certs/ca.key" not in found
    assert check_server_certificate(federation / "server" / "certs")
    assert [entry.name for entry in AllowList.load(federation / "server" / "allow.json").allowed()] == [
        "site-1",
        "site-2",
    ]
    assert load_config(federation / "server" / "run.yaml", deployment=True)


def test_certificates_are_renewed_with_the_key_from_outside(federation: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FEDLORA": f"{sys.executable} -m fedlora.cli.main"}
    certs = federation / "server" / "certs"
    before = check_server_certificate(certs).sha256
    script = str(DEPLOY / "scripts" / "renew-certificates.sh")
    done = run("bash", script, str(certs), str(federation / "ca.key"), "--new-ca", env=environment)
    assert done.returncode == 0, done.stderr
    assert check_server_certificate(certs).sha256 != before
    assert not (certs / "ca.key").exists()


def test_the_backup_script_copies_a_ledger_in_use(tmp_path: Path) -> None:
    secret = load_or_create_secret(tmp_path / "ledger.secret")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FEDLORA": f"{sys.executable} -m fedlora.cli.main"}
    script = str(DEPLOY / "scripts" / "backup-ledger.sh")
    with open_ledger(tmp_path / "ledger.db", secret=secret) as ledger:
        done = run("bash", script, str(tmp_path / "ledger.db"), str(tmp_path / "backups"), env=environment)
        assert done.returncode == 0, done.stderr
        assert ledger.accounts() == ()
    (copy,) = (tmp_path / "backups").glob("ledger-*.db")
    assert copy.stat().st_mode & 0o077 == 0
    with open_ledger(copy, secret=secret, read_only=True) as ledger:
        assert ledger.accounts() == ()


@pytest.mark.parametrize("name", ["examples/server/run.yaml", "kubernetes/server/run.yaml"])
def test_server_examples_are_valid(name: str) -> None:
    assert load_config(DEPLOY / name, deployment=True)


@pytest.mark.parametrize("name", ["examples/site/site.yaml", "kubernetes/site/site-config.yaml"])
def test_site_examples_are_valid(name: str) -> None:
    assert load_trainer(DEPLOY / name)


def test_no_secret_is_in_the_repository() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert "PRIVATE KEY-----" not in text
    assert json.loads((DEPLOY / "kubernetes" / "server" / "allow.json").read_text())["sites"] == []
