"""Every parser of untrusted input holds under limits of memory and CPU time. `tests/fuzz/run.py` runs for longer."""

import subprocess
import sys

import pytest

from tests.fuzz.targets import GROUPS

EXAMPLES = {"bodies": 60, "recordings": 30, "texts": 60}


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of address space")
@pytest.mark.parametrize("group", GROUPS)
def test_parsers_refuse_hostile_input_within_their_limits(group: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", group, "--examples", str(EXAMPLES[group])]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
