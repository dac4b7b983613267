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
from shoal.kernels.sampling.sample import (
    apply_repetition_penalty,
    penalize,
    penalize_in_place,
    sample_reference,
    sample_row,
)

# Repetition-aware sampling (RAS) of S2: a repeated semantic token is sampled again with these settings.
RAS_TEMPERATURE, RAS_TOP_P = 1.0, 0.9
# Noise lanes of a frame: 0 for the semantic token, the codebook index for a residual code, and 1 + the last codebook
# index for the second semantic draw of S2.
SEMANTIC_LANE = 0


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Per-slot sampling settings, frame counter, repetition window and last token; first dimension: slots."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    penalty: Tensor
    whole_window: Tensor
    seed: Tensor
    frame: Tensor  # frames sampled so far
    window: Tensor  # [slots, 1 + codebooks, W], filled from the left, then sliding; the first frame is not in it
    last_tokens: Tensor  # [slots, 1 + codebooks]


@dataclass(frozen=True, slots=True)
class SemanticIds:
    """Vocabulary ids of the semantic head's outputs: `count` codes starting at `first`, then the stop token."""

    first: int
    count: int
    stop: int
    codebook_size: int  # entries of the first codebook


def sample_semantic_reference(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    ids: SemanticIds,
    tokens: Tensor,
    table: Tensor,
    x: Tensor,
    s2: bool,
) -> None:
    """Sample the semantic tokens of slots [n] from logits [n, count + 1].

    Writes tokens[:, :2] and the embeddings x [n, dim] from table [codes, dim], and updates `state`.
    """
    slots, size = slots.long(), ids.count + 1
    window, frame = state.window[slots], state.frame[slots]
    if s2:
        first = _sample(logits, slots, state, None, SEMANTIC_LANE)
        temperature, top_p = (torch.full_like(state.top_p, each) for each in (RAS_TEMPERATURE, RAS_TOP_P))
        ras = replace(state, temperature=temperature, top_p=top_p)
        second = _sample(logits, slots, ras, None, state.last_tokens.shape[1] - 1)
        repeated = (window[:, 0] == (first + ids.first)[:, None]).any(-1) & (first < ids.count) & (frame > 0)
        index = torch.where(repeated, second, first)
    else:
        # The released code indexes the wrong axis: it takes all entries of the oldest token in the window as ids.
        whole = state.whole_window[slots][:, None]
        filled = torch.arange(window.shape[-1], device=frame.device) < (frame - 1)[:, None]
        oldest, recent = (_head_index(each, ids) for each in (window[:, :, 0], window[:, 0]))
        penalized = torch.cat((torch.where(whole, size, oldest), torch.where(whole & filled, recent, size)), dim=1)
        index = _sample(logits, slots, state, penalized, SEMANTIC_LANE)
    semantic = torch.where(index < ids.count, index + ids.first, ids.stop)
    code = (semantic - ids.first).clamp(0, ids.codebook_size - 1)
    _update_state(slots, state, 0, semantic)
    _update_state(slots, state, 1, code)
    tokens[:, 0], tokens[:, 1] = semantic, code
    x.copy_(F.embedding(code, table))


def sample_code_reference(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    codebook: int,
    tokens: Tensor,
    table: Tensor,
    x: Tensor,
    penalized: bool,
) -> None:
    """Sample the codes of one residual codebook from logits [n, size].

    Writes tokens[:, 1 + codebook] and the embeddings x; the last codebook advances the frame counter.
    """
    slots, size = slots.long(), logits.shape[1]
    window, frame = state.window[slots, 1 + codebook], state.frame[slots]
    filled = torch.arange(window.shape[-1], device=frame.device) < (frame - 1)[:, None]
    recent = torch.where(state.whole_window[slots][:, None] & ~filled, size, window) if penalized else None
    code = _sample(logits, slots, state, recent, codebook)
    _update_state(slots, state, 1 + codebook, code)
    tokens[:, 1 + codebook] = code
    x.copy_(F.embedding(code, table))
    if codebook == tokens.shape[1] - 2:
        state.frame[slots] += 1


def _sample(logits: Tensor, slots: Tensor, state: SamplingState, penalized: Tensor | None, lane: int) -> Tensor:
    frame = state.frame[slots]
    if penalized is not None:
        # The first frame directly follows the prompt and is never penalized.
        logits = apply_repetition_penalty(logits, penalized, torch.where(frame > 0, state.penalty[slots], 1.0))
    none = torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device)
    penalty, seed = state.penalty[slots], state.seed[slots]
    limits = state.temperature[slots], state.top_p[slots], state.top_k[slots]
    return sample_reference(logits, none, penalty, *limits, seed, frame, lane)


def _head_index(token_id: Tensor, ids: SemanticIds) -> Tensor:
    """Return the head's output index of vocabulary ids; count + 1 for ids the head does not have."""
    code = token_id - ids.first
    index = torch.where((code >= 0) & (code < ids.count), code, ids.count + 1)
    return torch.where(token_id == ids.stop, ids.count, index)


