"""Sampling of one token of a frame on the device: from logits to the embedding of the next fast step.

The per-slot state lives in a `SamplingState`. A kernel reads the sampling settings and the repetition window of its
slot, samples, and writes the token to the frame, to the slot's last token and window, and its embedding to the input
of the next fast-transformer step. The semantic token is sampled first and also determines the first codebook's code;
the last codebook completes the frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels.jit import jit, kernel, launch_dependents_and_wait, next_power_of_two, supports_pdl, tl
from shoal.kernels.sample import apply_repetition_penalty, drawn, push, pushed, sample_reference

# The second draw of a main token that would repeat, in the recipe of S2.
RAS_TEMPERATURE, RAS_TOP_P = 1.0, 0.9
# Lanes of a frame's noise: the main token, the residual codebooks by number, and S2's second main draw.
SEMANTIC_LANE = 0


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Per slot: its settings, how many frames it has drawn, its recent columns, and the last_tokens one."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    penalty: Tensor
    whole_window: Tensor
    seed: Tensor
    frame: Tensor
    window: Tensor  # [slots, 1 + codebooks, W], filled from the left, then sliding; the first frame is not in it
    last_tokens: Tensor  # [slots, 1 + codebooks]


@dataclass(frozen=True, slots=True)
class SemanticIds:
    """Which main tokens the head's columns stand for: `count` codes from `first` on, then the stop token."""

    first: int
    count: int
    stop: int
    codes: int  # entries of the first codebook


def sample_semantic_reference(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    ids: SemanticIds,
    columns: Tensor,
    table: Tensor,
    x: Tensor,
    s2: bool,
) -> None:
    """Logits [n, count + 1] of the rows in slots [n]: fills columns[:, :2] and x [n, dim] from table [codes, dim]."""
    slots, size = slots.long(), ids.count + 1
    window, frame = state.window[slots], state.frame[slots]
    if s2:
        usual = _sampled(logits, slots, state, None, SEMANTIC_LANE)
        hot, share = (torch.full_like(state.top_p, each) for each in (RAS_TEMPERATURE, RAS_TOP_P))
        flatter = replace(state, temperature=hot, top_p=share)
        other = _sampled(logits, slots, flatter, None, state.last_tokens.shape[1] - 1)
        repeated = (window[:, 0] == (usual + ids.first)[:, None]).any(-1) & (usual < ids.count) & (frame > 0)
        drawn_column = torch.where(repeated, other, usual)
    else:
        # The released code indexes the wrong axis: it takes the eleven numbers of the window's oldest column as ids.
        whole = state.whole_window[slots][:, None]
        filled = torch.arange(window.shape[-1], device=frame.device) < (frame - 1)[:, None]
        oldest, recent = (_column_of(each, ids) for each in (window[:, :, 0], window[:, 0]))
        hit = torch.cat((torch.where(whole, size, oldest), torch.where(whole & filled, recent, size)), dim=1)
        drawn_column = _sampled(logits, slots, state, hit, SEMANTIC_LANE)
    main = torch.where(drawn_column < ids.count, drawn_column + ids.first, ids.stop)
    code = (main - ids.first).clamp(0, ids.codes - 1)
    _remember(slots, state, 0, main)
    _remember(slots, state, 1, code)
    columns[:, 0], columns[:, 1] = main, code
    x.copy_(F.embedding(code, table))


def sample_code_reference(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    codebook: int,
    columns: Tensor,
    table: Tensor,
    x: Tensor,
    penalised: bool,
) -> None:
    """Logits [n, size] of one residual codebook: fills columns[:, 1 + codebook] and x; the last one ends the frame."""
    slots, size = slots.long(), logits.shape[1]
    window, frame = state.window[slots, 1 + codebook], state.frame[slots]
    filled = torch.arange(window.shape[-1], device=frame.device) < (frame - 1)[:, None]
    hit = torch.where(state.whole_window[slots][:, None] & ~filled, size, window) if penalised else None
    code = _sampled(logits, slots, state, hit, codebook)
    _remember(slots, state, 1 + codebook, code)
    columns[:, 1 + codebook] = code
    x.copy_(F.embedding(code, table))
    if codebook == columns.shape[1] - 2:
        state.frame[slots] += 1


def _sampled(logits: Tensor, slots: Tensor, state: SamplingState, hit: Tensor | None, lane: int) -> Tensor:
    frame = state.frame[slots]
    if hit is not None:
        # The first frame comes straight from the prompt and is never penalised.
        logits = apply_repetition_penalty(logits, hit, torch.where(frame > 0, state.penalty[slots], 1.0))
    nobody = torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device)
    penalty, seed = state.penalty[slots], state.seed[slots]
    limits = state.temperature[slots], state.top_p[slots], state.top_k[slots]
    return sample_reference(logits, nobody, penalty, *limits, seed, frame, lane)


