import copy
from dataclasses import fields, replace

import pytest
import torch

from shoal.kernels.sampling.sample_token import (
    SamplingState,
    SemanticIds,
    sample_code,
    sample_code_reference,
    sample_semantic,
    sample_semantic_reference,
)

SLOTS, CODEBOOKS, DIM = 7, 4, 24
IDS = SemanticIds(first=100, count=40, stop=90, codebook_size=48)


def sampling_state(window: int, device: str) -> SamplingState:
    """Return slots at all stages: no frame yet, a partly filled window, and a sliding one."""
    seen = torch.tensor([0, 1, 2, 5, window, window + 1, 3 * window], device=device)
    recent = torch.randint(0, 32, (SLOTS, 1 + CODEBOOKS, window), device=device)
    recent[:, 0] += IDS.first
    recent[2, :, 0] = 3
    recent[3, 0, 0] = IDS.stop
    return SamplingState(
        temperature=torch.rand(SLOTS, device=device) + 0.3,
        top_p=torch.rand(SLOTS, device=device) * 0.7 + 0.3,
        top_k=torch.randint(2, 60, (SLOTS,), device=device),
        penalty=torch.rand(SLOTS, device=device) + 1.0,
        whole_window=torch.tensor([0, 1] * SLOTS, device=device).bool()[:SLOTS],
        seed=torch.randint(0, 2**32, (SLOTS,), device=device),
        frame=seen,
        window=recent,
        last_tokens=torch.zeros(SLOTS, 1 + CODEBOOKS, dtype=torch.long, device=device),
    )


def clone(original: SamplingState) -> SamplingState:
    return replace(original, **{each.name: getattr(original, each.name).clone() for each in fields(original)})


def assert_same(ours: SamplingState, theirs: SamplingState) -> None:
    for each in fields(ours):
        assert torch.equal(getattr(ours, each.name), getattr(theirs, each.name)), each.name


@pytest.mark.parametrize("s2", [False, True], ids=["s1", "s2"])
def test_a_frame_is_sampled_and_stored_like_the_reference(s2: bool, dtype: torch.dtype, device: str) -> None:
    ours = sampling_state(10 if s2 else 16, device)
    theirs = clone(ours)
    slots = torch.tensor([6, 0, 3, 1, 5, 2], dtype=torch.int32, device=device)
    table = torch.randn(48, DIM, device=device).to(dtype)
    tokens = [torch.zeros(6, 1 + CODEBOOKS, dtype=torch.long, device=device) for _ in range(2)]
    inputs = [torch.zeros(6, DIM, dtype=dtype, device=device) for _ in range(2)]
    for _ in range(3):
        logits = (2 * torch.randn(6, IDS.count + 1, device=device)).to(dtype)
        sample_semantic(logits.clone(), slots, ours, IDS, tokens[0], table, inputs[0], s2)
        sample_semantic_reference(logits, slots, theirs, IDS, tokens[1], table, inputs[1], s2)
        assert torch.equal(inputs[0], inputs[1])
        for codebook in range(1, CODEBOOKS):
            logits = (2 * torch.randn(6, 32, device=device)).to(dtype)
            sample_code(logits.clone(), slots, ours, codebook, tokens[0], table, inputs[0], not s2)
            sample_code_reference(logits, slots, theirs, codebook, tokens[1], table, inputs[1], not s2)
            assert codebook == CODEBOOKS - 1 or torch.equal(inputs[0], inputs[1])
        assert torch.equal(tokens[0], tokens[1])
        assert_same(ours, theirs)


@pytest.mark.parametrize("size", [40, 1024, 1025])
def test_codes_are_sampled_like_the_reference(size: int, device: str) -> None:
    torch.manual_seed(0)
    ours = sampling_state(16, device)
    ours.top_k[:3] = 2**31
    theirs = clone(ours)
    slots = torch.arange(SLOTS, dtype=torch.int32, device=device)
    table = torch.randn(size, DIM, device=device)
    tokens = [torch.zeros(SLOTS, 1 + CODEBOOKS, dtype=torch.long, device=device) for _ in range(2)]
    x = torch.zeros(SLOTS, DIM, device=device)
    for codebook in (1, 2, 3) * 2:
        logits = 3 * torch.randn(SLOTS, size, device=device)  # no ties: the kernel keeps or drops tied tokens together
        sample_code(logits.clone(), slots, ours, codebook, tokens[0], table, x, True)
        sample_code_reference(logits, slots, theirs, codebook, tokens[1], table, x, True)
        assert torch.equal(tokens[0], tokens[1])


def test_without_limits_every_code_can_be_sampled(device: str) -> None:
    ours = sampling_state(16, device)
    ours.top_p.fill_(1.0)
    ours.top_k.fill_(2**31)
    ours.temperature.fill_(1.0)
    slots = torch.zeros(200, dtype=torch.int32, device=device)
    tokens = torch.zeros(200, 1 + CODEBOOKS, dtype=torch.long, device=device)
    table, x = torch.zeros(8, DIM, device=device), torch.zeros(200, DIM, device=device)
    sampled = set()
    for frame in range(60):
        ours.frame.fill_(frame)
        sample_code(torch.zeros(1, 8, device=device), slots[:1], ours, 1, tokens, table, x, False)
        sampled.add(int(tokens[0, 2]))
    assert sampled == set(range(8))


def test_the_most_likely_code_survives_the_smallest_top_p(device: str) -> None:
    ours = sampling_state(16, device)
    ours.top_p.fill_(1e-6)
    slots = torch.arange(SLOTS, dtype=torch.int32, device=device)
    tokens = torch.zeros(SLOTS, 1 + CODEBOOKS, dtype=torch.long, device=device)
    logits = torch.randn(SLOTS, 100, device=device)
    x = torch.zeros(SLOTS, DIM, device=device)
    sample_code(logits.clone(), slots, ours, 1, tokens, torch.zeros(100, DIM, device=device), x, False)
    assert torch.equal(tokens[:, 2], logits.argmax(-1))


def test_a_slot_that_is_not_in_the_batch_is_unchanged(dtype: torch.dtype, device: str) -> None:
    ours = sampling_state(16, device)
    before = copy.deepcopy(ours)
    slots = torch.tensor([2], dtype=torch.int32, device=device)
    tokens, x = torch.zeros(1, 1 + CODEBOOKS, dtype=torch.long, device=device), torch.zeros(1, DIM, device=device)
    sample_semantic(
        torch.randn(1, 41, device=device), slots, ours, IDS, tokens, torch.randn(48, DIM, device=device), x, False
    )
    others = [slot for slot in range(SLOTS) if slot != 2]
    assert torch.equal(ours.window[others], before.window[others])
    assert torch.equal(ours.last_tokens[others], before.last_tokens[others])
