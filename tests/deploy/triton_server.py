"""Triton server of the pytriton package, in its own virtual environment, because it pins another version of numpy."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.deploy.conftest import ROOT

PLACE = ROOT / "build" / "triton"
# Only the server and its client: pytriton's own Python is not used.
PINNED = (
    "nvidia-pytriton==0.7.0",
    "tritonclient==2.73.0",
    "ml_dtypes==0.6.0",
    "python-rapidjson==1.25",
    "grpcio==1.85.1",
    "protobuf==7.36.2",
)
NUMPY = "numpy==1.26.4"
LATEST_STUB = (3, 13)  # the latest Python for which pytriton carries the stub of Triton's Python backend
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def environment() -> Path:
    """Return the Python of the environment. It is created once, and renamed when it is complete."""
    if not PLACE.exists():
        fresh = PLACE.with_name(f".triton-{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(fresh / "bin" / "python"), "--quiet"]
        pip += ["--disable-pip-version-check", "install", "--no-compile", "--no-deps"]
        subprocess.run([*pip, NUMPY, *PINNED], check=True)
        _lay_out(fresh)
        fresh.rename(PLACE)
    return PLACE / "bin" / "python"


def command(repository: Path, grpc_port: int, http_port: int) -> list[str]:
    return [
        str(PLACE / "server" / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={PLACE / 'server' / 'backends'}",
        f"--grpc-port={grpc_port}",
        f"--http-port={http_port}",
        "--grpc-address=127.0.0.1",
        "--http-address=127.0.0.1",
        "--allow-metrics=false",
        "--exit-on-error=true",
    ]


def surroundings() -> dict[str, str]:
    """Return the environment variables of the server: its backend needs the libpython of this Python and its PATH."""
    libraries = [str(sysconfig.get_config_var("LIBDIR")), str(_site(PLACE) / "nvidia_pytriton.libs")]
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{PLACE / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


def _lay_out(fresh: Path) -> None:
    """Copy the server, and the stub of this Python to where the backend looks for it."""
    carried = _site(fresh) / "pytriton" / "tritonserver"
    shutil.copytree(carried / "bin", fresh / "server" / "bin")
    shutil.copytree(carried / "backends", fresh / "server" / "backends")
    name = "triton_python_backend_stub"
    shutil.copy(carried / "python_backend_stubs" / VERSION / name, fresh / "server" / "backends" / "python" / name)
    for program in (fresh / "server" / "bin" / "tritonserver", fresh / "server" / "backends" / "python" / name):
        program.chmod(0o755)
    # All other packages come from this environment; those installed there have precedence.
    (_site(fresh) / "shoal.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")


def _site(place: Path) -> Path:
    return place / "lib" / f"python{VERSION}" / "site-packages"
