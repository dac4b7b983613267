"""Time one request with the code of a fish-speech checkout; `scripts.compare_upstream` starts it.

    PYTHONPATH=CHECKOUT python upstream_request.py PLAN compile|eager

PLAN is a JSON file: checkpoint directory, prompt grid [1 + codebooks, tokens], token ids, frames and device. Prompt and
ids come from Shoal, so both sides do the same work whichever tokenizers this version of upstream reads. Prints one
line of JSON. Imports nothing of Shoal.
"""

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def import_layers_only() -> None:
    """Import the layers that upstream's codec uses without the packages around them.

    `audiotools` and `dac` import librosa, matplotlib and IPython for recordings, plots and training. Decoding uses
    none of that. Where they are not installed, the two packages are entered without running their `__init__`; every
    module that computes is the real one.
    """
    try:
        importlib.import_module("dac")
        return
    except ImportError as missing:
        print(f"{missing}: importing only the layers of audiotools and dac", file=sys.stderr)
    for name in [name for name in sys.modules if name.split(".")[0] in ("audiotools", "dac")]:
        del sys.modules[name]
    for name in ("audiotools", "audiotools.ml", "audiotools.ml.layers", "dac", "dac.model", "dac.nn"):
        _enter(name)
    # Used in annotations and for files only.
    vars(sys.modules["audiotools"])["AudioSignal"] = type("AudioSignal", (), {})
    base = importlib.import_module("audiotools.ml.layers.base")
    vars(sys.modules["audiotools.ml"])["BaseModel"] = base.BaseModel


def _enter(name: str) -> None:
    """Register a package whose modules can be imported, without running its `__init__`."""
    parent, _, last = name.rpartition(".")
    found = importlib.util.find_spec(name) if not parent else None
    module = ModuleType(name)
    where = found.submodule_search_locations if found else [f"{path}/{last}" for path in sys.modules[parent].__path__]
    module.__path__ = list(where or [])
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], last, module)


def load_codec(directory: Path, device: str, dtype: torch.dtype) -> Any:
    """Load the codec with upstream's own function, whose name depends on the version."""
    from fish_speech.models.text2semantic import inference

    if hasattr(inference, "load_codec_model"):
        return inference.load_codec_model(directory / "codec.pth", device, dtype)
    from fish_speech.models.dac.inference import load_model

    return load_model("modded_dac_vq", str(directory / "codec.pth"), device=device)


def decode(codec: Any, codes: torch.Tensor) -> torch.Tensor:
    """Decode codes [codebooks, frames]; older versions take lengths as well."""
    with torch.inference_mode():
        if hasattr(codec, "from_indices"):
            audio: torch.Tensor = codec.from_indices(codes[None])
            return audio
        lengths = torch.tensor([codes.shape[1]], device=codes.device)
        first: torch.Tensor = codec.decode(codes[None], lengths)[0]
        return first


class TokenIds:
    """Stands for upstream's tokenizer, of which generation asks the id of the stop token only."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def get_token_id(self, token: str) -> int:
        return self.stop


def load_model(plan: dict[str, Any], mode: str) -> tuple[Any, Any]:
    """Return the model with its caches, and the function that decodes one frame."""
    from fish_speech.models.text2semantic import inference

    device, dtype = plan["device"], torch.bfloat16
    model, decode_one_token = inference.init_model(Path(plan["model"]), device, dtype, compile=mode == "compile")
    model.tokenizer = TokenIds(plan["stop_id"])
    model.config.semantic_begin_id, model.config.semantic_end_id = plan["semantic_ids"]
    with torch.device(device):
        model.setup_caches(max_batch_size=1, max_seq_len=model.config.max_seq_len, dtype=dtype)
    model._cache_setup_done = True
    return model, decode_one_token


def generate(model: Any, decode_one_token: Any, plan: dict[str, Any], frames: int) -> torch.Tensor:
    """Return the codes [codebooks, frames] that upstream samples for the prompt of the plan."""
    from fish_speech.models.text2semantic import inference

    prompt = torch.tensor(plan["prompt"], device=plan["device"], dtype=torch.long)
    sampling = {"temperature": 0.7, "top_p": 0.7, "decode_one_token": decode_one_token}
    y = inference.generate(
        model=model, prompt=prompt, max_new_tokens=frames, audio_masks=None, audio_parts=None, **sampling
    )
    codes: torch.Tensor = y[1:, prompt.shape[1] :]
    return codes.clamp(0, plan["codebook_size"] - 1)  # random weights may sample the stop token, which has no codes


def timed(work: Callable[[], torch.Tensor], device: str) -> tuple[float, torch.Tensor]:
    """Return the seconds and the result of a call, the device's work included."""
    began = time.perf_counter()
    result = work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def main() -> None:
    plan, mode = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    device, began = plan["device"], time.perf_counter()
    import_layers_only()
    model, decode_one_token = load_model(plan, mode)
    codec = load_codec(Path(plan["model"]), device, torch.bfloat16)
    loaded = time.perf_counter()
    decode(codec, generate(model, decode_one_token, plan, 4))  # warm-up; with `compile` this is where it compiles
    warm = time.perf_counter()
    seconds, codes = timed(lambda: generate(model, decode_one_token, plan, plan["frames"]), device)
    codec_seconds, samples = timed(lambda: decode(codec, codes), device)
    figures = {
        "start": loaded - began,
        "warm_up": warm - loaded,
        "frames": codes.shape[1],
        "samples": samples.shape[-1],
        "model_seconds": seconds,
        "codec_seconds": codec_seconds,
        "memory": torch.cuda.max_memory_reserved() if device.startswith("cuda") else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
