"""The DualAR model and its state as structures of the native library, and one step over them."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from shoal.kernels.sample_token import SamplingState
from shoal.model.config import BlockConfig
from shoal.model.dual_ar import DualAR
from shoal.model.layers import TransformerBlock, TransformerStack
from shoal.model.slow import Head
from shoal.native.library import Context, Matrix, NativeUnavailable, Tensors

OUT_OF_RANGE = 1


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("wqkv", "wo", "w13", "w2")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm")),
    ]


_STACK_SIZES = ("layers", "dim", "heads", "kv_heads", "head_dim", "intermediate", "positions")


class _Stack(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.POINTER(_Block)),
        ("norm", ctypes.c_void_p),
        ("rope", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in _STACK_SIZES),
        ("eps", ctypes.c_float),
    ]


_MODEL_SIZES = (
    "vocab_size", "codebook_size", "codebooks", "semantic_begin", "semantic_count", "stop_id", "window",
    "scale_codebook_embeddings", "norm_fast_input", "uses_ras",
)  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("slow", _Stack),
        ("fast", _Stack),
        *((name, Matrix) for name in ("head", "project_in", "output")),
        *((name, ctypes.c_void_p) for name in ("embeddings", "codebook_embeddings", "fast_embeddings")),
        *((name, ctypes.c_int32) for name in _MODEL_SIZES),
    ]


_STATE_TENSORS = {
    "temperature": torch.float32,
    "top_p": torch.float32,
    "top_k": torch.int64,
    "penalty": torch.float32,
    "whole_window": torch.bool,
    "seed": torch.int64,
    "frame": torch.int64,
    "window": torch.int64,
    "last_tokens": torch.int64,
}


class _State(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "tables", *_STATE_TENSORS)),
        ("layer_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("block_size", "table_width", "slots", "blocks")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "slots", "positions", "sampled", "out")),
        ("rows", ctypes.c_int32),
        ("samples", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("heads", "text_samples", "text_begins", "text_lengths", "weights")),
        *((name, ctypes.c_int32) for name in ("head_count", "texts", "text_width")),
    ]


@dataclass(frozen=True, slots=True)
class TextReading:
    """Texts whose attention weights a step writes to `weights`; all arrays are contiguous."""

    heads: np.ndarray  # int32 [heads, 2]: layer and head
    samples: np.ndarray  # int32 [texts]: index of the sampled row
    begins: np.ndarray  # int32 [texts]: position of the first token
    lengths: np.ndarray  # int32 [texts]
    weights: np.ndarray  # float32 [texts, heads, width]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one step; all arrays are contiguous."""

    tokens: np.ndarray  # int64 [rows, 1 + codebooks]
    slots: np.ndarray  # int32 [rows]
    positions: np.ndarray  # int32 [rows]
    sampled: np.ndarray  # int32 [samples]: rows after which a frame is sampled


