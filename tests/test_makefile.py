"""Versions of Python that `make` accepts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", ["3.10.13", "3.11.0", "3.14.8", "3.15.0"])
def test_make_refuses_versions_of_python_without_pinned_packages(tmp_path: Path, version: str) -> None:
    numbers = tuple(int(part) for part in version.split("."))
    python = tmp_path / "python"
    # Runs programs as that version would; a virtual environment it only announces.
    python.write_text(
        f'#!/bin/sh\ntest "$1" != -m || {{ echo "making $3"; exit 9; }}\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = {numbers}; exec(sys.argv.pop())" "$2"\n'
    )
    python.chmod(0o755)
    environment = tmp_path / "venv"
    command = ["make", "--no-print-directory", f"PYTHON={python}", f"VENV={environment}", f"{environment}/.server"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    if (3, 11) <= numbers < (3, 15):
        assert f"making {environment}" in done.stdout
    else:
        assert f"Shoal needs Python 3.11 to 3.14, this is {numbers[0]}.{numbers[1]}: name another" in done.stderr
        assert "making" not in done.stdout
