"""One sequence, plainly: prefill, then frame after frame. The engine is tested against this."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import TextError
from shoal.kernels.sample import exponential_noise
from shoal.model.cache import DenseKVCache
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameSampler, FrameState, Noise
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import Head
from shoal.speech import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    codes: Tensor  # [codebooks, frames]
    finish: FinishReason


def generate(model: DualAR, head: Head, prompt: Tensor, sampling: SamplingParams) -> Generation:
    """The frames that answer a prompt grid [1 + codebooks, T], without the column of the stop token."""
    columns = list(generate_tokens(model, head, prompt, sampling))
    stopped = bool(columns) and int(columns[-1][0]) == model.config.stop_id
    kept = columns[:-1] if stopped else columns
    empty = torch.zeros(model.config.num_codebooks, 0, dtype=torch.long, device=model.device)
    codes = torch.stack([column[1:] for column in kept], dim=1) if kept else empty
    return Generation(codes, FinishReason.STOP if stopped else FinishReason.LENGTH)


@torch.inference_mode()
def generate_tokens(
    model: DualAR, head: Head, prompt: Tensor, sampling: SamplingParams, noise: Noise = exponential_noise
) -> Iterator[Tensor]:
    """Columns [1 + codebooks] as they are drawn; the one with the stop token, if it comes, is the last."""
    config = model.config
    budget = frame_budget(config, prompt.shape[1], sampling.max_frames)
    cache = DenseKVCache(config.slow, 1, prompt.shape[1] + budget, model.dtype, model.device)
    decoder = FrameSampler(model, head, noise)
    state = FrameState.initial(config, SamplingTensors.from_settings([sampling], model.device))
    columns, position = prompt.T.to(model.device).long(), 0
    for _ in range(budget):
        positions = torch.arange(position, position + len(columns), device=model.device)
        hidden = model.slow(columns, positions, cache)[-1:]
        position += len(columns)
        columns = decoder.sample(hidden, state)
        yield columns[0]
        if int(columns[0, 0]) == config.stop_id:
            return


def frame_budget(config: DualARConfig, prompt_length: int, max_frames: int) -> int:
    """How many frames may follow a prompt; a prompt that leaves too little room is refused."""
    if prompt_length > config.max_prompt:
        raise TextError(
            f"the prompt has {prompt_length} columns and this model takes {config.max_prompt}: "
            "shorten the text or the reference recording"
        )
    room = config.slow.max_seq_len - prompt_length
    return min(max_frames or room, room)
