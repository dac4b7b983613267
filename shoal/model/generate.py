"""Reference generation of a single sequence: prefill, then one frame at a time. The engine is tested against it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import TextError
from shoal.kernels.sampling.sample import exponential_noise
from shoal.model.cache import DenseKVCache
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameSampler, FrameState, Noise
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import Head
from shoal.speech import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """Frames of one sequence and the reason it ended."""

    codes: Tensor  # [codebooks, frames]
    finish: FinishReason


def generate(model: DualAR, head: Head, prompt: Tensor, sampling: SamplingParams) -> Generation:
    """Generate the frames that follow a prompt grid [1 + codebooks, T]. The stop token is not a frame."""
    tokens = list(generate_tokens(model, head, prompt, sampling))
    stopped = bool(tokens) and int(tokens[-1][0]) == model.config.stop_id
    frames = tokens[:-1] if stopped else tokens
    empty = torch.zeros(model.config.num_codebooks, 0, dtype=torch.long, device=model.device)
    codes = torch.stack([token[1:] for token in frames], dim=1) if frames else empty
    return Generation(codes, FinishReason.STOP if stopped else FinishReason.LENGTH)


@torch.inference_mode()
def generate_tokens(
    model: DualAR, head: Head, prompt: Tensor, sampling: SamplingParams, noise: Noise = exponential_noise
) -> Iterator[Tensor]:
    """Yield tokens [1 + codebooks] as they are sampled; the stop token, if sampled, is the last one."""
    config = model.config
    budget = frame_budget(config, prompt.shape[1], sampling.max_frames)
    cache = DenseKVCache(config.slow, 1, prompt.shape[1] + budget, model.dtype, model.device)
    sampler = FrameSampler(model, head, noise)
    state = FrameState.initial(config, SamplingTensors.from_settings([sampling], model.device))
    tokens, position = prompt.T.to(model.device).long(), 0
    for _ in range(budget):
        positions = torch.arange(position, position + len(tokens), device=model.device)
        hidden = model.slow(tokens, positions, cache)[-1:]
        position += len(tokens)
        tokens = sampler.sample(hidden, state)
        yield tokens[0]
        if int(tokens[0, 0]) == config.stop_id:
            return


def frame_budget(config: DualARConfig, prompt_length: int, max_frames: int) -> int:
    """Return how many frames may follow a prompt. Raises TextError for a prompt over `max_prompt` tokens."""
    if prompt_length > config.max_prompt:
        raise TextError(
            f"the prompt has {prompt_length} tokens, this model accepts {config.max_prompt}: "
            "shorten the text or the reference recording"
        )
    available = config.slow.max_seq_len - prompt_length
    return min(max_frames or available, available)