class NativeDualAR:
    """Packed weights of a model. Only fp32 on a CPU, with float or int8 weights."""

    def __init__(self, model: DualAR, head: Head, context: Context) -> None:
        """Raises NativeUnavailable for a dtype, a device or a weight layout that the library does not support."""
        if model.device.type != "cpu" or model.dtype != torch.float32:
            raise NativeUnavailable(f"the model is {model.dtype} on {model.device.type}: float32 on cpu is supported")
        if head.full_vocab:
            raise NativeUnavailable("sampling from the whole vocabulary is not supported")
        self.context, self.width = context, 1 + model.config.num_codebooks
        self._tensors = Tensors()
        self._model = self._pack(model, head)

    @property
    def nbytes(self) -> int:
        return self._tensors.nbytes

    def step(self, state: "NativeState", rows: StepRows, reading: TextReading | None = None) -> np.ndarray:
        """Run all rows and return the sampled tokens [samples, 1 + codebooks] (int64); updates the state.

        With `reading` also writes its weights. Raises RuntimeError for tokens out of range or when memory runs out.
        """
        out = np.empty((len(rows.sampled), self.width), np.int64)
        arrays = (rows.tokens, rows.slots, rows.positions, rows.sampled, out)
        texts = () if reading is None else self._reading(reading)
        step = _Step(*(array.ctypes.data for array in arrays), len(rows.slots), len(rows.sampled), *texts)
        library = self.context.library
        status = library.shoal_step(
            self.context.handle, ctypes.byref(self._model), ctypes.byref(state.structure), ctypes.byref(step)
        )
        if status:
            problem = "a token or position is out of range" if status == OUT_OF_RANGE else "out of memory"
            raise RuntimeError(f"the native step failed: {problem}")
        return out

    def _reading(self, reading: TextReading) -> tuple[int, ...]:
        arrays = (reading.heads, reading.samples, reading.begins, reading.lengths, reading.weights)
        return (*(array.ctypes.data for array in arrays), *(len(reading.heads), *reading.weights.shape[::2]))

    def _pack(self, model: DualAR, head: Head) -> _Model:
        tensors, config, fast = self._tensors, model.config, model.fast
        project_in = tensors.linear(fast.project_in) if config.slow.dim != config.fast.dim else Matrix()
        tables = (model.slow.embeddings, model.slow.codebook_embeddings, fast.embeddings)
        return _Model(
            self._stack(model.slow, config.slow),
            self._stack(fast, config.fast),
            tensors.linear(head.output),
            project_in,
            tensors.linear(fast.output, rows=config.residual_size),
            *(tensors.address(table.weight) for table in tables),
            config.vocab_size,
            config.codebook_size,
            config.num_codebooks,
            head.first,
            head.count,
            head.stop_id,
            config.family.repetition_window,
            config.scale_codebook_embeddings,
            config.norm_fastlayer_input,
            config.family.uses_ras,
        )

    def _stack(self, stack: TransformerStack, config: BlockConfig) -> _Stack:
        blocks = (_Block * config.n_layer)(*(self._block(block) for block in stack.layers))
        sizes = (config.n_layer, config.dim, config.n_head, config.n_local_heads, config.head_dim)
        norm, rope = self._tensors.address(stack.norm.weight), self._tensors.address(stack.rope_table)
        return _Stack(blocks, norm, rope, *sizes, config.intermediate_size, len(stack.rope_table), config.norm_eps)

    def _block(self, block: torch.nn.Module) -> _Block:
        assert isinstance(block, TransformerBlock)
        tensors, attention, forward = self._tensors, block.attention, block.feed_forward
        matrices = (tensors.linear(each) for each in (attention.wqkv, attention.wo, forward.w13, forward.w2))
        norms = [block.attention_norm, block.ffn_norm]
        norms += [attention.q_norm, attention.k_norm] if attention.normed else []
        addresses = [tensors.address(norm.weight) for norm in norms]
        return _Block(*matrices, *addresses)


class NativeState:
    """Addresses of the KV cache [layers, blocks, size, kv_heads, d], block tables and per-slot sampling state.

    The tensors are shared with the other backends, which have to keep them in place.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tables: np.ndarray, state: SamplingState) -> None:
        """Raises NativeUnavailable for a KV cache that is not fp32."""
        if keys.dtype != torch.float32:
            raise NativeUnavailable(f"the KV cache is {keys.dtype}: float32 is supported")
        assert tables.dtype == np.int32
        tensors = [getattr(state, name) for name in _STATE_TENSORS]
        self._kept = (keys, values, tables, tensors)
        for tensor, dtype in zip(tensors, _STATE_TENSORS.values(), strict=True):
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
        addresses = (keys.data_ptr(), values.data_ptr(), tables.ctypes.data, *(each.data_ptr() for each in tensors))
        self.structure = _State(*addresses, keys.stride(0), keys.shape[2], tables.shape[1], len(tables), keys.shape[1])
