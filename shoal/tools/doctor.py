"""Checks of the machine: hardware, packages, models, and the resulting defaults. Read-only, without network access."""

import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Literal

import numpy as np

from shoal import __version__
from shoal.config import ISA_VARIABLE
from shoal.cores import default_threads, usable_cores

Mark = Literal["ok", "warn", "missing"]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 8)
EXTRAS = {"formats": ("av", "soxr")}
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")
# Bytes of s1-mini's weights in bf16 plus its codec in fp32.
SMALLEST_MODEL = 3.3e9
# RTF of S1-mini by cores: one voice, int8 weights, backend native, an Intel Xeon with AVX-512 (docs/benchmarks.md).
CPU_RTF = {2: 2.22, 4: 1.42, 8: 0.89}  # no gain is predicted for more cores: memory bandwidth limits them


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the report. `advice` says how to fix a finding that is not ok."""

    subject: str
    value: str
    mark: Mark = "ok"
    advice: str = ""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Device, dtype and backend that the defaults resolve to on this machine."""

    device: str
    dtype: str
    backend: str  # backend of the model
    codec_backend: str
    why: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings and the resulting defaults."""

    findings: list[DoctorFinding]
    choice: BackendChoice | None  # None without a working torch

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def examine() -> DoctorReport:
    """Run all checks. On a GPU this compiles the largest kernels, unless they are cached."""
    findings = [DoctorFinding("shoal", __version__), *_python(), *_cpu(), *_memory()]
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as problem:
        advice = "install it as described at https://pytorch.org/get-started"
        return DoctorReport(
            [*findings, DoctorFinding("torch", f"cannot be imported: {problem}", "missing", advice)], None
        )
    findings += [*_torch(), *_gpu(), *_triton(), *_hopper(), *_compiler(), *_kernel_cache()]
    findings += [*_extras(), *_audio(), *_models()]
    return DoctorReport(findings, _choose())


def _python() -> Iterator[DoctorFinding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    old = sys.version_info < OLDEST_PYTHON
    yield DoctorFinding("Python", found, "warn" if old else "ok", "install Python 3.11 or newer" if old else "")


def _cpu() -> Iterator[DoctorFinding]:
    lines = _proc("cpuinfo").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [name for name in CPU_FEATURES if name in flags]
    name = fields.get("model name") or platform.processor() or platform.machine()
    slow = platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags and bool(flags)
    advice = "this CPU has no AVX2: generation will be slow" if slow else ""
    found = f"{name}, {usable_cores()} cores{', ' + ' '.join(features) if features else ''}"
    yield DoctorFinding("CPU", found, "warn" if slow else "ok", advice)


def _memory() -> Iterator[DoctorFinding]:
    available, total = _memory_bytes()
    if total == 0:
        yield DoctorFinding("memory", "unknown", "warn")
        return
    low = available < SMALLEST_MODEL
    advice = f"s1-mini needs about {SMALLEST_MODEL / 1e9:.1f} GB on the CPU" if low else ""
    yield DoctorFinding(
        "memory", f"{available / 1e9:.1f} of {total / 1e9:.1f} GB free", "warn" if low else "ok", advice
    )


def _torch() -> Iterator[DoctorFinding]:
    import torch

    parts = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = parts < OLDEST_TORCH
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    advice = "2.8 or newer: the Triton of older versions cannot compile all kernels" if old else ""
    yield DoctorFinding("torch", f"{torch.__version__}, {build}", "warn" if old else "ok", advice)
    threads, available = min(torch.get_num_threads(), default_threads()), usable_cores()
    many = threads > available
    advice = f"more threads than cores reduce the speed: set OMP_NUM_THREADS={available}" if many else ""
    yield DoctorFinding("threads", f"{threads}", "warn" if many else "ok", advice)
    from shoal.native.choice import AUTO, native_library
    from shoal.quantize.modes import int8_implementation

    native = native_library()
    computed = "int8 (in the native backend)" if native.available else int8_implementation()
    yield DoctorFinding("CPU weights", f"float32, {computed}")
    if not native.available:
        fix = f"unset {ISA_VARIABLE}" if native_library(AUTO).available else "install g++ or clang++"
        advice = f"{fix}: eager is several times slower on a CPU"
        yield DoctorFinding("CPU backend", native.detail, "warn", advice)
    else:
        yield DoctorFinding("CPU backend", native.detail)
        yield DoctorFinding("s1-mini on the CPU", predicted_cpu_speed(available))


def predicted_cpu_speed(count: int) -> str:
    """Return the RTF of S1-mini with that many cores: measured, or interpolated from the measured ones."""
    cores, measured = list(CPU_RTF), list(CPU_RTF.values())
    rtf = float(np.interp(count, [1, *cores], [cores[0] * measured[0], *measured]))
    how = "measured" if count in CPU_RTF else f"predicted from {cores[0]} to {cores[-1]} cores"
    return f"RTF about {rtf:.2g} with one voice in int8 ({how} on an Intel Xeon with AVX-512)"


def _gpu() -> Iterator[DoctorFinding]:
    import torch

    from shoal.engine.load import missing_kernels

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card, reason = torch.cuda.get_device_properties(index), missing_kernels(index)
            found = f"{card.name}, {card.total_memory / 1e9:.0f} GB, capability {card.major}.{card.minor}"
            yield DoctorFinding(f"GPU {index}", found, "ok" if reason is None else "missing", reason or "")
        return
    if which("nvidia-smi") is None:
        yield DoctorFinding("GPU", "none found", "warn", "the CPU will be used")
    elif torch.version.cuda is None:
        advice = "this is a CPU build of torch: install the CUDA build from https://pytorch.org/get-started"
        yield DoctorFinding("GPU", "an NVIDIA driver is installed, but torch cannot use it", "missing", advice)
    else:
        advice = "run nvidia-smi: the driver may be too old for this torch, or CUDA_VISIBLE_DEVICES hides the GPU"
        yield DoctorFinding("GPU", "an NVIDIA driver is installed, but torch finds no GPU", "missing", advice)


def _triton() -> Iterator[DoctorFinding]:
    import torch

    found = _installed("triton")
    # AMD's builds of torch include Triton under another name, and the fused kernels do not run there.
    needed = found is None and torch.cuda.is_available() and torch.version.hip is None
    package = "triton-windows" if platform.system() == "Windows" else "triton"
    advice = f"the fused kernels need it: pip install {package}" if needed else ""
    yield DoctorFinding("Triton", found or "not installed, needed on GPUs only", "missing" if needed else "ok", advice)


def _hopper() -> Iterator[DoctorFinding]:
    """Report on Hopper GPUs if the CUDA C++ kernels of the codec and S2-Pro are available."""
    import torch

    from shoal.kernels.sm90.launch import is_hopper, kernels_unavailable

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not is_hopper(device):
        return
    reason = kernels_unavailable(device)
    if reason is None:
        yield DoctorFinding("Hopper kernels", "CUDA C++ for compute capability 9.0 (codec, S2-Pro)")
    else:
        yield DoctorFinding("Hopper kernels", "Triton", "warn", f"CUDA C++ kernels are faster: {reason}")


def _compiler() -> Iterator[DoctorFinding]:
    """Look for what Triton builds the launchers of its kernels with; only NVIDIA GPUs need it."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return
    found = next(filter(None, map(which, filter(None, (os.environ.get("CC"), "gcc", "clang")))), None)
    if found is None:
        advice = "Triton needs a C compiler for the fused kernels: install gcc"
        yield DoctorFinding("C compiler", "none found", "missing", advice)
    elif not (python_headers() / "Python.h").exists():
        advice = "Triton needs Python's headers for the fused kernels: install python3-dev, on Fedora python3-devel"
        yield DoctorFinding("C compiler", f"{found}, but no Python.h in {python_headers()}", "missing", advice)
    else:
        yield DoctorFinding("C compiler", found)


