"""Fused frames against the eager path: the same tokens per slot, and the same KV cache after a prefill."""

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.engine.execution.fused import FusedFrame, FusedPrefill
from shoal.engine.execution.slot_state import SlotStates
from shoal.engine.kv_cache import AttentionMetadata, PagedKV, PrefillSegment
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.cuda_graph import compile_ahead
from shoal.model.frame import FrameSampler
from shoal.model.slow import Head
from shoal.speech import SamplingParams
from tests.poison import poisoned_memory

pytest.importorskip("triton")

ROWS, BLOCKS, SIZE = 3, 9, 16
SLOTS = torch.tensor([4, 1, 2])
TABLES = torch.arange(BLOCKS, dtype=torch.int32).reshape(ROWS, 3)  # one row per sequence
SAMPLINGS = [
    SamplingParams(seed=1, repetition_penalty=1.3, temperature=0.9, top_p=0.9),
    SamplingParams(seed=2, repetition_penalty=1.5, repetition="window", temperature=0.9, top_p=0.9, top_k=30),
    SamplingParams(seed=3, repetition_penalty=1.0, temperature=0.9, top_p=1.0),
]


def prepare(checkpoint: Checkpoint) -> tuple[PagedKV, SlotStates]:
    """Return a random KV cache and three sequences at different positions."""
    generator = torch.Generator().manual_seed(0)
    config = checkpoint.model.config
    kv = PagedKV(config.slow, BLOCKS, SIZE, torch.float32, "cpu")
    kv.keys.normal_(generator=generator)
    kv.values.normal_(generator=generator)
    states = SlotStates(checkpoint.model, 4)
    for index, (slot, sampling) in enumerate(zip(SLOTS.tolist(), SAMPLINGS, strict=True)):
        sequence = Sequence.start(index, np.zeros((3, 1 + config.num_codebooks), np.int32), sampling, 100)
        sequence.slot = slot
        sequence.length += 3 * index
        states.bind([sequence])
    states.last_tokens[:, 0] = config.semantic_begin_id + torch.arange(5)
    states.last_tokens[:, 1:] = torch.randint(0, 128, (5, config.num_codebooks), generator=generator)
    return kv, states


def by_slot() -> torch.Tensor:
    tables = torch.full((5, TABLES.shape[1]), BLOCKS, dtype=torch.int32)
    tables[SLOTS] = TABLES
    return tables


def places(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positions = lengths - 1
    return positions, TABLES[torch.arange(ROWS), positions // SIZE].long() * SIZE + positions % SIZE


@torch.inference_mode()
def plain_frames(checkpoint: Checkpoint, lengths: torch.Tensor, steps: int) -> torch.Tensor:
    kv, states = prepare(checkpoint)
    decoder, frames = FrameSampler(checkpoint.model, Head(checkpoint.model.slow)), []
    for step in range(steps):
        positions, where = places(lengths + step)
        kv.begin_pass(AttentionMetadata(where, [], TABLES.long(), lengths + step))
        hidden = checkpoint.model.slow(states.last_tokens[SLOTS], positions, kv)
        state = states.rows(SLOTS, penalised=True)
        frames.append(decoder.sample(hidden, state))
        states.store(SLOTS, state, frames[-1])
    return torch.stack(frames)


@torch.inference_mode()
def fused_frames(checkpoint: Checkpoint, lengths: torch.Tensor, steps: int) -> torch.Tensor:
    kv, states = prepare(checkpoint)
    frame = FusedFrame(checkpoint.model, Head(checkpoint.model.slow), kv, states, by_slot(), ROWS)
    frame.slots.copy_(SLOTS)
    with poisoned_memory():
        compile_ahead([frame])  # has no side effects
    frames = []
    for step in range(steps):
        frame.positions.copy_(lengths + step - 1)
        frame.run()
        frames.append(frame.tokens.clone())
    return torch.stack(frames)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
@pytest.mark.parametrize("family", ["tiny", "tiny_s2"])
def test_the_fused_frame_samples_what_the_eager_path_samples(family: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(family)
    lengths = torch.tensor([5, 17, 40])
    assert torch.equal(fused_frames(checkpoint, lengths, 1), plain_frames(checkpoint, lengths, 1))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
@torch.inference_mode()
def test_a_fused_prefill_writes_the_same_kv_cache_as_the_eager_path(tiny: Checkpoint) -> None:
    (ours, _), (theirs, _) = prepare(tiny), prepare(tiny)
    width = 1 + tiny.model.config.num_codebooks
    tokens = torch.randint(0, 100, (7, width), generator=torch.Generator().manual_seed(1))
    slot, first = 1, 14  # across a block boundary, after cached tokens
    prompt = FusedPrefill(tiny.model, ours, by_slot(), 8)
    with poisoned_memory():
        compile_ahead([prompt])
    prompt.slots.fill_(0)
    prompt.slots[:7] = SLOTS[slot]
    prompt.positions[:7] = torch.arange(first, first + 7)
    prompt.inputs[2:, :7] = tokens.T
    prompt.run()
    positions = torch.arange(first, first + 7)
    table = TABLES[slot].long()
    where = table[positions // SIZE] * SIZE + positions % SIZE
    theirs.begin_pass(
        AttentionMetadata(
            where, [PrefillSegment(0, 7, first + 7, table)], TABLES[:0].long(), torch.zeros(0, dtype=torch.long)
        )
    )
    tiny.model.slow(tokens, positions, theirs)
    torch.testing.assert_close(ours.keys[:, :BLOCKS], theirs.keys[:, :BLOCKS], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.values[:, :BLOCKS], theirs.values[:, :BLOCKS], atol=1e-5, rtol=1e-5)
