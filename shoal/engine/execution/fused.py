"""Prefill and whole frames through the fused kernels, with fixed shapes and without host synchronization.

Computes the same numbers as `SlowTransformer` and `FrameSampler`, rounded in the same order, with a fraction of the
launches; CUDA graphs capture this. A token is computed the same way in a prefill or a decode and at any batch size, so
recomputing a sequence gives identical bits.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from shoal.engine.execution.few_rows import FewRowsLayers
from shoal.engine.execution.slot_state import SlotStates
from shoal.engine.kv_cache import PagedKV
from shoal.kernels.attention.fast_attention import fast_attention
from shoal.kernels.attention.paged_attention import DecodeWorkspace, paged_decode
from shoal.kernels.attention.prefill_attention import paged_prefill
from shoal.kernels.attention.qkv import rope_and_cache
from shoal.kernels.embed import embed_tokens
from shoal.kernels.int8_rows import Int8Rows, int8_rows
from shoal.kernels.linear.int4_linear import int4_linear, int4_split_k_linear
from shoal.kernels.linear.linear import linear
from shoal.kernels.linear.split_k_linear import split_k_linear
from shoal.kernels.rms_norm import RMSNorm, fused_rms_norm, int8_rms_norm
from shoal.kernels.sampling.sample_token import SemanticIds, sample_code, sample_semantic
from shoal.kernels.word_times.text_attention import Texts
from shoal.model.dual_ar import DualAR
from shoal.model.layers import TransformerBlock
from shoal.model.linear import AnyLinear, has_fused_kernels, row_scales, uses_kernel
from shoal.model.slow import Head

# Up to this many rows products use split-K; larger batches fill the GPU without it.
SPLIT_K_ROWS = 256


class ResidualStream:
    """Residual stream x [n, dim], with the split-K partials of the last layer still to be added.

    Every residual add is followed by a norm, whose kernel reduces the partials, so no separate reduction is launched.
    Layers in `few_rows` have norm, product and residual add in one kernel.
    """

    def __init__(self, x: Tensor, few_rows: FewRowsLayers | None = None) -> None:
        self.x = x
        self._few_rows = few_rows or FewRowsLayers({})
        self._partials: Tensor | None = None
        self._scales: Tensor | None = None
        self._row_scales: Tensor | None = None

    def add(self, inner: Tensor, layer: AnyLinear) -> None:
        """Add layer(inner) to x; the sum may become visible in `x` only after the next norm."""
        if (weights := self._few_rows.find(layer, len(self.x))) is not None:
            weights.add(self.x, inner)
            return
        scales = row_scales(layer)
        if uses_kernel(layer, "grouped"):
            self._partials = int4_split_k_linear(inner, layer.weight, layer.kernel_scales)
            return
        rows = int8_rows(inner) if uses_kernel(layer, "int8_activations") else inner
        if len(self.x) > SPLIT_K_ROWS or inner.shape[1] % 128:
            linear(rows, layer.weight, scales=scales, residual=self.x, out=self.x)
            return
        self._partials, self._scales = split_k_linear(rows, layer.weight), scales
        self._row_scales = rows.scales if isinstance(rows, Int8Rows) else None

    def normed(self, norm: RMSNorm) -> Tensor:
        return fused_rms_norm(self.x, norm.weight, norm.eps, **self._take_partials())

    def project(self, norm: RMSNorm, layer: AnyLinear, *, gated: bool = False, count: int | None = None) -> Tensor:
        """Apply a norm and a layer to x -> [n, out]; with `count` only the layer's first outputs.

        A layer must have the same `count` in every call, because `few_rows` packs only these outputs.
        """
        weights = self._few_rows.find(layer, len(self.x))
        if weights is not None and self._partials is None:
            return weights.project(self.x, norm.weight, norm.eps)
        if uses_kernel(layer, "int8_activations"):
            rows = int8_rms_norm(self.x, norm.weight, norm.eps, **self._take_partials())
            return linear(rows, layer.weight[:count], scales=layer.kernel_scales[:count], gated=gated)
        return project(self.normed(norm), layer, count, gated=gated)

    def _take_partials(self) -> dict[str, Tensor | None]:
        partials = {"partials": self._partials, "scales": self._scales, "row_scales": self._row_scales}
        self._partials = self._scales = self._row_scales = None
        return partials


class FusedTokens(ABC):
    """Slow transformer over `rows` tokens: row i is position positions[i] of slot slots[i]."""

    def __init__(self, model: DualAR, kv: PagedKV, tables: Tensor, rows: int) -> None:
        self.model, self.kv, self.tables = model, kv, tables
        # One tensor, so that a step needs one copy to the device.
        self.inputs = torch.zeros(2, rows, dtype=torch.int32, device=model.device)
        self.slots, self.positions = self.inputs
        self._recorded: frozenset[int] = frozenset()
        self.queries: dict[int, Tensor] = {}  # [rows, heads, head_dim] by recorded layer, until the next run

    def padding(self) -> np.ndarray:
        """Return inputs of padding rows only: position 0 of the spare slot, the last of the block tables."""
        inputs = np.zeros(self.inputs.shape, np.int32)
        inputs[0] = len(self.tables) - 1
        return inputs

    def embed(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Embed the given rows of tokens [any, 1 + codebooks] as [rows, dim]."""
        config, slow = self.model.config, self.model.slow
        tables = slow.embeddings.weight, slow.codebook_embeddings.weight
        span = config.semantic_begin_id, config.semantic_end_id
        return embed_tokens(tokens, rows, *tables, *span, config.scale_codebook_embeddings)

    def project_qkv(self, stream: ResidualStream, layer: int) -> Tensor:
        """Project q, k and v of a layer, write k and v to the KV cache and return q [rows, heads, head_dim]."""
        block, slow = self._block(layer), self.model.slow
        attention, eps = block.attention, self.model.config.slow.norm_eps
        qkv = stream.project(block.attention_norm, attention.wqkv)
        q_norm = attention.q_norm.weight if attention.normed else None
        k_norm = attention.k_norm.weight if attention.normed else None
        memory = self.kv.keys[layer], self.kv.values[layer], self.tables
        scales = self.kv.scales(layer)
        return rope_and_cache(qkv, q_norm, k_norm, eps, slow.rope_table, self.positions, *memory, self.slots, **scales)

    def layer(self, stream: ResidualStream, layer: int) -> None:
        q, block = self.project_qkv(stream, layer), self._block(layer)
        if layer in self._recorded:
            # Also keeps its memory from being reused by later kernels of the same graph.
            self.queries[layer] = q
        stream.add(self.attend(q, layer).flatten(1), block.attention.wo)
        feed_forward(stream, block)

    @abstractmethod
    def attend(self, q: Tensor, layer: int) -> Tensor:
        """Attend with q [rows, heads, head_dim] over the KV cache of a layer."""

    def _block(self, layer: int) -> TransformerBlock:
        block = self.model.slow.layers[layer]
        assert isinstance(block, TransformerBlock)
        return block


