"""Build an engine from the name of a model."""

import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.load import Checkpoint, ChooseModes
from shoal.checkpoint.resolve import resolve_model
from shoal.codec.dac import Codec
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.execution.cpu_threads import limit_threads, single_thread
from shoal.engine.kv_cache import require_kv_backend
from shoal.engine.memory.limit import parse_memory_limit
from shoal.engine.memory.profile import device_memory_limit, memory_advice, plan_memory
from shoal.engine.process.worker import EngineSource
from shoal.engine.service import Service
from shoal.errors import InvalidRequest, counted
from shoal.model.dual_ar import DualAR
from shoal.model.linear import to_column_major
from shoal.native.choice import native_library
from shoal.quantize.frame_time import memory_bandwidth
from shoal.quantize.modes import WeightModes
from shoal.quantize.policy import check_requested, choose_modes
from shoal.text.lexicon import Lexicon, read_lexicon
from shoal.voices.cache import VoiceCache
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore, voice_directory
from shoal.voices.voice import voice_limits

logger = logging.getLogger(__name__)

SMALL_BYTES = 256 << 20  # weight files below this size load faster on one thread
WEIGHT_SUFFIXES = (".safetensors", ".pth")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model: str | Path = "nano",
    *,
    device: str = "auto",
    dtype: str | None = None,
    codec: str | Path | None = None,
    voices: str | Path | None = None,
    config: EngineConfig | None = None,
    lexicon: str | Path | None = None,
    warm: bool = False,
) -> Engine:
    """Load a model by name or directory and return an engine. Close the engine, or use it in a `with`.

    `dtype` defaults to bfloat16 on a GPU (float16 before compute capability 8.0) and float32 on a CPU;
    `config.quantize` selects the weight quantization.
    `codec` is the codec of models that come without one. `voices` is the directory of stored voices, in addition to
    the model's built-in ones, `lexicon` a file with readings of words. `warm` runs one-time work before returning and
    loads stored voices in the background.
    """
    if not isinstance(model, str | Path):
        raise InvalidRequest(f"model must be a name or a directory, not {model!r:.80}")
    model, device, config = str(model), choose_device(device), config or EngineConfig()
    limit_threads()
    try:
        words = None if lexicon is None else read_lexicon(Path(lexicon))
        return _load(model, device, dtype, codec, voices, config, words, warm=warm)
    except torch.OutOfMemoryError as error:
        # The message has to contain "out of memory": SageMaker's Triton server then answers 507, and SageMaker unloads
        # another model. Even with `auto` this can happen, because other processes may hold memory of the card.
        advice = memory_advice(smallest="int4" in config.quantize)
        raise InvalidRequest(
            f"out of memory: {model} does not fit into the free memory of {device}; {advice}"
        ) from error


def _load(
    model: str,
    device: str,
    dtype: str | None,
    codec: str | Path | None,
    voices: str | Path | None,
    config: EngineConfig,
    lexicon: Lexicon | None,
    *,
    warm: bool,
) -> Engine:
    with single_thread() if device == "cpu" and is_small(model) else nullcontext():
        checkpoint = resolve_model(
            model,
            codec=Path(codec) if codec else None,
            dtype=choose_dtype(dtype, device),
            device=device,
            quantize=weight_chooser(config, torch.device(device), choose_dtype(dtype, device)),
        )
        if device == "cpu":
            _warn_if_emulated(choose_dtype(dtype, device))
            to_column_major(checkpoint.model)
    context_tokens = config.context_tokens or checkpoint.profile.context_tokens
    # Random weights generate noise, which the speech guard would reject.
    guard = config.guard and not model.startswith(RANDOM_PREFIX)
    core = build_core(checkpoint, replace(config, context_tokens=context_tokens, guard=guard))
    cache = voice_cache(checkpoint, Path(voices) if voices else voice_directory(), config)
    if warm:
        core.warm_up()
        cache.warm()
    if (slow := slow_backends(core)) is not None:
        logger.warning("%s", slow)
    return Engine(core, cache, lexicon)


