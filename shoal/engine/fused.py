"""One whole frame for n sequences through the fused kernels, with fixed shapes and no word to the host.

The same numbers as `SlowTransformer` and `FrameDecoder`, in the same order of rounding, in about a third of the
launches; this is what a CUDA graph captures. Slots and places that a batch does not use point at spare ones.
"""

import numpy as np
import torch
from torch import Tensor, nn

from shoal.engine.kv import PagedKV
from shoal.engine.slots import SlotStates
from shoal.kernels.fast_attention import fast_attention
from shoal.kernels.linear import linear
from shoal.kernels.paged_attention import paged_decode
from shoal.kernels.qkv import place_qkv
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.sample import sample
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameState, penalised_codes, penalised_mains, penalty_now
from shoal.model.layers import Block
from shoal.model.sampling import MAIN_LANE, RAS_TEMPERATURE, RAS_TOP_P
from shoal.model.slow import Head


class FusedFrame:
    """The frame of one batch size. Inputs are its tensors; `run` reads them and writes `columns`."""

    def __init__(self, model: DualAR, head: Head, kv: PagedKV, slots: SlotStates, rows: int, width: int) -> None:
        self.model, self.head, self.kv, self.states = model, head, kv, slots
        assert isinstance(head.output, nn.Linear), "the fused frame reads plain weights"
        self._head_weight = head.output.weight
        device = model.device
        # One buffer, so that a step costs one copy to the device.
        self._inputs = torch.zeros(rows * (4 + width), dtype=torch.int32, device=device)
        self.slots, self.positions, self.where, self.lengths = self._inputs[: 4 * rows].unflatten(0, (4, rows))
        self.tables = self._inputs[4 * rows :].unflatten(0, (rows, width))
        self.columns = torch.zeros(rows, 1 + model.config.num_codebooks, dtype=torch.long, device=device)
        fast = model.config.fast
        memory = (fast.n_layer, rows, fast.n_local_heads, model.config.num_codebooks, fast.head_dim)
        self._fast_keys = torch.zeros(memory, dtype=model.dtype, device=device)
        self._fast_values = torch.zeros_like(self._fast_keys)

    def fill(self, inputs: np.ndarray) -> None:
        """Slots, positions, places and lengths [4, rows], then tables [rows, width], one behind the other."""
        self._inputs.copy_(torch.from_numpy(inputs), non_blocking=True)

    def run(self) -> None:
        """Compute the newest column of every row, draw the frame after it, and leave both where they are needed."""
        slots = self.slots.long()
        state = self.states.rows(slots, penalised=True)
        hidden = self._slow(self.states.newest[slots])
        columns = self._draw(hidden, state)
        self.states.put(slots, state, columns)
        self.columns.copy_(columns)

    def _slow(self, columns: Tensor) -> Tensor:
        slow, config = self.model.slow, self.model.config.slow
        x = slow.embed(columns)
        for index, block in enumerate(slow.layers):
            assert isinstance(block, Block)
            x = self._slow_block(x, block, index, config.norm_eps)
        return x

    def _slow_block(self, x: Tensor, block: Block, index: int, eps: float) -> Tensor:
        attention = block.attention
        keys, values = self.kv.keys[index], self.kv.values[index]
        qkv = linear(x, attention.wqkv.weight, norm=block.attention_norm.weight, eps=eps)
        q_norm = attention.q_norm.weight if attention.normed else None
        k_norm = attention.k_norm.weight if attention.normed else None
        flat_keys, flat_values, table = keys.flatten(0, 1), values.flatten(0, 1), self.model.slow.table
        q = place_qkv(qkv, q_norm, k_norm, eps, table, self.positions, flat_keys, flat_values, self.where)
        mixed = paged_decode(q, keys, values, self.tables, self.lengths)
        x = linear(mixed.flatten(1), attention.wo.weight, residual=x)
        return _feed_forward(x, block, eps)

    def _draw(self, hidden: Tensor, state: FrameState) -> Tensor:
        model, head = self.model, self.head
        normed = rms_norm(hidden, model.slow.norm.weight, model.config.slow.norm_eps)
        main = head.ids[self._draw_main(linear(normed, self._head_weight), state)]
        codes = self._draw_codes(model.fast_input(hidden, normed), main, state)
        columns = torch.cat((main[:, None], codes), dim=1)
        state.advance(columns)
        return columns

    def _draw_main(self, logits: Tensor, state: FrameState) -> Tensor:
        settings = state.settings
        if self.model.config.family == "s1":
            return self._sample(logits, penalised_mains(state, self.head), state, MAIN_LANE)
        usual = self._sample(logits, None, state, MAIN_LANE)
        flat = torch.full_like(settings.temperature, RAS_TEMPERATURE), torch.full_like(settings.top_p, RAS_TOP_P)
        other = self._sample(logits, None, state, self.model.config.num_codebooks, *flat)
        main = self.head.ids[usual]
        repeated = (state.window[:, 0] == main[:, None]).any(-1) & (main != self.head.stop_id)
        return torch.where(repeated & (state.frame > 0), other, usual)

    def _draw_codes(self, hidden: Tensor, main: Tensor, state: FrameState) -> Tensor:
        config, fast = self.model.config, self.model.fast
        self._fast(fast.project_in(hidden), 0)
        codes = [(main - config.semantic_begin_id).clamp(0, config.codebook_size - 1)]
        weight = fast.output.weight[: config.residual_size]
        for codebook in range(1, config.num_codebooks):
            x = self._fast(fast.embeddings(codes[-1]), codebook)
            logits = linear(x, weight, norm=fast.norm.weight, eps=config.fast.norm_eps)
            columns = penalised_codes(state, codebook, config.residual_size) if config.family == "s1" else None
            codes.append(self._sample(logits, columns, state, codebook))
        return torch.stack(codes, dim=1)

    def _fast(self, x: Tensor, position: int) -> Tensor:
        fast, eps = self.model.fast, self.model.config.fast.norm_eps
        for index, block in enumerate(fast.layers):
            assert isinstance(block, Block)
            qkv = linear(x, block.attention.wqkv.weight, norm=block.attention_norm.weight, eps=eps)
            mixed = fast_attention(qkv, fast.table, position, self._fast_keys[index], self._fast_values[index])
            x = linear(mixed, block.attention.wo.weight, residual=x)
            x = _feed_forward(x, block, eps)
        return x

    def _sample(
        self,
        logits: Tensor,
        columns: Tensor | None,
        state: FrameState,
        lane: int,
        temperature: Tensor | None = None,
        top_p: Tensor | None = None,
    ) -> Tensor:
        settings = state.settings
        nobody = torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device)
        return sample(
            logits,
            nobody if columns is None else columns,
            penalty_now(state),
            settings.temperature if temperature is None else temperature,
            settings.top_p if top_p is None else top_p,
            settings.top_k,
            settings.seed,
            state.frame,
            lane,
        )


def _feed_forward(x: Tensor, block: Block, eps: float) -> Tensor:
    inner = linear(x, block.feed_forward.w13.weight, norm=block.ffn_norm.weight, eps=eps, gated=True)
    return linear(inner, block.feed_forward.w2.weight, residual=x)
