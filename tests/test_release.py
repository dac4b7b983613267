"""Wheel and sdist: they hold everything that is needed, and an installed wheel speaks without the checkout."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shoal import __version__
from shoal.native.build import BUNDLED, find_compiler, library_name
from tests.native.conftest import place_library
from tests.waiting import TIMEOUT_SECONDS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    place_library(ROOT)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """Return the only wheel: for this platform, or for any without a C++ compiler."""
    (found,) = dist.glob(f"shoal_tts-{__version__}-py3-none-*.whl")
    return found


def shipped() -> set[str]:
    files = (path for path in (ROOT / "shoal").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = (path for path in files if path.parent != BUNDLED)  # compiled by the build
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_package_its_voices_and_its_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert shipped() <= names
    assert {"shoal/models/nano/model.safetensors", "shoal/ui/index.html", "shoal/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"shoal", f"shoal_tts-{__version__}.dist-info"}


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_the_wheel_holds_the_native_library_and_names_its_platform(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert f"shoal/native/lib/{library_name()}" in archive.namelist()
    assert not wheel.name.endswith("-any.whl")


def test_the_version_comes_from_one_place(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"shoal_tts-{__version__}.dist-info/METADATA").decode())
        names = archive.namelist()
    assert (metadata["Version"], metadata["License-Expression"]) == (__version__, "Apache-2.0")
    assert f"shoal_tts-{__version__}.dist-info/licenses/LICENSE" in names
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert __version__ not in (ROOT / "mkdocs.yml").read_text()


def test_windows_installs_no_package_that_it_does_not_have(wheel: Path) -> None:
    """`pip install 'shoal-tts[server]'` would fail there."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"shoal_tts-{__version__}.dist-info/METADATA").decode())
    windows = {"platform_system": "Windows", "sys_platform": "win32", "os_name": "nt"}
    wanted = [Requirement(each) for each in metadata.get_all("Requires-Dist") or ()]
    extras = [None, *(metadata.get_all("Provides-Extra") or ())]
    environments = [windows | {"extra": extra or ""} for extra in extras]
    names = {
        each.name for each in wanted for where in environments if each.marker is None or each.marker.evaluate(where)
    }
    assert {"torch", "fastapi", "uvicorn"} <= names
    assert names.isdisjoint({"uvloop", "triton"})


def test_the_sdist_holds_what_it_takes_to_test_it(dist: Path) -> None:
    with tarfile.open(dist / f"shoal_tts-{__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert shipped() <= names
    needed = "Makefile constraints.txt mkdocs.yml scripts/test tests/conftest.py examples/speak.py SECURITY.md LICENSE"
    assert set(needed.split()) <= names


def test_the_wheel_speaks_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Uses the dependencies of this environment; `scripts/release` tests the wheel in an empty one."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    out = tmp_path / "spoken.wav"
    code = "import shoal, sys; from shoal.cli import main; print(shoal.__file__, flush=True); main()"
    command = [sys.executable, "-c", code, "say", "This is what was built.", "-o", str(out)]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(tmp_path / "installed"))
    assert out.stat().st_size > 16_000
