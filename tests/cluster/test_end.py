"""A Ray of our own, asked to end."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.conftest import CALM_RAY, RAY_STARTS
from tests.server.conftest import ROOT, surroundings
from tests.waiting import TIMEOUT_SECONDS

BRIEFLY = """
import time
from shoal.cluster.lifecycle import local_ray
with local_ray(logs=True):
    print("up", flush=True)
    time.sleep(3600)
"""


def start_ray(environment: dict[str, str]) -> subprocess.Popen[str]:
    """Return a process whose Ray is up."""
    for _ in range(RAY_STARTS):
        process = subprocess.Popen(
            [sys.executable, "-c", BRIEFLY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert process.stdout is not None
        if process.stdout.readline() == "up\n":
            return process
        _, complaints = process.communicate(timeout=TIMEOUT_SECONDS)
        assert "Ray did not start" in complaints
    pytest.fail(complaints)


def test_sigterm_ends_the_command_without_a_stack_trace(tmp_path: Path) -> None:
    # Sockets lie below it, and their paths have to be short.
    scratch = tempfile.mkdtemp(prefix="ray")
    try:
        paths = {"RAY_TMPDIR": scratch, "XDG_STATE_HOME": str(tmp_path)}
        process = start_ray(surroundings(tmp_path) | CALM_RAY | paths)
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert process.returncode == 128 + signal.SIGTERM  # a batch that was ended is not done
    assert "SIGTERM" not in complaints
    assert not (tmp_path / "shoal" / "cluster-address").exists()