def is_small(model: str) -> bool:
    """Return whether the weight files of a model are so small that one thread loads them as fast as several."""
    if model.startswith(RANDOM_PREFIX):
        return False
    files = (path for path in find_directory(model).iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    return sum(path.stat().st_size for path in files) < SMALL_BYTES


def slow_backends(core: EngineCore) -> str | None:
    """Return a warning if a GPU runs on a slower backend than graph or without some graph sizes, with cause and advice.

    None if all is well, on other devices, and if the settings name another backend.
    """
    runner, codec, device = core.runner, core.audio_decoder, core.checkpoint.model.device
    if device.type != "cuda" or core.config.backend not in ("auto", "graph"):
        return None
    backends = {"model": runner.backend, "codec": codec.backend}
    slow = [f"the {part} runs on {name} instead of graph" for part, name in backends.items() if name != "graph"]
    dropped = [*runner.dropped, *codec.dropped]
    if not slow and not dropped:
        return None
    reasons = dict.fromkeys([*runner.reasons.values(), *codec.reasons.values(), *dropped])
    problems = [*slow, *([f"{counted(len(dropped), 'size is', 'sizes are')} left out"] if dropped else [])]
    if any(torch.OutOfMemoryError.__name__ in reason for reason in reasons):
        advice = f"lower `slots`, or {memory_advice(smallest='int4' in core.config.quantize)}"
    else:
        advice = 'run `shoal doctor`; see "Compiling a kernel fails" in the troubleshooting guide'
    return f"{', '.join(problems)} ({'; '.join(reasons) or 'quantized codec'}): slower but correct; {advice}"


def build_core(checkpoint: Checkpoint, config: EngineConfig, *, record_weights: bool = False) -> EngineCore:
    """Return a core with a KV cache sized to the device's memory limit. Raises InvalidRequest if that is too small."""
    if checkpoint.model.device.type == "cuda":
        config = plan_memory(checkpoint, config, record_weights=record_weights)
    return EngineCore(checkpoint, config, record_weights=record_weights)


def load_service(source: EngineSource) -> Service:
    """Return the warmed-up service of an engine process."""
    return load(
        source.model,
        device=source.device,
        dtype=source.dtype,
        codec=source.codec,
        voices=source.voices,
        config=source.config,
        lexicon=source.lexicon,
        warm=True,
    ).service


def voice_cache(checkpoint: Checkpoint, directory: Path, config: EngineConfig | None = None) -> VoiceCache:
    """Return the cache of the voices of a directory and of the model, encoded by its codec on first use."""
    config = config or EngineConfig()
    limits = voice_limits(config.reference_seconds, checkpoint.prompt_seconds)
    rate = checkpoint.codec.config.sample_rate
    store = VoiceStore(directory, checkpoint.builtin_voices, sample_rate=rate, limits=limits)
    encoder = CodecEncoder(checkpoint.codec, max_seconds=config.reference_seconds)
    return VoiceCache(store, encoder, entries=config.cached_voices, limits=limits)


def weight_chooser(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> ChooseModes:
    """Return the function that selects weight modes at load time. Raises InvalidRequest if the device lacks them."""
    check_requested(config.quantize, device)
    require_kv_backend(config.kv_dtype, device, config.backend)
    # A CPU has no limit to apply, but an invalid gpu_memory is still refused.
    memory = (
        device_memory_limit(config, device)
        if device.type == "cuda"
        else parse_memory_limit(config.gpu_memory, sys.maxsize)
    )

    def choose(model: DualAR, codec: Codec) -> WeightModes:
        native = device.type == "cpu" and dtype == torch.float32 and native_library(config.cpu_isa).available
        choice = choose_modes(
            config.quantize,
            model,
            codec,
            device=device,
            dtype=dtype,
            memory=memory,
            bandwidth=memory_bandwidth(device),
            native=native,
        )
        logger.info("weights: %s", choice.describe(device))
        return choice.modes

    return choose


def choose_device(device: str) -> str:
    if device == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        if (reason := missing_kernels("cuda")) is not None:
            logger.warning("using the CPU: %s", reason)
        return "cuda" if reason is None else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda", "mps"):
        raise InvalidRequest(f"unknown device {device!r}: use auto, cpu, cuda, cuda:N or mps")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise InvalidRequest("mps: this machine has no Apple GPU that torch can use; use cpu")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"{device}: this machine has no usable CUDA device; run `shoal doctor` for the cause")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"{device}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0")
    if found.type == "cuda" and (reason := missing_kernels(device)) is not None:
        raise InvalidRequest(f"{device}: {reason}")
    return device


def missing_kernels(device: str | int) -> str | None:
    """Return why this build of torch cannot compute on a CUDA device, which may be too old or too new; else None."""
    built = torch.cuda.get_arch_list() if torch.version.hip is None else []
    codes = [(each.startswith("sm_"), _capability_number(each)) for each in built]
    if not codes:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    own = _capability_number(f"{major}{minor}")
    # Machine code (sm_) runs on later minor versions; PTX (compute_) is compiled for any later GPU.
    if any(number <= own and (number // 10 == own // 10 or not machine_code) for machine_code, number in codes):
        return None
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and torch {torch.__version__} "
        f"has no code for it, only {' '.join(built)}: install another build of torch "
        "(https://pytorch.org/get-started), or use --device cpu"
    )


def _capability_number(name: str) -> int:
    """Return 90 for sm_90a. Jetson Thor was 10.1 before CUDA 13, which calls it 11.0."""
    number = int("".join(filter(str.isdigit, name)))
    return 110 if number == 101 else number


def choose_dtype(dtype: str | None, device: str) -> torch.dtype:
    """Return the dtype of a name, or the default of a device: GPUs before compute capability 8.0 only emulate bf16."""
    if dtype is None and not device.startswith("cuda"):
        return torch.float32
    if dtype is None:
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if dtype not in DTYPES:
        raise InvalidRequest(f"unknown dtype {dtype!r}: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _warn_if_emulated(dtype: torch.dtype) -> None:
    """Warn about a 16-bit type that this CPU has no instructions for: first audio then takes many times as long."""
    suffix = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    read = getattr(torch.cpu, "get_capabilities", None)  # torch >= 2.11
    if suffix is None or read is None or any(name.endswith(suffix) and has for name, has in read().items()):
        return
    logger.warning(
        "this CPU has no %s instructions and emulates them, which is many times slower than float32: remove the "
        "`dtype` setting, or use `quantize=int8` to save memory",
        suffix,
    )
