"""Compile the C++ sources into one shared library, whose name identifies them.

The library has a C interface and uses neither Python nor torch, so one build works with every version of both. Its
name holds a hash of the sources and the flags, so a library of other sources is never loaded. Run as a script, this
file compiles into a directory. The wheel's build does that, so only the standard library may be imported here.
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
    # Compilers fuse multiply and add in every build that has FMA, so that all these instruction sets round alike.
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
# Flags of products of int8 activations: no FMA, so that the scaling of their sums rounds alike everywhere.
INT8_FLAGS = ("-ffp-contract=off",)
VNNI512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512", "-DSHOAL_INT8_VNNI512")
INT8_X86 = {
    "int8_baseline": (),
    "int8_avx2": ("-mavx2",),
    "int8_vnni256": ("-mavx2", "-mavxvnni", "-DSHOAL_INT8_VNNI256"),
    "int8_vnni512": VNNI512,
    "int8_amx": (*VNNI512, "-mamx-tile", "-mamx-int8"),
}
INT8_ARM = {"int8_baseline": (), "int8_dotprod": ("-march=armv8.2-a+dotprod",)}
INT8_OTHER: dict[str, tuple[str, ...]] = {"int8_baseline": ()}
# Builds for instruction sets that older compilers do not know; the library is complete without them.
OPTIONAL = ("int8_vnni256", "int8_vnni512", "int8_amx", "int8_dotprod")
PER_INSTRUCTION_SET = ("kernels.cpp", "int8_product.cpp")
COMPILE_SECONDS = 300.0


class BuildFailed(Exception):
    """There is no compiler, or it refused the sources."""


def library_name(machine: str | None = None) -> str:
    """Return the file name of the library for these sources, flags and architecture; by default this machine's."""
    machine = machine or platform.machine()
    flags = (FLAGS, LINK_FLAGS, kernel_flags(machine), INT8_FLAGS, int8_flags(machine), sys.platform, machine)
    digest = hashlib.sha256(repr(flags).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"libshoal-{digest.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    """Return the C++ compiler: the one that CXX names, or the first of `COMPILERS` on the path."""
    return next((path for name in (os.environ.get("CXX"), *COMPILERS) if name and (path := shutil.which(name))), None)


def require_compiler() -> str:
    """Return the C++ compiler. Raises BuildFailed without one."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler found: install g++ or clang++, or set CXX")
    return compiler


def compile_library(target: Path, machine: str | None = None) -> None:
    """Compile the library and rename it to `target` when it is complete. Raises BuildFailed or OSError.

    CXX has to name a cross compiler for another `machine` than this one.
    """
    compiler = require_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name:
        folder = Path(name)
        jobs = _jobs(compiler, folder, machine or platform.machine())
        with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, jobs))
        static = ("-static-libstdc++", "-static-libgcc") if sys.platform == "linux" else ()
        built = folder / "library.so"
        _run([compiler, *LINK_FLAGS, *static, *(job[-1] for job in jobs), "-o", str(built)])
        built.replace(target)


def _jobs(compiler: str, folder: Path, machine: str) -> list[list[str]]:
    """Return the commands that compile all objects, the longest first."""
    builds = {name: flags for name, flags in int8_flags(machine).items() if _can_build(compiler, name, flags)}
    present = [f"-DSHOAL_HAS_{name.upper()}" for name in builds if name in OPTIONAL]
    kernels = [
        _command(compiler, "kernels.cpp", folder / f"{name}.o", f"-DSHOAL_KERNELS={name}", *flags)
        for name, flags in kernel_flags(machine).items()
    ]
    int8 = [
        _command(compiler, "int8_product.cpp", folder / f"{name}.o", f"-DSHOAL_INT8={name}", *INT8_FLAGS, *flags)
        for name, flags in builds.items()
    ]
    names = [each.name for each in sorted(SOURCES.glob("*.cpp")) if each.name not in PER_INSTRUCTION_SET]
    others = [_command(compiler, name, folder / f"{name}.o", *(present if name == "api.cpp" else ())) for name in names]
    return [*kernels, *int8, *others]


def _can_build(compiler: str, name: str, flags: tuple[str, ...]) -> bool:
    """Return whether the compiler knows the flags of an optional build."""
    command = [compiler, *flags, "-E", "-x", "c++", os.devnull]
    return name not in OPTIONAL or subprocess.run(command, capture_output=True, check=False).returncode == 0


def _command(compiler: str, source: str, target: Path, *flags: str) -> list[str]:
    return [compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)]


def kernel_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the builds of the kernels for an architecture, with their flags."""
    return KERNELS_X86 if machine.lower() in ("x86_64", "amd64") else KERNELS_OTHER


def int8_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the builds of the products of int8 activations for an architecture, with their flags."""
    if machine.lower() in ("x86_64", "amd64"):
        return INT8_X86
    return INT8_ARM if machine.lower() in ("aarch64", "arm64") else INT8_OTHER


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{' '.join(command[:1])} failed: {error.stderr.strip()[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took more than {COMPILE_SECONDS:.0f} s") from error


if __name__ == "__main__":  # python build.py FOLDER [MACHINE]
    compile_library(Path(sys.argv[1]) / library_name(*sys.argv[2:]), *sys.argv[2:])
