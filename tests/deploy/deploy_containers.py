"""The images' entry points without a container engine: clean roots, their users, their mounts, no network."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from deploy_helpers import ROOT

DOCKER = ROOT / "deploy" / "docker"
SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "etc", "dev", "proc", "sys")
USERS = {
    "server": (10001, 10001, ()),
    "trainer-cpu": (10002, 10002, (10010,)),
    "client": (10003, 10003, (10010,)),
}


def usable() -> bool:
    """Return whether mount and network namespaces and other users can be had here."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("unshare", "setpriv", "chroot")):
        return False
    return subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Image:
    """What a Dockerfile's last stage says.

    Attributes:
        environment: its ENV.
        user: uid, gid, further groups.
        folder: its WORKDIR.
        entry: ENTRYPOINT.
        command: CMD.
        health: the command of HEALTHCHECK.
    """

    environment: dict[str, str]
    user: tuple[int, int, tuple[int, ...]]
    folder: str
    entry: list[str]
    command: list[str]
    health: list[str]

    @classmethod
    def read(cls, name: str) -> Image:
        """Read deploy/docker/Dockerfile.NAME."""
        text = (DOCKER / f"Dockerfile.{name}").read_text().replace("\\\n", " ")
        last = text[text.rindex("\nFROM ") :]
        pairs = shlex.split(" ".join(re.findall(r"^ENV (.*)$", last, re.MULTILINE)))
        environment = dict(pair.split("=", 1) for pair in pairs)
        uid, gid = map(int, re.search(r"^USER (\d+):(\d+)$", last, re.MULTILINE).groups())  # type: ignore[union-attr]
        groups = tuple(map(int, re.findall(r"--groups (\d+)", last)))
        assert (uid, gid, groups) == USERS[name]

        def listed(word: str) -> list[str]:
            return list(json.loads(re.findall(rf"^{word} .*?(\[.*\])$", last, re.MULTILINE)[-1]))

        folder = re.findall(r"^WORKDIR (.*)$", last, re.MULTILINE)[-1]
        found = [listed("ENTRYPOINT"), listed("CMD"), listed("HEALTHCHECK")]
        return cls(environment, (uid, gid, groups), folder, *found)


@dataclass
class Box:
    """One container: a root of its own with the system read-only and only the given mounts.

    Attributes:
        name: for its root.
        image: what runs in it.
        mounts: place in the box to folder outside; ":ro" at the place's end makes it read-only.
        home: folder of all boxes.
        network: name of a network namespace; None for no network at all.
    """

    name: str
    image: Image
    mounts: dict[str, Path]
    home: Path
    network: str | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def prepare(self) -> None:
        """Write what the image would hold beside the system: users, groups, the command."""
        etc = self.home / "etc"
        etc.mkdir(exist_ok=True)
        lines = [
            f"fedlora-{name}:x:{uid}:{gid}::/state:/sbin/nologin" for name, (uid, gid, _) in USERS.items()
        ]
        (etc / "passwd").write_text("root:x:0:0::/root:/bin/sh\n" + "\n".join(lines) + "\n")
        groups = [f"fedlora-{name}:x:{gid}:" for name, (_, gid, _) in USERS.items()]
        (etc / "group").write_text("root:x:0:\nfedlora-socket:x:10010:\n" + "\n".join(groups) + "\n")
        (etc / "hosts").write_text("127.0.0.1 localhost server\n")
        shims = self.home / "bin"
        shims.mkdir(exist_ok=True)
        for name, text in (
            ("fedlora", f'exec "{sys.executable}" -m fedlora.cli.main "$@"'),
            ("python", f'exec "{sys.executable}" "$@"'),
        ):
            shim = shims / name
            shim.write_text(f"#!/bin/sh\n{text}\n")
            shim.chmod(0o755)

    def script(self, command: list[str], user: tuple[int, int, tuple[int, ...]]) -> str:
        """Return the shell text that builds the root and runs a command in it."""
        root = self.home / f"root-{self.name}"
        lines = [
            "set -eu",
            "ip link set lo up",
            f"mkdir -p {root}",
            f"mount -t tmpfs -o mode=755 tmpfs {root}",
        ]
        for name in SYSTEM:
            if Path("/", name).exists():
                lines += [f"mkdir -p {root}/{name}", f"mount --rbind /{name} {root}/{name}"]
        for name in ("passwd", "group", "hosts"):
            lines.append(f"mount --bind {self.home / 'etc' / name} {root}/etc/{name}")
        python = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
        code = {str(ROOT): ROOT, "/opt/fedlora/bin": self.home / "bin"}
        code |= {str(one): one for one in sorted(python) if not str(one).startswith("/usr")}
        for place, source in {**code, **self.mounts}.items():
            at, _, option = place.partition(":")
            lines += [f"mkdir -p {root}{at}", f"mount --bind {source} {root}{at}"]
            if option == "ro" or source in code.values():
                lines.append(f"mount -o remount,ro,bind {root}{at}")
        lines += [f"mkdir -p {root}/tmp", f"chmod 1777 {root}/tmp"]
        variables = {**self.image.environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        variables["PATH"] = f"/opt/fedlora/bin:{os.environ['PATH']}"
        given = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        uid, gid, groups = user
        further = f"--groups {','.join(map(str, groups))}" if groups else "--clear-groups"
        drop = f"setpriv --reuid {uid} --regid {gid} {further} --inh-caps=-all --bounding-set=-all --no-new-privs"
        inner = f"cd {self.image.folder} && exec env -i {given} {shlex.join(command)}"
        lines.append(f"exec chroot {root} {drop} sh -c {shlex.quote(inner)}")
        return "\n".join(lines)

    def _spaces(self) -> list[str]:
        if self.network is None:
            return ["unshare", "-m", "-n", "sh", "-c"]
        return ["nsenter", f"--net=/run/netns/{self.network}", "unshare", "-m", "sh", "-c"]

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Start the image's entry point with its own command (and further arguments)."""
        command = [*self.image.entry, *self.image.command, *more]
        log = (self.home / f"{self.name}.log").open("a")
        process = subprocess.Popen(
            [*self._spaces(), self.script(command, self.image.user)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def run(
        self, *command: str, user: tuple[int, int, tuple[int, ...]] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run another command in the same kind of box, as the image's user or another."""
        text = self.script(list(command), self.image.user if user is None else user)
        return subprocess.run(
            [*self._spaces(), text],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=240,
            check=False,
        )

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the started process: its mounts, its network, its user."""
        pid = str(self.processes[-1].pid)
        uid, gid, groups = self.image.user
        variables = [f"{key}={value}" for key, value in self.image.environment.items() if key != "PATH"]
        variables += [f"PYTHONPATH={ROOT}", f"PATH=/opt/fedlora/bin:{os.environ['PATH']}"]
        further = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
        enter = ["nsenter", "-t", pid, "-m", "-n", "-r", "-w"]
        drop = ["setpriv", "--reuid", str(uid), "--regid", str(gid), *further, "env", "-i", *variables]
        return subprocess.run(
            [*enter, *drop, *command], capture_output=True, text=True, timeout=240, check=False
        )

    def log(self) -> str:
        """Return the box's output."""
        path = self.home / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""
