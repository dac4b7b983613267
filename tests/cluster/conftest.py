"""A real cluster of two replicas, started by the command and shared by all tests of this folder."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import ROOT, free_port, recording, surroundings
from tests.waiting import wait_until

__all__ = ["recording"]  # a fixture here, too

SLOTS = 4
# Spare workers, metrics that nothing reads and a controller that looks ten times a second take CPU time from the tests;
# replicas that report their load seldom make them wait.
CALM_RAY = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
RAY_STARTS = 10  # Ray waits 30 seconds for its own processes and 60 for its proxy, which a busy machine may exceed


@dataclass
class Cluster:
    process: subprocess.Popen[bytes]
    home: Path
    scratch: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=600.0, trust_env=False, verify=False)

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = httpx.get(
            f"{self.url}/v1/workers", timeout=240, trust_env=False, verify=False
        ).json()["workers"]
        return workers

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/v1/health", timeout=240, trust_env=False, verify=False)

    def wait_until(self, ready: int) -> None:
        """Wait until this many replicas are wanted and ready."""

        def as_wanted() -> bool:
            assert self.process.poll() is None, self.log
            with suppress(httpx.TransportError, ValueError):
                return bool((found := self.health().json())["ready"] == found["wanted"] == ready)
            return False

        wait_until(as_wanted, lambda: self.log, interval=0.2)

    def has_started(self) -> bool:
        """Wait until the first replica answers; return False if Ray did not start within its own time limits."""
        try:
            wait_until(self._responds, lambda: self.log, interval=0.2)
        except AssertionError:
            if "did not start: " not in self.log:
                raise
            return False
        return True

    def _responds(self) -> bool:
        assert self.process.poll() is None, self.log
        with suppress(httpx.TransportError):
            self.health()
            return True
        return False

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the `shoal` command on the same machine."""
        return subprocess.run(
            [sys.executable, "-m", "shoal.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=ROOT,
            env=self.env,
        )

    @property
    def env(self) -> dict[str, str]:
        return surroundings(self.home) | {
            "RAY_TMPDIR": str(self.scratch),
            "XDG_STATE_HOME": str(self.home),
            # Ray schedules by declared resources: this GPU does not exist and is not used.
            "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}',
            **CALM_RAY,
        }


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("cluster")
    # Ray's sockets have a short limit on the length of their path.
    scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    flags = ["--replicas", "2", "--cpus", "0.5", "--gpus", "0.5", "--model", "random:tiny", "--set", f"slots={SLOTS}"]
    flags += ["--set", "backend=eager"]  # slow enough for a replica to be killed while it speaks
    flags += ["--set", "request_seconds=600"]  # on a busy machine requests wait long behind others
    cluster = Cluster(None, home, scratch, free_port())  # type: ignore[arg-type]
    try:
        for _ in range(RAY_STARTS):
            with (home / "log").open("wb") as out:
                cluster.process = subprocess.Popen(
                    [sys.executable, "-m", "shoal.cli", "cluster", "up", *flags, "--port", str(cluster.port)],
                    stdout=out,
                    stderr=out,
                    cwd=ROOT,
                    env=cluster.env,
                )
            if cluster.has_started():
                break
        cluster.wait_until(ready=2)
        yield cluster
    finally:
        end(cluster.process)
        shutil.rmtree(scratch, ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(240)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
