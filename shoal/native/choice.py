"""Choose the instruction set of the native library by a measurement, once per CPU and library.

Only instruction sets with equal bits compete, so the choice changes the speed and never the audio.
"""

import json
import logging
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config import default_isa
from shoal.errors import OutputError
from shoal.native.build import BUNDLED, find_compiler, library_name
from shoal.native.library import INSTRUCTION_SETS, Arrays, Context, Matrix, NativeUnavailable, open_library
from shoal.paths import atomic_write, cache_directory

logger = logging.getLogger(__name__)

AUTO = "auto"
BASELINE = "baseline"
# Instruction sets whose kernels for float activations differ. The others add products of int8 activations to these.
FLOAT_SETS = ("avx512", "avx2", BASELINE)
# Used only where `cpu_isa` names them: AMX has the bits of the others on a Sapphire Rapids, but its speed is not known.
NOT_MEASURED = ("amx",)
ROUNDS = 5  # the shortest counts: in the others the thread may have been suspended
OUTPUTS, INPUTS = 1024, 384  # a layer of nano; it stays in the L2 cache
# Products of one round as (rows, repetitions). Both take about the same time.
SMALL, LARGE = (1, 8), (16, 1)
# A narrower instruction set has to be this much faster, so that noise does not choose it.
MIN_GAIN = 1.1
# Lines of /proc/cpuinfo that identify a CPU model.
CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


@dataclass(frozen=True, slots=True)
class IsaChoice:
    """Instruction set, and the time of a round of products by candidate; empty if nothing was measured."""

    isa: str
    milliseconds: dict[str, float]

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {value:.2f} ms" for name, value in self.milliseconds.items())
        return f"{self.isa}; measured: {measured}" if measured else self.isa


def open_context(isa: str, threads: int, *, int8_activations: bool = False) -> Context:
    """Return a context of the instruction set that `choose_isa` returns. Raises NativeUnavailable."""
    choice = choose_isa(isa, int8_activations=int8_activations)
    logger.info("native backend: %s, %d threads", choice, threads)
    return Context(choice.isa, threads)


def choose_isa(wanted: str, *, int8_activations: bool = False) -> IsaChoice:
    """Return the wanted instruction set, or for `auto` the fastest for this type of activations.

    Raises NativeUnavailable if this CPU does not have it.
    """
    if wanted == AUTO:
        return _measured_choice(int8_activations)
    supported = supported_sets()
    if wanted not in supported:
        raise NativeUnavailable(f"this CPU has no {wanted}: use {', '.join(supported)}")
    return IsaChoice(wanted, {})


def supported_sets(names: tuple[str, ...] = INSTRUCTION_SETS) -> list[str]:
    """Return those instruction sets that this CPU and the library have, widest first. Raises NativeUnavailable."""
    library = open_library()
    return [name for name in names if library.shoal_supports(name.encode())]


def candidates(*, int8_activations: bool) -> list[str]:
    """Return the instruction sets that give the same bits, widest first.

    On x86-64 `baseline` has no fused multiply-add and rounds once more, so it is used only where there is nothing else.
    """
    measured = tuple(name for name in INSTRUCTION_SETS if name not in NOT_MEASURED)
    found = supported_sets(measured if int8_activations else FLOAT_SETS)
    fused = [name for name in found if name != BASELINE]
    return fused or found


@cache
def _measured_choice(int8_activations: bool) -> IsaChoice:
    names = candidates(int8_activations=int8_activations)
    if len(names) == 1:
        return IsaChoice(names[0], {})
    key = f"{'int8' if int8_activations else 'float32'} activations, {_cpu_model()}, {library_name()}"
    return _read_choice(key, names) or _write_choice(key, measure(names, int8_activations=int8_activations))


