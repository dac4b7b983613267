"""The DualAR model and its state as structures of the native library, and one step over them."""

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.kernels.rope_values import rope_values
from shoal.model.arrays import ModelArrays
from shoal.model.config import BlockConfig
from shoal.native.library import Arrays, Context, Matrix, find_weight

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


_SLOT_ARRAYS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,
    "penalty": np.float32,
    "whole_window": np.bool_,
    "seed": np.int64,
    "frame": np.int64,
    "window": np.int64,
    "last_tokens": np.int64,
}


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Sampling state of every slot, [slots] each unless noted; see `SamplingState`."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    penalty: NDArray[np.float32]
    whole_window: NDArray[np.bool_]
    seed: NDArray[np.int64]
    frame: NDArray[np.int64]
    window: NDArray[np.int64]  # [slots, 1 + codebooks, W]
    last_tokens: NDArray[np.int64]  # [slots, 1 + codebooks]

    @classmethod
    def zeros(cls, slots: int, width: int, window: int) -> "SlotArrays":
        """Return the arrays of `slots` slots, for tokens [width] and a window of that many frames."""
        shapes = {"window": (slots, width, window), "last_tokens": (slots, width)}
        return cls(*(np.zeros(shapes.get(name, (slots,)), dtype) for name, dtype in _SLOT_ARRAYS.items()))


class _State(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "tables", *_SLOT_ARRAYS)),
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
class TextAttention:
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

    def __init__(self, model: ModelArrays, context: Context) -> None:
        """Pack the weights. Raises CheckpointError for weights that are missing or have another shape."""
        self.context, self.width = context, 1 + model.config.num_codebooks
        self._arrays = Arrays()
        self._model = self._pack(model)

    @property
    def nbytes(self) -> int:
        return self._arrays.nbytes

    def step(self, state: "NativeState", rows: StepRows, attention: TextAttention | None = None) -> np.ndarray:
        """Run all rows, update the state and return the sampled tokens [samples, 1 + codebooks] (int64).

        With `attention`, also write its weights. Raises RuntimeError for tokens out of range or if memory runs out.
        """
        out = np.empty((len(rows.sampled), self.width), np.int64)
        arrays = (rows.tokens, rows.slots, rows.positions, rows.sampled, out)
        texts = () if attention is None else self._attention_fields(attention)
        step = _Step(*(array.ctypes.data for array in arrays), len(rows.slots), len(rows.sampled), *texts)
        library = self.context.library
        status = library.shoal_step(
            self.context.handle, ctypes.byref(self._model), ctypes.byref(state.structure), ctypes.byref(step)
        )
        if status:
            problem = "a token or position is out of range" if status == OUT_OF_RANGE else "out of memory"
            raise RuntimeError(f"the native step failed: {problem}")
        return out

    def _attention_fields(self, attention: TextAttention) -> tuple[int, ...]:
        arrays = (attention.heads, attention.samples, attention.begins, attention.lengths, attention.weights)
        return (*(array.ctypes.data for array in arrays), *(len(attention.heads), *attention.weights.shape[::2]))

    def _pack(self, model: ModelArrays) -> _Model:
        arrays, config, weights = self._arrays, model.config, model.weights
        slow, fast, codes = config.slow.dim, config.fast.dim, config.codebook_size
        semantic = config.semantic_end_id - config.semantic_begin_id + 1
        tables = {
            "slow.embeddings.weight": (config.vocab_size, slow),
            "slow.codebook_embeddings.weight": (config.num_codebooks * codes, slow),
            "fast.embeddings.weight": (codes, fast),
        }
        return _Model(
            self._stack(model, "slow", config.slow),
            self._stack(model, "fast", config.fast),
            arrays.linear(weights, "head", (semantic + 1, slow)),
            arrays.linear(weights, "fast.project_in", (fast, slow)) if slow != fast else Matrix(),
            arrays.linear(weights, "fast.output", (codes, fast), rows=config.residual_size),
            *(arrays.address(find_weight(weights, name, shape)) for name, shape in tables.items()),
            config.vocab_size,
            codes,
            config.num_codebooks,
            config.semantic_begin_id,
            semantic,
            config.stop_id,
            config.family.repetition_window,
            config.scale_codebook_embeddings,
            config.norm_fastlayer_input,
            config.family.uses_ras,
        )

    def _stack(self, model: ModelArrays, name: str, config: BlockConfig) -> _Stack:
        layers = (self._block(model, f"{name}.layers.{index}", config) for index in range(config.n_layer))
        blocks = (_Block * config.n_layer)(*layers)
        sizes = (config.n_layer, config.dim, config.n_head, config.n_local_heads, config.head_dim)
        norm = self._arrays.address(find_weight(model.weights, f"{name}.norm.weight", (config.dim,)))
        rope = self._arrays.address(rope_values(config.max_seq_len, config.head_dim, config.rope_base))
        return _Stack(blocks, norm, rope, *sizes, config.intermediate_size, config.max_seq_len, config.norm_eps)

    def _block(self, model: ModelArrays, name: str, config: BlockConfig) -> _Block:
        dim, wide = config.dim, config.intermediate_size
        shapes = {
            "attention.wqkv": (config.qkv_rows, dim),
            "attention.wo": (dim, config.n_head * config.head_dim),
            "feed_forward.w13": (2 * wide, dim),
            "feed_forward.w2": (dim, wide),
        }
        norms = {"attention_norm": dim, "ffn_norm": dim}
        if config.attention_qk_norm:
            norms |= {"attention.q_norm": config.head_dim, "attention.k_norm": config.head_dim}
        weights, arrays = model.weights, self._arrays
        return _Block(
            *(arrays.linear(weights, f"{name}.{layer}", shape) for layer, shape in shapes.items()),
            *(arrays.address(find_weight(weights, f"{name}.{norm}.weight", (size,))) for norm, size in norms.items()),
        )


class NativeState:
    """Addresses of the KV cache [layers, blocks, size, kv_heads, d], block tables and per-slot sampling state.

    The memory may be shared with other backends, which have to keep it in place.
    """

    def __init__(
        self,
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        tables: NDArray[np.int32],
        slots: SlotArrays,
    ) -> None:
        assert tables.dtype == np.int32
        arrays = [getattr(slots, name) for name in _SLOT_ARRAYS]
        self._kept = (keys, values, tables, slots)
        for array, dtype in zip(arrays, _SLOT_ARRAYS.values(), strict=True):
            assert array.dtype == dtype
            assert array.flags.c_contiguous
        addresses = (each.ctypes.data for each in (keys, values, tables, *arrays))
        stride = keys.strides[0] // keys.itemsize
        self.structure = _State(*addresses, stride, keys.shape[2], tables.shape[1], len(tables), keys.shape[1])