def python_headers() -> Path:
    """Return the directory in which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _kernel_cache() -> Iterator[DoctorFinding]:
    """Report the compiled kernels on disk; deleting the directory makes the next start compile them again."""
    import torch

    from shoal.kernels.jit import TEMPORARY_CACHE  # the module sets TRITON_CACHE_DIR

    if not torch.cuda.is_available() or "TRITON_CACHE_DIR" not in os.environ:
        return
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    kernels = sum(file.suffix in (".cubin", ".hsaco") for file in files)
    temporary = folder.name.startswith(TEMPORARY_CACHE)
    advice = "every start compiles them again: set XDG_CACHE_HOME to a writable directory" if temporary else ""
    found = f"{folder}, {kernels} kernels, {size / 1e6:.0f} MB"
    yield DoctorFinding("kernel cache", found, "warn" if temporary else "ok", advice)


def _extras() -> Iterator[DoctorFinding]:
    for extra, packages in EXTRAS.items():
        lacking = [package for package in packages if _installed(package) is None]
        advice = f"pip install 'shoal-tts[{extra}]'" if lacking else ""
        found = f"lacks {', '.join(lacking)}" if lacking else "installed"
        yield DoctorFinding(f"extra {extra}", found, "missing" if lacking else "ok", advice)


def _audio() -> Iterator[DoctorFinding]:
    if (pyav := _installed("av")) is not None:
        import av

        from shoal.audio.ffmpeg import MUXERS

        ffmpeg = ".".join(str(part) for part in av.library_versions["libavcodec"])
        yield DoctorFinding("PyAV", f"{pyav}, libavcodec {ffmpeg}")
        writable = [name for name, muxing in MUXERS.items() if _can_encode(muxing.codec)]
        lacking = sorted(set(MUXERS) - set(writable))
        advice = f"this PyAV cannot write {', '.join(lacking)}: install it from PyPI" if lacking else ""
        formats = ", ".join(["wav", "pcm", *writable])
        yield DoctorFinding("audio formats", formats, "warn" if lacking else "ok", advice)
    else:
        yield DoctorFinding(
            "audio formats", "wav, pcm", "warn", "for flac, mp3, opus, aac and webm: pip install 'shoal-tts[formats]'"
        )
    if (soxr := _installed("soxr")) is not None:
        yield DoctorFinding("soxr", soxr)


def _models() -> Iterator[DoctorFinding]:
    from huggingface_hub import constants

    from shoal.checkpoint.find import BUNDLED, BUNDLED_DIRECTORY
    from shoal.checkpoint.format.layout import missing_files

    cache, size = Path(constants.HF_HUB_CACHE), 0
    found = [] if missing_files(BUNDLED_DIRECTORY, codec=True) else [BUNDLED]
    for folder in sorted(cache.glob("models--*--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/")
        snapshot = _whole_snapshot(repository)
        if snapshot is not None:
            found.append(repository)
            size += sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file())
    yield DoctorFinding("cache folder", f"{cache}, {size / 1e9:.1f} GB of models")
    advice = "" if found else "download one: shoal pull s1-mini; or use random weights: --model random:tiny"
    yield DoctorFinding("models", ", ".join(found) or "none found", "ok" if found else "missing", advice)


def _whole_snapshot(repository: str) -> Path | None:
    """Return the directory of a complete model in the cache; None if the repository is not a model or is incomplete."""
    from shoal.checkpoint.find import HubSource, cached_snapshot
    from shoal.checkpoint.format.layout import missing_files
    from shoal.errors import CheckpointError

    source = HubSource.parse(repository)
    snapshot = cached_snapshot(source) if source is not None else None
    try:
        # As in `find`: quantized models may use the codec of another model.
        whole = source is not None and snapshot is not None and not missing_files(snapshot, codec=source.released)
    except CheckpointError:
        return None
    return snapshot if whole else None


def _choose() -> BackendChoice:
    """Return the defaults. On a GPU, compiles the kernels with the largest resource needs, which takes seconds."""
    import torch

    from shoal.engine.load import choose_device, choose_dtype
    from shoal.kernels.compile_check import check_codec_kernels, check_kernels
    from shoal.native.choice import native_library

    device = choose_device("auto")
    dtype = choose_dtype(None, device)
    name = str(dtype).removeprefix("torch.")
    if device == "cpu":
        backend = "native" if native_library().available else "eager"
        why = "torch has no code for the GPU" if torch.cuda.is_available() else "torch finds no GPU"
        return BackendChoice(device, name, backend, backend, why)
    found = {
        "model": check_kernels(torch.device(device), dtype),
        "codec": check_codec_kernels(torch.device(device), torch.float16),
    }
    backend, codec_backend = ("graph" if reason is None else "plain-graph" for reason in found.values())
    return BackendChoice(device, name, backend, codec_backend, f"torch finds a GPU; {_kernels(found)}")


def _kernels(found: Mapping[str, str | None]) -> str:
    """Say which parts of the engine have no fused kernels on this GPU, and why."""
    if len(set(found.values())) == 1:
        (reason,) = set(found.values())
        return "the largest kernels compile and fit" if reason is None else f"no fused kernels: {reason}"
    return "; ".join(f"no fused kernels for the {part}: {reason}" for part, reason in found.items() if reason)


def _can_encode(codec: str) -> bool:
    import av

    try:
        av.Codec(codec, "w")
    except ValueError:  # the base class of PyAV's UnknownCodecError
        return False
    return True


def _installed(package: str) -> str | None:
    """Return the version of a package; None if it cannot be imported."""
    try:
        module = import_module(package)
    except (ImportError, OSError):
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # installed by a distribution of another name, such as triton-windows
        return str(getattr(module, "__version__", "version unknown"))


def _memory_bytes() -> tuple[int, int]:
    """Return available and total bytes, within the limit of the container; zeros if unknown."""
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in _proc("meminfo").splitlines() if ":" in line}
    available, total = 1024 * kilobytes.get("MemAvailable", 0), 1024 * kilobytes.get("MemTotal", 0)
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    if not limit.isdigit() or int(limit) >= total:
        return available, total
    used = _read(Path("/sys/fs/cgroup/memory.current")).strip()
    return min(available, int(limit) - int(used or 0)), int(limit)


def _proc(name: str) -> str:
    return _read(Path("/proc") / name)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
