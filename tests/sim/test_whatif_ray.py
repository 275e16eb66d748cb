"""A what-if on a real Ray cluster of this machine: the same rows, lost workers, and a cluster that goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtape.backends.errors import EnvironmentProblem
from kvtape.cli.errors import describe
from kvtape.sim.errors import SimulationError
from kvtape.sim.whatif.executors import WorkerLost
from kvtape.sim.whatif.grid import points_of
from kvtape.sim.whatif.ray_cluster import RayCluster
from kvtape.sim.whatif.sweep import sweep
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.settings import Settings
from support.command import kvtape, kvtape_process
from support.simulated import MemoryLog, flat_costs, play_two_turns, recorded_toy
from support.whatif_jobs import die_once, sleep


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """A token, which Ray would otherwise put into the home, and little patience with a cluster that is gone."""
    secrets = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (secrets | {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def head(environment: None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A cluster of one CPU, as `ray start --head` makes it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        port = free_port()
        started = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=1"),
                *(f"--port={port}", f"--ray-client-server-port={free_port()}", "--include-dashboard=false"),
                *("--disable-usage-stats", "--object-store-memory=100000000", f"--temp-dir={folder}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"127.0.0.1:{port}", started
        finally:
            # Asked to end, it would wait half a minute for the cluster that a test has killed.
            for pid in [*descendants(started.pid), started.pid]:
                os.kill(pid, signal.SIGKILL)
            started.wait()


@pytest.fixture
def cluster(head: tuple[str, subprocess.Popen[bytes]]) -> RayCluster:
    address, started = head
    end = time.monotonic() + 60
    while True:
        assert started.poll() is None
        assert time.monotonic() < end
        try:
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1).close()
            return RayCluster(address)
        except OSError:
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def test_on_a_cluster_of_its_own_the_report_is_that_of_one_process_and_the_home_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    log, costs, home = tmp_path / "log.duckdb", tmp_path / "costs.json", tmp_path / "home"
    home.mkdir()
    request = '{"timestamp": %d, "input_length": 1024, "output_length": 9, "hash_ids": [1, %d]}\n'
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(request % (at, 2 + at % 3) for at in (0, 100, 700, 800)), encoding="utf-8")
    roof = "flops=1e12,bytes_per_s=1e11,params=1e9,weight_bytes=1e9,row_bytes=1000"
    assert kvtape("import", trace, "--format", "mooncake", "--log", log).code == 0
    assert kvtape("calibrate", "--roofline", roof, "--out", costs).code == 0
    points = ["--policy", "none", "--policy", "stream", "--budget", 600, "--budget", 2048, "--seeds", 2]
    asked = ["whatif", log, "--costs", costs, *points, "--json"]
    one = kvtape(*asked)
    assert one.code == 0, one.err
    assert kvtape_process([*asked, "--ray", "local", "--workers", 1], HOME=str(home)) == one
    assert list(home.iterdir()) == []


def test_rows_of_a_cluster_are_those_of_one_process(cluster: RayCluster) -> None:
    scripts = read_scripts(MemoryLog([recorded_toy(play_two_turns, session_id=name) for name in ("a", "b")]))
    costs = flat_costs(prefill=10, decode=100, evict=1)
    points = points_of({"policy": ["none:block=8", "stream:block=8", "h2o:recent=4"], "budget": [48, 96]}, Settings())
    seen: list[tuple[int, int]] = []
    found = sweep(scripts, costs, points, executor=cluster, progress=lambda done, total: seen.append((done, total)))
    assert found == sweep(scripts, costs, points)
    assert seen == [(i + 1, 6) for i in range(6)]


def test_a_lost_worker_is_tried_again_and_one_that_always_dies_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    with cluster.open(die_once, str(tmp_path / "died")) as run:
        assert sorted(run([0, 1, 2])) == [(0, 0), (1, 10), (2, 20)]
        assert (tmp_path / "died").exists()
        with pytest.raises(WorkerLost, match="3 workers of the Ray cluster died while they simulated 666"):
            list(run([666]))


def test_a_cluster_that_goes_away_is_one_clear_error(
    cluster: RayCluster, head: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """The last test of the cluster: it does not come back."""
    with cluster.open(sleep, 0.0) as run:
        assert list(run([1])) == [(0, 10)]
        for pid in descendants(head[1].pid):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvironmentProblem, match="Ray cluster"):
            list(run([1, 2]))


def test_where_nobody_listens_that_is_said_at_once() -> None:
    cluster = RayCluster(f"127.0.0.1:{free_port()}")
    with pytest.raises(EnvironmentProblem, match=r"no Ray cluster at 127\.0\.0\.1"), cluster.open(sleep, 0.0):
        pass


@pytest.mark.parametrize("address", ["", "here", "localhost", "ray://", "http://a:1", "a:b"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SimulationError, match="choose local, auto, HOST:PORT or ray://HOST:PORT"):
        RayCluster(address)


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError) as caught, RayCluster("local").open(sleep, 0.0):
        pass
    assert describe(caught.value) == (3, "ray is not installed; install it with: pip install 'kvtape[ray]'")


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from the kernel."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in path.read_text(encoding="utf-8").split()] if path.exists() else []
    return [*found, *(below for child in found for below in descendants(child))]
