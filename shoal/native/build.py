"""Compile the C++ sources into one shared library, and find a library that was compiled from the same sources.

The library has a C interface and uses neither Python nor torch, so one build works with every version of both. Its
name holds a hash of the sources and the flags: a library of other sources is never loaded. Run as a script, this file
compiles into a directory; the wheel's build does that, so only the standard library may be imported here.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
BUNDLED = Path(__file__).parent / "lib"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    # Products and sums become fused operations in every build, so that all instruction sets round alike.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
LINK_FLAGS = ("-shared", "-pthread")
# The kernels are compiled once per instruction set; the library chooses at run time.
KERNELS_X86 = {
    "kernels_baseline": (),
    "kernels_avx2": ("-mavx2", "-mfma"),
    "kernels_avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
KERNELS_OTHER: dict[str, tuple[str, ...]] = {"kernels_baseline": ()}
COMPILE_SECONDS = 300.0


class BuildFailed(Exception):
    """There is no compiler, or it refused the sources."""


def library_name(machine: str | None = None) -> str:
    """Return the file name of the library for these sources, flags and architecture; by default this machine's."""
    machine = machine or platform.machine()
    digest = hashlib.sha256(repr((FLAGS, LINK_FLAGS, kernel_flags(machine), sys.platform, machine)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"libshoal-{digest.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    """Return the C++ compiler: the one that CXX names, or the first of `COMPILERS` on the path."""
    return next((path for name in (os.environ.get("CXX"), *COMPILERS) if name and (path := shutil.which(name))), None)


def compile_library(target: Path, machine: str | None = None) -> None:
    """Compile the library and rename it to `target` when it is complete. Raises BuildFailed or OSError.

    CXX has to name a cross compiler for another `machine` than this one.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler found: install g++ or clang++, or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name:
        folder = Path(name)
        jobs = [*_kernel_jobs(compiler, folder, machine or platform.machine()), *_other_jobs(compiler, folder)]
        with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, jobs))
        static = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" else ()
        built = folder / "library.so"
        _run([compiler, *LINK_FLAGS, *static, *(job[-1] for job in jobs), "-o", str(built)])
        built.replace(target)


def _kernel_jobs(compiler: str, folder: Path, machine: str) -> list[list[str]]:
    return [
        _command(compiler, "kernels.cpp", folder / f"{name}.o", f"-DSHOAL_KERNELS={name}", *flags)
        for name, flags in kernel_flags(machine).items()
    ]


def _other_jobs(compiler: str, folder: Path) -> list[list[str]]:
    others = [source for source in sorted(SOURCES.glob("*.cpp")) if source.name != "kernels.cpp"]
    return [_command(compiler, source.name, folder / f"{source.stem}.o") for source in others]


def _command(compiler: str, source: str, target: Path, *flags: str) -> list[str]:
    return [compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)]


def kernel_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the builds of the kernels for an architecture, with their flags."""
    return KERNELS_X86 if machine.lower() in ("x86_64", "amd64") else KERNELS_OTHER


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{' '.join(command[:1])} failed: {error.stderr.strip()[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took more than {COMPILE_SECONDS:.0f} s") from error


if __name__ == "__main__":  # python build.py FOLDER [MACHINE]
    compile_library(Path(sys.argv[1]) / library_name(*sys.argv[2:]), *sys.argv[2:])