def _column_of(main: Tensor, ids: SemanticIds) -> Tensor:
    code = main - ids.first
    column = torch.where((code >= 0) & (code < ids.count), code, ids.count + 1)
    return torch.where(main == ids.stop, ids.count, column)


def _remember(slots: Tensor, state: SamplingState, entry: int, value: Tensor) -> None:
    window, frame, length = state.window[slots, entry], state.frame[slots], state.window.shape[-1]
    moved = torch.where((frame > length)[:, None], window.roll(-1, dims=-1), window)
    here = torch.arange(length, device=frame.device) == (frame - 1).clamp_max(length - 1)[:, None]
    state.window[slots, entry] = torch.where(here, value[:, None], moved)
    state.last_tokens[slots, entry] = value


@jit
def _recent(window, slot, ENTRY, W: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """An entry's window, and what it would be moved up by one."""
    place = tl.arange(0, PLACES)
    source = window + (slot * WIDTH + ENTRY) * W + place
    return tl.load(source, mask=place < W, other=-1), tl.load(source + 1, mask=place + 1 < W, other=-1)


@jit
def _keep(
    window,
    last_tokens,
    columns,
    slot,
    row,
    frame,
    value,
    stays,
    moves,
    ENTRY,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Write one entry of the frame: into its column, its slot's last_tokens column, and its slot's window."""
    place = tl.arange(0, PLACES)
    # Frame 1 goes to place 0; from frame W + 1 on everything moves up and the last_tokens goes last.
    moved = tl.where(frame > W, moves, stays)
    here = place == tl.minimum(frame - 1, W - 1)
    tl.debug_barrier()
    tl.store(window + (slot * WIDTH + ENTRY) * W + place, tl.where(here, value, moved), mask=place < W)
    tl.store(last_tokens + slot * WIDTH + ENTRY, value)
    tl.store(columns + row * WIDTH + ENTRY, value)


@jit
def _embed_code(table, x, row, code, DIM: tl.constexpr, STEP: tl.constexpr):
    for start in range(0, DIM, STEP):
        d = start + tl.arange(0, STEP)
        tl.store(x + row * DIM + d, tl.load(table + code * DIM + d, mask=d < DIM), mask=d < DIM)


@kernel()
def _sample_semantic_kernel(
    logits,
    slots,
    temperature,
    top_p,
    top_k,
    penalty,
    whole_window,
    seed,
    frame,
    window,
    last_tokens,
    columns,
    table,
    x,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    STOP: tl.constexpr,
    CODES: tl.constexpr,
    S2: tl.constexpr,
    LANE: tl.constexpr,
    FLAT_HEAT: tl.constexpr,
    FLAT_SHARE: tl.constexpr,
    PADDED: tl.constexpr,
    W: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0)
    # Settings come from the host, and what is remembered from the frame before: neither has to wait.
    slot = tl.load(slots + row).to(tl.int64)
    done = tl.load(frame + slot)
    index = tl.arange(0, PADDED)
    inside = index < COUNT + 1
    most, dice = tl.load(top_k + slot), tl.load(seed + slot)
    hot, share = tl.load(temperature + slot), tl.load(top_p + slot)
    said, said_moved = _recent(window, slot, 0, W, WIDTH, PLACES)
    first, first_moved = _recent(window, slot, 1, W, WIDTH, PLACES)
    place = tl.arange(0, PLACES)
    oldest = tl.load(window + (slot * WIDTH + place) * W, mask=place < WIDTH, other=-1)
    whole = tl.load(whole_window + slot) != 0
    strength = tl.where(done > 0, tl.load(penalty + slot), 1.0)
    if AHEAD:
        launch_dependents_and_wait()
    logits += row * (COUNT + 1)
    if not S2:
        now = _legal(said, FIRST, COUNT, STOP) & whole & (place < done - 1)
        then = _legal(oldest, FIRST, COUNT, STOP) & (whole == 0)
        main = tl.where(whole, said, oldest)
        push(logits, tl.where(main == STOP, COUNT, main - FIRST), now | then, strength)
    value = tl.load(logits + index, mask=inside, other=float("-inf"))
    column = drawn(value, COUNT + 1, index, hot, share, most, dice, done, LANE)
    if S2:
        repeated = tl.sum((said == column + FIRST).to(tl.int32), axis=0) > 0
        if repeated & (column < COUNT) & (done > 0):
            column = drawn(value, COUNT + 1, index, FLAT_HEAT, FLAT_SHARE, most, dice, done, WIDTH - 1)
    main = tl.where(column < COUNT, column + FIRST, STOP)
    code = tl.minimum(tl.maximum(main - FIRST, 0), CODES - 1)
    _keep(window, last_tokens, columns, slot, row, done, main, said, said_moved, 0, W, WIDTH, PLACES)
    _keep(window, last_tokens, columns, slot, row, done, code, first, first_moved, 1, W, WIDTH, PLACES)
    _embed_code(table, x, row, code, DIM, STEP)


@jit
def _legal(main, FIRST: tl.constexpr, COUNT: tl.constexpr, STOP: tl.constexpr):
    """Whether the head has a column for the vocabulary id `main`."""
    return ((main >= FIRST) & (main < FIRST + COUNT)) | (main == STOP)


@kernel("codebook")
def _sample_code_kernel(
    logits,
    slots,
    temperature,
    top_p,
    top_k,
    penalty,
    whole_window,
    seed,
    frame,
    window,
    last_tokens,
    columns,
    table,
    x,
    codebook,
    PENALISED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    W: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    done = tl.load(frame + slot)
    index = tl.arange(0, PADDED)
    inside = index < SIZE
    most, dice = tl.load(top_k + slot), tl.load(seed + slot)
    hot, share = tl.load(temperature + slot), tl.load(top_p + slot)
    said, said_moved = _recent(window, slot, 1 + codebook, W, WIDTH, PLACES)
    recent, hit = window + (slot * WIDTH + 1 + codebook) * W, index < 0
    whole = tl.load(whole_window + slot) != 0
    strength = tl.where(done > 0, tl.load(penalty + slot), 1.0)
    if PENALISED:
        for place in tl.static_range(W):
            # The released window counts empty places as code 0.
            hit |= (index == tl.load(recent + place).to(tl.int32)) & ((whole == 0) | (place < done - 1))
    if AHEAD:
        launch_dependents_and_wait()
    value = tl.load(logits + row * SIZE + index, mask=inside, other=float("-inf"))
    if PENALISED:
        value = pushed(value, hit, strength)
    code = drawn(value, SIZE, index, hot, share, most, dice, done, codebook)
    _keep(window, last_tokens, columns, slot, row, done, code, said, said_moved, 1 + codebook, W, WIDTH, PLACES)
    if codebook == WIDTH - 2:
        tl.store(frame + slot, done + 1)
    else:
        _embed_code(table, x, row, code, DIM, STEP)


def sample_semantic(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    ids: SemanticIds,
    columns: Tensor,
    table: Tensor,
    x: Tensor,
    s2: bool,
) -> None:
    """`sample_semantic_reference` in one launch. The logits are used up."""
    ahead, padded = supports_pdl(logits.device), next_power_of_two(ids.count + 1)
    _sample_semantic_kernel[(len(logits),)](
        logits,
        slots,
        *_tensors(state),
        columns,
        table,
        x,
        FIRST=ids.first,
        COUNT=ids.count,
        STOP=ids.stop,
        CODES=ids.codes,
        S2=s2,
        LANE=SEMANTIC_LANE,
        FLAT_HEAT=RAS_TEMPERATURE,
        FLAT_SHARE=RAS_TOP_P,
        PADDED=padded,
        **_sizes(state, table),
        AHEAD=ahead,
        num_warps=16 if padded > 2048 else 4,
        launch_pdl=ahead,
    )


def sample_code(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    codebook: int,
    columns: Tensor,
    table: Tensor,
    x: Tensor,
    penalised: bool,
) -> None:
    """`sample_code_reference` in one launch. After the last codebook x is left alone."""
    ahead, size = supports_pdl(logits.device), logits.shape[1]
    _sample_code_kernel[(len(logits),)](
        logits,
        slots,
        *_tensors(state),
        columns,
        table,
        x,
        codebook,
        PENALISED=penalised,
        SIZE=size,
        PADDED=next_power_of_two(size),
        **_sizes(state, table),
        AHEAD=ahead,
        num_warps=4,
        launch_pdl=ahead,
    )


def _tensors(state: SamplingState) -> tuple[Tensor, ...]:
    settings = state.temperature, state.top_p, state.top_k, state.penalty, state.whole_window, state.seed
    return *settings, state.frame, state.window, state.last_tokens


def _sizes(state: SamplingState, table: Tensor) -> dict[str, int]:
    length, dim = state.window.shape[-1], table.shape[1]
    return {
        "W": length,
        "PLACES": next_power_of_two(max(length, state.last_tokens.shape[1])),
        "WIDTH": state.last_tokens.shape[1],
        "DIM": dim,
        "STEP": min(1024, next_power_of_two(dim)),
    }