def measure(names: list[str], *, int8_activations: bool) -> IsaChoice:
    """Time products of a frame's sizes with each instruction set, in turns, for some milliseconds in all."""
    arrays, matrices = Arrays(), list[Matrix]()
    weight = np.arange(OUTPUTS * INPUTS, dtype=np.int8).reshape(OUTPUTS, INPUTS)
    matrices.append(arrays.matrix(weight, scale=np.ones(OUTPUTS, np.float32), w8a8=int8_activations))
    matrices.append(matrices[0] if int8_activations else arrays.matrix(weight.astype(np.float32)))
    contexts = _with_equal_bits({name: Context(name, 1) for name in names}, matrices)
    best = dict.fromkeys(contexts, float("inf"))
    for _ in range(ROUNDS):
        for name, context in contexts.items():
            best[name] = min(best[name], _time_round(context, matrices))
    widest, fastest = next(iter(best)), min(best, key=lambda name: best[name])
    isa = fastest if best[fastest] * MIN_GAIN < best[widest] else widest
    return IsaChoice(isa, {name: round(1e3 * seconds, 3) for name, seconds in best.items()})


def _with_equal_bits(contexts: dict[str, Context], matrices: list[Matrix]) -> dict[str, Context]:
    """Return the contexts whose products equal those of the narrowest set; warn about any other and leave it out."""
    x = np.sin(np.arange(17 * INPUTS, dtype=np.float32)).reshape(17, INPUTS)
    products = {name: [context.product(each, x).tobytes() for each in matrices] for name, context in contexts.items()}
    expected = products[list(contexts)[-1]]
    for name in [name for name in contexts if products[name] != expected]:
        logger.warning("the instruction set %s gives other results on this CPU and is not used: please report it", name)
        del contexts[name]
    return contexts


def _time_round(context: Context, matrices: list[Matrix]) -> float:
    """Return the seconds of one round of products: one row with int8 weights, then many rows."""
    began = time.perf_counter()
    for matrix, (rows, times) in zip(matrices, (SMALL, LARGE), strict=True):
        x = np.ones((rows, INPUTS), np.float32)
        for _ in range(times):
            context.product(matrix, x)
    return time.perf_counter() - began


def _choices_file() -> Path:
    """Return the file of stored choices. Raises RuntimeError for a user without a home directory."""
    return cache_directory() / "native" / "isa.json"


def _read_choice(key: str, names: list[str]) -> IsaChoice | None:
    with suppress(TypeError, KeyError, ValueError, AttributeError):  # an entry of another form
        entry = _read_choices()[key]
        times = {str(name): float(value) for name, value in entry["milliseconds"].items()}
        if entry["isa"] in names and set(times) <= set(names):
            return IsaChoice(entry["isa"], times)
    return None


def _read_choices() -> dict[str, Any]:
    """Return the stored choices for this library; several CPUs may share a home directory."""
    try:
        found = json.loads(_choices_file().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return {key: found[key] for key in found if key.endswith(library_name())} if isinstance(found, dict) else {}


def _write_choice(key: str, choice: IsaChoice) -> IsaChoice:
    entries = _read_choices()
    entries[key] = {"isa": choice.isa, "milliseconds": choice.milliseconds}
    try:
        _choices_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(_choices_file(), json.dumps(entries, indent=1).encode(), private=True)
    except (OSError, RuntimeError, OutputError) as error:
        logger.info("the choice of the instruction set is not stored and will be measured again: %s", error)
    return choice


def _cpu_model() -> str:
    """Return the model of this CPU."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        pairs = (line.partition(":")[::2] for line in lines)
        return " ".join(value.strip() for name, value in pairs if name.strip() in CPU_FIELDS)
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """Availability of the native backend; `detail` is its instruction set, or the reason why it is missing."""

    available: bool
    detail: str


def native_library(isa: str | None = None) -> LibraryStatus:
    """Return the state of the library for an instruction set, by default the configured one, without compiling it."""
    if not any((folder / library_name()).exists() for folder in _folders()):
        compiler = find_compiler()
        missing = "eager: no native library, and no C++ compiler to build it (install g++ or clang++)"
        return LibraryStatus(
            compiler is not None, f"native, compiled on first use by {compiler}" if compiler else missing
        )
    try:
        return LibraryStatus(True, f"native ({choose_isa(isa or default_isa())})")
    except NativeUnavailable as error:
        return LibraryStatus(False, f"eager: {error}")


def _folders() -> Iterator[Path]:
    yield BUNDLED
    with suppress(RuntimeError):  # a user without a home directory
        yield cache_directory() / "native"
