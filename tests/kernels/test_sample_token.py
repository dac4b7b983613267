import copy
from dataclasses import fields, replace

import pytest
import torch

from shoal.kernels.sample_token import (
    SamplingState,
    SemanticIds,
    sample_code,
    sample_code_reference,
    sample_semantic,
    sample_semantic_reference,
)

SLOTS, CODEBOOKS, DIM = 7, 4, 24
IDS = SemanticIds(first=100, count=40, stop=90, codebook_size=48)


def memory(window: int, device: str) -> SamplingState:
    """Slots at all stages: nothing drawn yet, a window half full, and one that slides."""
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


def twin(original: SamplingState) -> SamplingState:
    return replace(original, **{each.name: getattr(original, each.name).clone() for each in fields(original)})


def assert_same(ours: SamplingState, theirs: SamplingState) -> None:
    for each in fields(ours):
        assert torch.equal(getattr(ours, each.name), getattr(theirs, each.name)), each.name


@pytest.mark.parametrize("s2", [False, True], ids=["s1", "s2"])
def test_a_frame_is_drawn_and_remembered_as_the_reference_does(s2: bool, dtype: torch.dtype, device: str) -> None:
    ours = memory(10 if s2 else 16, device)
    theirs = twin(ours)
    slots = torch.tensor([6, 0, 3, 1, 5, 2], dtype=torch.int32, device=device)
    table = torch.randn(48, DIM, device=device).to(dtype)
    columns = [torch.zeros(6, 1 + CODEBOOKS, dtype=torch.long, device=device) for _ in range(2)]
    inputs = [torch.zeros(6, DIM, dtype=dtype, device=device) for _ in range(2)]
    for _ in range(3):
        logits = (2 * torch.randn(6, IDS.count + 1, device=device)).to(dtype)
        sample_semantic(logits.clone(), slots, ours, IDS, columns[0], table, inputs[0], s2)
        sample_semantic_reference(logits, slots, theirs, IDS, columns[1], table, inputs[1], s2)
        assert torch.equal(inputs[0], inputs[1])
        for codebook in range(1, CODEBOOKS):
            logits = (2 * torch.randn(6, 32, device=device)).to(dtype)
            sample_code(logits.clone(), slots, ours, codebook, columns[0], table, inputs[0], not s2)
            sample_code_reference(logits, slots, theirs, codebook, columns[1], table, inputs[1], not s2)
            assert codebook == CODEBOOKS - 1 or torch.equal(inputs[0], inputs[1])
        assert torch.equal(columns[0], columns[1])
        assert_same(ours, theirs)


@pytest.mark.parametrize("size", [40, 1024, 1025])
def test_codes_are_drawn_as_the_reference_draws_them(size: int, device: str) -> None:
    torch.manual_seed(0)
    ours = memory(16, device)
    ours.top_k[:3] = 2**31
    theirs = twin(ours)
    slots = torch.arange(SLOTS, dtype=torch.int32, device=device)
    table = torch.randn(size, DIM, device=device)
    columns = [torch.zeros(SLOTS, 1 + CODEBOOKS, dtype=torch.long, device=device) for _ in range(2)]
    x = torch.zeros(SLOTS, DIM, device=device)
    for codebook in (1, 2, 3) * 2:
        logits = 3 * torch.randn(SLOTS, size, device=device)  # no two alike: ties stay or go together
        sample_code(logits.clone(), slots, ours, codebook, columns[0], table, x, True)
        sample_code_reference(logits, slots, theirs, codebook, columns[1], table, x, True)
        assert torch.equal(columns[0], columns[1])


def test_without_limits_every_code_can_be_drawn(device: str) -> None:
    ours = memory(16, device)
    ours.top_p.fill_(1.0)
    ours.top_k.fill_(2**31)
    ours.temperature.fill_(1.0)
    slots = torch.zeros(200, dtype=torch.int32, device=device)
    columns = torch.zeros(200, 1 + CODEBOOKS, dtype=torch.long, device=device)
    table, x = torch.zeros(8, DIM, device=device), torch.zeros(200, DIM, device=device)
    heard = set()
    for frame in range(60):
        ours.frame.fill_(frame)
        sample_code(torch.zeros(1, 8, device=device), slots[:1], ours, 1, columns, table, x, False)
        heard.add(int(columns[0, 2]))
    assert heard == set(range(8))


def test_the_likeliest_survives_the_narrowest_nucleus(device: str) -> None:
    ours = memory(16, device)
    ours.top_p.fill_(1e-6)
    slots = torch.arange(SLOTS, dtype=torch.int32, device=device)
    columns = torch.zeros(SLOTS, 1 + CODEBOOKS, dtype=torch.long, device=device)
    logits = torch.randn(SLOTS, 100, device=device)
    x = torch.zeros(SLOTS, DIM, device=device)
    sample_code(logits.clone(), slots, ours, 1, columns, torch.zeros(100, DIM, device=device), x, False)
    assert torch.equal(columns[:, 2], logits.argmax(-1))


def test_a_slot_that_is_not_drawn_for_is_left_alone(dtype: torch.dtype, device: str) -> None:
    ours = memory(16, device)
    before = copy.deepcopy(ours)
    slots = torch.tensor([2], dtype=torch.int32, device=device)
    columns, x = torch.zeros(1, 1 + CODEBOOKS, dtype=torch.long, device=device), torch.zeros(1, DIM, device=device)
    sample_semantic(
        torch.randn(1, 41, device=device), slots, ours, IDS, columns, torch.randn(48, DIM, device=device), x, False
    )
    others = [slot for slot in range(SLOTS) if slot != 2]
    assert torch.equal(ours.window[others], before.window[others])
    assert torch.equal(ours.last_tokens[others], before.last_tokens[others])