def _update_state(slots: Tensor, state: SamplingState, entry: int, value: Tensor) -> None:
    window, frame, length = state.window[slots, entry], state.frame[slots], state.window.shape[-1]
    shifted = torch.where((frame > length)[:, None], window.roll(-1, dims=-1), window)
    newest = torch.arange(length, device=frame.device) == (frame - 1).clamp_max(length - 1)[:, None]
    state.window[slots, entry] = torch.where(newest, value[:, None], shifted)
    state.last_tokens[slots, entry] = value


@jit
def _load_window(window, slot, ENTRY, WINDOW: tl.constexpr, TOKEN_WIDTH: tl.constexpr, PADDED_WINDOW: tl.constexpr):
    """Load the window of one entry of the token, and the same window shifted left by one."""
    index = tl.arange(0, PADDED_WINDOW)
    source = window + (slot * TOKEN_WIDTH + ENTRY) * WINDOW + index
    return tl.load(source, mask=index < WINDOW, other=-1), tl.load(source + 1, mask=index + 1 < WINDOW, other=-1)


@jit
def _store_entry(
    window,
    last_tokens,
    tokens,
    slot,
    row,
    frame,
    value,
    recent,
    recent_shifted,
    ENTRY,
    WINDOW: tl.constexpr,
    TOKEN_WIDTH: tl.constexpr,
    PADDED_WINDOW: tl.constexpr,
):
    """Write one entry of the token: to the frame's tokens, the slot's last token and the slot's window."""
    index = tl.arange(0, PADDED_WINDOW)
    # Frame 1 goes to index 0; from frame WINDOW + 1 on the window slides and the newest entry goes last.
    shifted = tl.where(frame > WINDOW, recent_shifted, recent)
    newest = index == tl.minimum(frame - 1, WINDOW - 1)
    tl.debug_barrier()
    source = window + (slot * TOKEN_WIDTH + ENTRY) * WINDOW + index
    tl.store(source, tl.where(newest, value, shifted), mask=index < WINDOW)
    tl.store(last_tokens + slot * TOKEN_WIDTH + ENTRY, value)
    tl.store(tokens + row * TOKEN_WIDTH + ENTRY, value)