class FusedPrefill(FusedTokens):
    """Prefill of known tokens of any sequences: only writes their keys and values."""

    def __init__(self, model: DualAR, kv: PagedKV, tables: Tensor, rows: int) -> None:
        super().__init__(model, kv, tables, rows)
        width = 1 + model.config.num_codebooks
        self.inputs = torch.zeros(2 + width, rows, dtype=torch.int32, device=model.device)
        self.slots, self.positions = self.inputs[0], self.inputs[1]
        self._rows = torch.arange(rows, dtype=torch.int32, device=model.device)

    def attend(self, q: Tensor, layer: int) -> Tensor:
        memory = self.kv.keys[layer], self.kv.values[layer], self.tables
        return paged_prefill(q, *memory, self.slots, self.positions, **self.kv.scales(layer))

    def run(self) -> None:
        stream = ResidualStream(self.embed(self.inputs[2:].T.contiguous(), self._rows))
        last = self.model.config.slow.n_layer - 1
        for layer in range(last):
            self.layer(stream, layer)
        self.project_qkv(stream, last)


class FusedFrame(FusedTokens):
    """Decode step: runs the newest token of every row and samples the next frame, which becomes the newest token."""

    def __init__(
        self,
        model: DualAR,
        head: Head,
        kv: PagedKV,
        states: SlotStates,
        tables: Tensor,
        rows: int,
        recorded: frozenset[int] = frozenset(),
        few_rows: FewRowsLayers | None = None,
    ) -> None:
        """`recorded` are the layers whose queries stay readable after a run."""
        super().__init__(model, kv, tables, rows)
        self._few_rows = few_rows
        self._recorded = recorded
        if recorded:
            # Two more rows: begins and lengths of the texts, which the frame itself does not read.
            self.inputs = torch.zeros(4, rows, dtype=torch.int32, device=model.device)
            self.slots, self.positions, begins, lengths = self.inputs
            self.texts = Texts(self.slots, begins, lengths)
        config, slow, fast = model.config, model.config.slow, model.config.fast
        self._memory, self._rows = states.memory, rows
        self._workspace = DecodeWorkspace.allocate(rows, slow.n_head, slow.n_local_heads, slow.head_dim, model.device)
        self._ids = SemanticIds(head.first, head.count, head.stop_id, config.codebook_size)
        assert has_fused_kernels(head.output), "the fused kernels do not support these weights"
        self._head = head.output
        self.tokens = torch.zeros(rows, 1 + config.num_codebooks, dtype=torch.long, device=model.device)
        # The first two fast positions are known together, so the weights are read once for both.
        self._first_inputs = torch.zeros(2 * rows, fast.dim, dtype=model.dtype, device=model.device)
        shape = (fast.n_layer, rows, fast.n_local_heads, config.num_codebooks, fast.head_dim)
        self._keys, self._values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))

    def attend(self, q: Tensor, layer: int) -> Tensor:
        memory = self.kv.keys[layer], self.kv.values[layer], self.tables
        return paged_decode(q, *memory, self.slots, self.positions, self._workspace, **self.kv.scales(layer))

    def run(self) -> None:
        self._sample_semantic(self.slow())
        stream = self._run_first_positions()
        for codebook in range(1, self.model.config.num_codebooks):
            if codebook > 1:
                self._advance(stream, codebook)
            stream = self._stream(self._sample_code(stream, codebook))

    def slow(self) -> ResidualStream:
        """Run all layers of the slow transformer over the newest tokens; the final norm is not applied."""
        stream = self._stream(self.embed(self._memory.last_tokens, self.slots))
        for layer in range(self.model.config.slow.n_layer):
            self.layer(stream, layer)
        return stream

    def _stream(self, x: Tensor) -> ResidualStream:
        return ResidualStream(x, self._few_rows)

    def _sample_semantic(self, stream: ResidualStream) -> None:
        model, config = self.model, self.model.config
        hidden = stream.normed(model.slow.norm)
        logits = project(hidden, self._head)
        self._first_inputs[: self._rows].copy_(
            model.fast.project_in(hidden if config.norm_fastlayer_input else stream.x)
        )
        table, code = model.fast.embeddings.weight, self._first_inputs[self._rows :]
        sample_semantic(logits, self.slots, self._memory, self._ids, self.tokens, table, code, config.family.uses_ras)

    def _run_first_positions(self) -> ResidualStream:
        """Run fast positions 0 (the slow hidden state) and 1 (the semantic code); return the stream of position 1."""
        stream, rows, last = self._stream(self._first_inputs), self._rows, len(self.model.fast.layers) - 1
        for index, block in self._fast_blocks():
            qkv = stream.project(block.attention_norm, block.attention.wqkv)
            mixed = qkv.new_empty(2 * rows, block.attention.wo.in_features)
            for position, part in enumerate((slice(0, rows), slice(rows, None))):
                self._attend(qkv[part], position, index, mixed[part])
            if index == last:
                stream, mixed = self._stream(stream.x[rows:]), mixed[rows:]  # the output of position 0 is not needed
            stream.add(mixed, block.attention.wo)
            feed_forward(stream, block)
        return stream

    def _advance(self, stream: ResidualStream, position: int) -> None:
        """Run the fast transformer at one position of the frame."""
        for index, block in self._fast_blocks():
            qkv = stream.project(block.attention_norm, block.attention.wqkv)
            stream.add(self._attend(qkv, position, index), block.attention.wo)
            feed_forward(stream, block)

    def _attend(self, qkv: Tensor, position: int, index: int, out: Tensor | None = None) -> Tensor:
        return fast_attention(qkv, self.model.fast.rope_table, position, self._keys[index], self._values[index], out)

    def _sample_code(self, stream: ResidualStream, codebook: int) -> Tensor:
        """Sample a code and return its embedding, the input of the next position."""
        fast, config = self.model.fast, self.model.config
        logits = stream.project(fast.norm, fast.output, count=config.residual_size)
        following = torch.empty_like(stream.x)
        table, penalised = fast.embeddings.weight, config.family.uses_penalty
        sample_code(logits, self.slots, self._memory, codebook, self.tokens, table, following, penalised)
        return following

    def _fast_blocks(self) -> list[tuple[int, TransformerBlock]]:
        return [
            (index, block) for index, block in enumerate(self.model.fast.layers) if isinstance(block, TransformerBlock)
        ]


def project(x: Tensor, layer: AnyLinear, count: int | None = None, *, gated: bool = False) -> Tensor:
    """Apply a layer, float or quantized, that has fused kernels; with `count` only its first output channels."""
    if uses_kernel(layer, "grouped"):
        return int4_linear(x, layer.weight[:count], layer.kernel_scales, gated=gated)
    scales = row_scales(layer)
    rows = int8_rows(x) if uses_kernel(layer, "int8_activations") else x
    return linear(rows, layer.weight[:count], scales=None if scales is None else scales[:count], gated=gated)


def feed_forward(stream: ResidualStream, block: TransformerBlock) -> None:
    inner = stream.project(block.ffn_norm, block.feed_forward.w13, gated=True)
    stream.add(inner, block.feed_forward.w2)
