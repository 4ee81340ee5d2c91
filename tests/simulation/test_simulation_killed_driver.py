"""kill -9 of the driver: nothing is left running, whenever it comes; `resume` then gives the uninterrupted result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import container, metric_lines

from fedlora.ledger import load_secret, open_ledger

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]

KEEPER = """
import ctypes, json, os, signal, subprocess, sys, time
from fedlora.procfs import descendants
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans come to this process: none can hide
number, delay = int(sys.argv[1]), float(sys.argv[2])
driver = subprocess.Popen(sys.argv[3:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def guarded():
    for pid in descendants(driver.pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                if b"FEDLORA_RAY_OWNER" in stream.read():
                    return True
        except OSError:
            pass
    return False
while not guarded() and driver.poll() is None:  # others come and go while libraries are imported
    time.sleep(0.005)
time.sleep(delay)
below = len(descendants(driver.pid))
early = driver.poll()
driver.send_signal(number)
sent = time.monotonic()
while time.monotonic() - sent < 60:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    left = list(descendants(os.getpid()))
    if not left:
        break
    time.sleep(0.05)
seconds = time.monotonic() - sent
for pid in left:
    os.kill(pid, signal.SIGKILL)
print(json.dumps({"early": early, "below": below, "left": len(left), "seconds": seconds}))
"""


def keep(number: int, delay: float, *command: str) -> dict[str, Any]:
    """Start a driver, signal it so long after its guard was seen, and tell when the last process was gone."""
    done = subprocess.run(
        [sys.executable, "-c", KEEPER, str(number), str(delay), sys.executable, "-m", "fedlora.cli.main", *command],
        capture_output=True, text=True, check=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("number", [9, 2], ids=["kill", "interrupt"])
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0, 5.0])
def test_h32_no_process_is_left_whenever_the_driver_is_killed(
    world: Path, tmp_path: Path, delay: float, number: int
) -> None:
    """From the guard, the first process that stays, through all of Ray's start, to the first rounds."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(container(world, tmp_path / "runs", federation={"rounds": 500})))
    told = keep(number, delay, "simulate", str(config), "--quiet")
    assert told["early"] is None
    assert told["below"] >= 1
    assert told["left"] == 0
    assert told["seconds"] < 15


@pytest.mark.parametrize("delay", [0.5, 2.0, 6.0])
def test_h32_no_process_is_left_whenever_a_sweep_is_killed(world: Path, tmp_path: Path, delay: float) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(container(world, tmp_path / "runs", federation={"rounds": 500})))
    options = ("--seeds", "1,2", "--grid", "mechanism.kind=lora_fa", "--out", str(tmp_path / "sweep"))
    told = keep(9, delay, "sweep", str(config), *options)
    assert told["early"] is None
    assert (told["left"], told["seconds"] < 15) == (0, True)


# -- resume ----------------------------------------------------------------------------------------------------

RUNS = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
from fedlora.config import load_config
from fedlora.simulation.run import simulate
path, seed, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
draw, folder, ended = random.Random(seed), None, []
runs = Path(load_config(path).run.dir)
while True:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            if folder is None:
                simulate(load_config(path), in_process=True, run_id="one")
            else:
                simulate(resume=folder, in_process=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if len(ended) < kills:
        time.sleep(draw.uniform(0.0, float(sys.argv[4])))
        os.kill(child, signal.SIGKILL)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if (runs / "one" / "config.yaml").exists():
        folder = runs / "one"
    if ended[-1] != -9:
        break
print(json.dumps([ended, time.monotonic() - began]))
"""


def resumed(config: Path, seed: int, kills: int, seconds: float) -> tuple[list[int], float]:
    """Run to the end with kill -9 at random moments; return the exit codes of all attempts, and the last one's time."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(config), str(seed), str(kills), str(seconds)],
        capture_output=True, text=True, timeout=500, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes, took = json.loads(done.stdout.splitlines()[-1])
    assert codes[-1] == 0, done.stderr
    return codes, took


def charged(runs: Path) -> dict[str, int]:
    with open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True) as book:
        return {
            account.client: sum(row.steps_charged for row in book.report(account).rounds)
            for account in book.accounts()
        }


CASES: dict[str, dict[str, Any]] = {
    "lora_fa": {"mechanism": {"kind": "lora_fa"}},
    "prism": {
        "mechanism": {"kind": "prism"},
        "federation": {"aggregation": {"kind": "tangent"}, "server_optimizer": {"kind": "adam", "lr": 0.05}},
    },
    "sampled": {"federation": {"clients_per_round": 0.6, "min_replies": 1}},
}


@pytest.mark.parametrize("case", CASES)
def test_h35_kill_9_at_any_moments_then_resume_is_bit_identical(
    world: Path, tmp_path: Path, case: str
) -> None:
    changes = {**CASES[case], "federation": {"rounds": 100, **CASES[case].get("federation", {})}}
    for name in ("whole", "part"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(container(world, tmp_path / name, **changes)))
    codes, took = resumed(tmp_path / "whole.yaml", 0, 0, 0.0)
    assert codes == [0]
    codes, _ = resumed(tmp_path / "part.yaml", len(case), 12, 0.4 * took)
    assert codes.count(-9) >= 3, "two attempts of less than 0.4 of a run each cannot finish it"
    lines = {name: metric_lines(tmp_path / name / "one") for name in ("whole", "part")}
    told = {
        name: [(line["round"], line["adapter"], line["accepted"]) for line in found]
        for name, found in lines.items()
    }
    assert told["part"] == told["whole"]
    whole, part = charged(tmp_path / "whole"), charged(tmp_path / "part")
    assert all(part[client] >= count for client, count in whole.items()), "interrupted rounds stay charged"
    for name in ("adapter/adapter_model.safetensors", "adapter.flr"):
        assert (tmp_path / "part" / "one" / name).read_bytes() == (
            tmp_path / "whole" / "one" / name
        ).read_bytes()


AGAIN = """
import os, signal, sys, threading, time
import ray
from fedlora.config.schema import RayConfig
from fedlora.procfs import descendants
from fedlora.simulation.cluster import connect, disconnect
def interrupted(delay):
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        cluster = connect(RayConfig(), 1, 0.0, "first")
        disconnect(cluster)
        timer.join()
        time.sleep(1)
    except KeyboardInterrupt:
        return True
    return False
print(sum(interrupted(delay) for delay in (0.1, 0.5, 1.0)), flush=True)
cluster = connect(RayConfig(), 1, 0.0, "second")
print(ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)
disconnect(cluster)
deadline = time.monotonic() + 15
while descendants(os.getpid()) and time.monotonic() < deadline:
    time.sleep(0.1)
print(len(descendants(os.getpid())))
"""


def test_h32_a_start_after_interrupted_ones_in_one_process_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=200, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    times, answer, left = done.stdout.split()
    assert int(times) >= 1
    assert (answer, left) == ("42", "0")


SWEEPS = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
from fedlora.simulation.sweep import SweepPlan, run_sweep
plan = SweepPlan(sys.argv[1], grid={"training.optimizer.lr": ["0.01", "0.1"]}, seeds=(1, 2))
draw, codes = random.Random(5), []
import fedlora.simulation.run  # what is imported here is not imported in every attempt
while not codes or codes[-1] == -9:
    child = os.fork()
    if child == 0:
        try:
            run_sweep(plan, Path(sys.argv[2]), in_process=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if len(codes) < int(sys.argv[3]):
        time.sleep(draw.uniform(0.0, 3.0))
        os.kill(child, signal.SIGKILL)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def test_a_sweep_killed_at_any_moments_goes_on_to_the_same_results(world: Path, tmp_path: Path) -> None:
    told: dict[str, dict[str, Any]] = {}
    for name, kills in (("whole", 0), ("part", 8)):
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(container(world, tmp_path / name, federation={"rounds": 3})))
        done = subprocess.run(
            [sys.executable, "-c", SWEEPS, str(config), str(tmp_path / f"sweep-{name}"), str(kills)],
            capture_output=True, text=True, timeout=400, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        codes = json.loads(done.stdout.splitlines()[-1])
        assert codes[-1] == 0, done.stderr
        assert kills == 0 or -9 in codes
        lines = (tmp_path / f"sweep-{name}" / "trials.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        told[name] = {one["name"]: (one["status"], one["metrics"], one["epsilon"]) for one in found}
        assert len(found) == len(told[name]) == 4, "no trial is counted twice"
    assert told["part"] == told["whole"]
    whole, part = charged(tmp_path / "whole"), charged(tmp_path / "part")
    assert set(whole.values()) == {12}
    assert all(count >= 12 for count in part.values()), "what killed trials began stays charged"
