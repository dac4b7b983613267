"""A Ray of our own, asked to end."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.conftest import ROOT, surroundings

BRIEFLY = """
import time
from shoal.cluster.lifecycle import local_ray
with local_ray(logs=True):
    print("up", flush=True)
    time.sleep(60)
"""


def test_sigterm_ends_the_command_without_a_stack_trace(tmp_path: Path) -> None:
    # Sockets lie below it, and their paths have to be short.
    scratch = tempfile.mkdtemp(prefix="ray")
    here = surroundings(tmp_path) | {"RAY_TMPDIR": scratch, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", BRIEFLY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=here,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=240)
    finally:
        process.kill()
        shutil.rmtree(scratch, ignore_errors=True)
    assert process.returncode == 128 + signal.SIGTERM  # a batch that was ended is not done
    assert "SIGTERM" not in complaints
    assert not (tmp_path / "shoal" / "cluster-address").exists()