@jit
def _embed_code(table, x, row, code, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    for start in range(0, DIM, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
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
    tokens,
    table,
    x,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    STOP: tl.constexpr,
    CODEBOOK_SIZE: tl.constexpr,
    S2: tl.constexpr,
    LANE: tl.constexpr,
    RAS_TEMPERATURE: tl.constexpr,
    RAS_TOP_P: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED_WINDOW: tl.constexpr,
    TOKEN_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    # Settings come from the host and the window from the previous frame: neither needs the grid dependency wait.
    slot = tl.load(slots + row).to(tl.int64)
    frame_index = tl.load(frame + slot)
    index = tl.arange(0, PADDED)
    mask = index < COUNT + 1
    row_top_k, row_seed = tl.load(top_k + slot), tl.load(seed + slot)
    row_temperature, row_top_p = tl.load(temperature + slot), tl.load(top_p + slot)
    recent, recent_shifted = _load_window(window, slot, 0, WINDOW, TOKEN_WIDTH, PADDED_WINDOW)
    codes, codes_shifted = _load_window(window, slot, 1, WINDOW, TOKEN_WIDTH, PADDED_WINDOW)
    entry = tl.arange(0, PADDED_WINDOW)
    oldest = tl.load(window + (slot * TOKEN_WIDTH + entry) * WINDOW, mask=entry < TOKEN_WIDTH, other=-1)
    whole = tl.load(whole_window + slot) != 0
    row_penalty = tl.where(frame_index > 0, tl.load(penalty + slot), 1.0)
    if PDL:
        launch_dependents_and_wait()
    logits += row * (COUNT + 1)
    if not S2:
        in_window = _is_head_id(recent, FIRST, COUNT, STOP) & whole & (entry < frame_index - 1)
        in_oldest = _is_head_id(oldest, FIRST, COUNT, STOP) & (whole == 0)
        token_id = tl.where(whole, recent, oldest)
        penalized = tl.where(token_id == STOP, COUNT, token_id - FIRST)
        penalize_in_place(logits, penalized, in_window | in_oldest, row_penalty)
    value = tl.load(logits + index, mask=mask, other=float("-inf"))
    choice = sample_row(value, COUNT + 1, index, row_temperature, row_top_p, row_top_k, row_seed, frame_index, LANE)
    if S2:
        repeated = tl.sum((recent == choice + FIRST).to(tl.int32), axis=0) > 0
        if repeated & (choice < COUNT) & (frame_index > 0):
            choice = sample_row(
                value, COUNT + 1, index, RAS_TEMPERATURE, RAS_TOP_P, row_top_k, row_seed, frame_index, TOKEN_WIDTH - 1
            )
    semantic = tl.where(choice < COUNT, choice + FIRST, STOP)
    code = tl.minimum(tl.maximum(semantic - FIRST, 0), CODEBOOK_SIZE - 1)
    _store_entry(
        window,
        last_tokens,
        tokens,
        slot,
        row,
        frame_index,
        semantic,
        recent,
        recent_shifted,
        0,
        WINDOW,
        TOKEN_WIDTH,
        PADDED_WINDOW,
    )
    _store_entry(
        window,
        last_tokens,
        tokens,
        slot,
        row,
        frame_index,
        code,
        codes,
        codes_shifted,
        1,
        WINDOW,
        TOKEN_WIDTH,
        PADDED_WINDOW,
    )
    _embed_code(table, x, row, code, DIM, BLOCK_D)


@jit
def _is_head_id(token_id, FIRST: tl.constexpr, COUNT: tl.constexpr, STOP: tl.constexpr):
    """Return whether the semantic head has an output for the vocabulary id."""
    return ((token_id >= FIRST) & (token_id < FIRST + COUNT)) | (token_id == STOP)


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
    tokens,
    table,
    x,
    codebook,
    PENALIZED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED_WINDOW: tl.constexpr,
    TOKEN_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    frame_index = tl.load(frame + slot)
    index = tl.arange(0, PADDED)
    mask = index < SIZE
    row_top_k, row_seed = tl.load(top_k + slot), tl.load(seed + slot)
    row_temperature, row_top_p = tl.load(temperature + slot), tl.load(top_p + slot)
    recent, recent_shifted = _load_window(window, slot, 1 + codebook, WINDOW, TOKEN_WIDTH, PADDED_WINDOW)
    window_ptrs, penalized = window + (slot * TOKEN_WIDTH + 1 + codebook) * WINDOW, index < 0
    whole = tl.load(whole_window + slot) != 0
    row_penalty = tl.where(frame_index > 0, tl.load(penalty + slot), 1.0)
    if PENALIZED:
        for entry in tl.static_range(WINDOW):
            # The released window counts its empty entries as code 0.
            penalized |= (index == tl.load(window_ptrs + entry).to(tl.int32)) & (
                (whole == 0) | (entry < frame_index - 1)
            )
    if PDL:
        launch_dependents_and_wait()
    value = tl.load(logits + row * SIZE + index, mask=mask, other=float("-inf"))
    if PENALIZED:
        value = penalize(value, penalized, row_penalty)
    code = sample_row(value, SIZE, index, row_temperature, row_top_p, row_top_k, row_seed, frame_index, codebook)
    _store_entry(
        window,
        last_tokens,
        tokens,
        slot,
        row,
        frame_index,
        code,
        recent,
        recent_shifted,
        1 + codebook,
        WINDOW,
        TOKEN_WIDTH,
        PADDED_WINDOW,
    )
    if codebook == TOKEN_WIDTH - 2:
        tl.store(frame + slot, frame_index + 1)
    else:
        _embed_code(table, x, row, code, DIM, BLOCK_D)


def sample_semantic(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    ids: SemanticIds,
    tokens: Tensor,
    table: Tensor,
    x: Tensor,
    s2: bool,
) -> None:
    """Compute `sample_semantic_reference` in one launch. Overwrites the logits."""
    pdl, padded = supports_pdl(logits.device), next_power_of_two(ids.count + 1)
    _sample_semantic_kernel[(len(logits),)](
        logits,
        slots,
        *_tensors(state),
        tokens,
        table,
        x,
        FIRST=ids.first,
        COUNT=ids.count,
        STOP=ids.stop,
        CODEBOOK_SIZE=ids.codebook_size,
        S2=s2,
        LANE=SEMANTIC_LANE,
        RAS_TEMPERATURE=RAS_TEMPERATURE,
        RAS_TOP_P=RAS_TOP_P,
        PADDED=padded,
        **_sizes(state, table),
        PDL=pdl,
        num_warps=16 if padded > 2048 else 4,
        launch_pdl=pdl,
    )


def sample_code(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    codebook: int,
    tokens: Tensor,
    table: Tensor,
    x: Tensor,
    penalized: bool,
) -> None:
    """Compute `sample_code_reference` in one launch. The last codebook does not write x."""
    pdl, size = supports_pdl(logits.device), logits.shape[1]
    _sample_code_kernel[(len(logits),)](
        logits,
        slots,
        *_tensors(state),
        tokens,
        table,
        x,
        codebook,
        PENALIZED=penalized,
        SIZE=size,
        PADDED=next_power_of_two(size),
        **_sizes(state, table),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _tensors(state: SamplingState) -> tuple[Tensor, ...]:
    settings = state.temperature, state.top_p, state.top_k, state.penalty, state.whole_window, state.seed
    return *settings, state.frame, state.window, state.last_tokens


def _sizes(state: SamplingState, table: Tensor) -> dict[str, int]:
    length, dim = state.window.shape[-1], table.shape[1]
    return {
        "WINDOW": length,
        "PADDED_WINDOW": next_power_of_two(max(length, state.last_tokens.shape[1])),
        "TOKEN_WIDTH": state.last_tokens.shape[1],
        "DIM": dim,
        "BLOCK_D": min(1024, next_power_of_two(dim)),
    }
