"""Unreachable clusters are reported in one line, in bounded time; other people's clusters are left alone."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from ports import reserved_port

from fedlora.config.schema import RayConfig
from fedlora.errors import ClusterUnreachableError, SimulationError
from fedlora.simulation import cluster


def one_line(error: pytest.ExceptionInfo[ClusterUnreachableError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert error.value.exit_code == 81
    return text


def test_nobody_listens() -> None:
    started = time.monotonic()
    with pytest.raises(ClusterUnreachableError) as error:
        cluster.connect(RayConfig(address=f"127.0.0.1:{reserved_port()}"), 1, 0.0, "r")
    assert "nothing listens" in one_line(error)
    assert time.monotonic() - started < 60  # Ray's own client would go on for minutes


def test_an_address_that_swallows_packets_is_told_within_30_seconds_of_the_command() -> None:
    assert RayConfig().connect_timeout_seconds <= 20.0  # the rest is for the command's own imports


def test_something_else_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(ClusterUnreachableError) as error:
            cluster.probe(address, 2.0)
    assert "not a live Ray head" in one_line(error)
    assert time.monotonic() - started < 60  # 2 s were given; Ray may have to be imported first


def test_a_server_that_closes_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            for _ in range(20):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ClusterUnreachableError) as error:
            cluster.probe(f"127.0.0.1:{listener.getsockname()[1]}", 2.0)
    assert "not a live Ray head" in one_line(error)


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379x", "host:port"])
def test_a_malformed_address(address: str) -> None:
    with pytest.raises(ClusterUnreachableError) as error:
        cluster.probe(address, 1.0)
    assert "host:port" in one_line(error)


@pytest.mark.parametrize("host", ["\ufffd\ufffd", "a" * 70, "a..b"])
def test_a_host_that_cannot_be_asked_for(host: str) -> None:
    with pytest.raises(ClusterUnreachableError) as error:
        cluster.probe(f"{host}:6379", 1.0)
    assert "nothing listens" in one_line(error)


def test_a_stale_address_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "ray" / "ray_current_cluster"
    stale.parent.mkdir()
    stale.write_text(f"127.0.0.1:{reserved_port()}\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachableError) as error:
        cluster.connect(RayConfig(address="auto"), 1, 0.0, "r")
    assert "nothing listens" in one_line(error)


def test_auto_without_any_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachableError) as error:
        cluster.connect(RayConfig(address="auto"), 1, 0.0, "r")
    assert "auto found no cluster" in one_line(error)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xb6\x00\xff", b"session_2026", b"10.0.0.1:0"])
def test_an_address_file_without_an_address_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """A crash of `ray start` or a full disk leaves such a file."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_bytes(content)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachableError) as error:
        cluster.connect(RayConfig(address="auto"), 1, 0.0, "r")
    assert "auto found no address in" in one_line(error)


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_the_address_file_is_sought_where_ray_puts_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.utils import get_ray_address_file

    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    assert str(cluster.ray_folder() / "ray_current_cluster") == get_ray_address_file(None)
    monkeypatch.setenv(name, "/scratch/tmp")
    assert str(cluster.ray_folder() / "ray_current_cluster") == get_ray_address_file(None)


@pytest.mark.parametrize(("root", "short"), [("/tmp", False), ("/scratch/" + "a" * 60, True)])
def test_a_long_folder_for_temporary_files_is_not_given_to_rays_sockets(
    root: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a Unix socket has 107 bytes at most; batch systems set longer folders."""
    import ray

    given: list[object] = []

    def broken(**options: object) -> None:
        given.append(options["_temp_dir"])
        raise RuntimeError("no")

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", root)
    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(SimulationError):
        cluster._start(1, 0.0, {})
    assert given == ["/tmp/ray" if short else None]


def test_a_start_that_fails_is_one_line_that_says_where_ray_needs_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray says only that the node timed out where its disk is full or /dev/shm cannot be written."""
    import ray

    def broken(**options: object) -> None:
        raise Exception("The current node timed out during startup. This could\nhappen")

    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(SimulationError) as error:
        cluster._start(1, 0.0, {})
    text = str(error.value)
    assert "\n" not in text
    assert "timed out during startup" in text
    assert "/tmp/ray (" in text
    assert "/dev/shm (" in text
    assert "MB free" in text


def test_auto_reads_the_environment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster.resolve_address("auto") == "10.0.0.1:6379"
    assert cluster.resolve_address("ray://head:10001") == "head:10001"
