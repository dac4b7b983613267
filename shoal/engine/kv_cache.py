"""Paged KV cache of the slow transformer, and its host-memory tier."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from shoal.engine.scheduling.blocks import Key
from shoal.errors import InvalidRequest
from shoal.kernels.attention.kv_quant import QMAX, SCALE_DTYPE, KVScales, write_kv
from shoal.kernels.attention.paged_attention import paged_decode_reference, paged_prefill_reference
from shoal.model.config import BlockConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Prefill of one sequence: rows [first, first + count) of the pass; the last has position `end - 1`."""

    first: int
    count: int
    end: int
    table: Tensor  # [blocks]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Layout of one forward pass: prefill segments first, then one token per decoding sequence."""

    where: Tensor  # [tokens] cache location: block * size + offset
    segments: list[PrefillSegment]
    tables: Tensor  # [decodes, blocks]
    lengths: Tensor  # [decodes], including the new token
    recorded: frozenset[int] = frozenset()  # layers whose queries are kept until the next pass


class PagedKV:
    """Keys and values [layers, blocks + 1, size, kv_heads, head_dim] in blocks of `size` tokens.

    `dtype` is the model's, or an 8-bit type with scales.
    """

    def __init__(
        self,
        config: BlockConfig,
        blocks: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        # One extra block for the padding rows of batches of fixed size.
        shape = (config.n_layer, blocks + 1, size, config.n_local_heads, config.head_dim)
        self.keys, self.values = (_zeros(shape, dtype, torch.device(device)) for _ in range(2))
        quantized = dtype in QMAX
        self.key_scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device) if quantized else None
        self.value_scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device) if quantized else None
        self.blocks = self.spare = blocks  # usable blocks; the extra one has this index
        self._pass: AttentionMetadata | None = None
        self.queries: dict[int, Tensor] = {}  # [tokens, heads, d] by recorded layer of the last pass

    @staticmethod
    def bytes_per_block(config: BlockConfig, size: int, dtype: torch.dtype) -> int:
        row = config.head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if dtype in QMAX else 0)
        return 2 * config.n_layer * size * config.n_local_heads * row

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[Tensor]:
        """Return all tensors of the cache, [layers, blocks, ...] each."""
        return [part for part in (self.keys, self.values, self.key_scales, self.value_scales) if part is not None]

    def begin_pass(self, plan: AttentionMetadata) -> None:
        """Set the layout of the next forward pass."""
        self._pass = plan
        self.queries = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [tokens, kv_heads, d] and attend with q [tokens, heads, d] -> [tokens, heads, d]."""
        plan = self._pass
        assert plan is not None, "begin_pass() comes before the forward pass"
        if layer in plan.recorded:
            self.queries[layer] = q
        keys, values = self.keys[layer], self.values[layer]
        scales = self.scales(layer)
        write_kv(keys, scales["key_scales"], plan.where, k)
        write_kv(values, scales["value_scales"], plan.where, v)
        mixed = [
            paged_prefill_reference(q[s.first : s.first + s.count], keys, values, s.table, s.end, **scales)
            for s in plan.segments
        ]
        if len(plan.lengths):
            rows = q[-len(plan.lengths) :]
            mixed.append(paged_decode_reference(rows, keys, values, plan.tables, plan.lengths, **scales))
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]

    def scales(self, layer: int) -> KVScales:
        return {
            "key_scales": None if self.key_scales is None else self.key_scales[layer],
            "value_scales": None if self.value_scales is None else self.value_scales[layer],
        }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU a page takes memory only once it is written: unused parts of the cache cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class HostCache:
    """Evicted blocks in pinned host memory, with LRU replacement.

    Copies need no synchronization: they and all kernels that read or write a block are ordered on one stream.
    """

    def __init__(self, kv: PagedKV, max_bytes: int) -> None:
        self.kv = kv
        self.capacity = max_bytes // max(1, sum(part[:, 0].nbytes for part in kv.parts()))
        pinned = self.capacity > 0 and kv.keys.device.type == "cuda"
        try:
            self._slots = [
                torch.empty((self.capacity, *part[:, 0].shape), dtype=part.dtype, pin_memory=pinned)
                for part in kv.parts()
            ]
        except RuntimeError as error:  # containers may limit pinned memory
            logger.warning("cannot allocate pinned memory; the host KV cache is disabled: %s", error)
            self.capacity, self._slots = 0, []
        self._free = list(range(self.capacity))
        self._by_key: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def save(self, block: int, key: Key) -> None:
        if self.capacity == 0:
            return
        slot = self._slot(key)
        for part, slots in zip(self.kv.parts(), self._slots, strict=True):
            slots[slot].copy_(part[:, block], non_blocking=True)

    def restore(self, key: Key, block: int) -> bool:
        """Copy the block stored under `key` into `block`; False if there is none."""
        if key not in self._by_key:
            return False
        slot = self._slot(key)
        for part, slots in zip(self.kv.parts(), self._slots, strict=True):
            part[:, block].copy_(slots[slot], non_blocking=True)
        return True

    def clear(self) -> int:
        """Drop all blocks and return their number; the pinned memory stays allocated."""
        count = len(self._by_key)
        self._free += self._by_key.values()
        self._by_key.clear()
        return count

    def _slot(self, key: Key) -> int:
        """Return the slot of a key and mark it as used; a new key takes a free slot or the least recently used one."""
        slot = self._by_key.pop(key, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._by_key.popitem(last=False)[1]
        self._by_key[key] = slot
        return slot

    def __len__(self) -> int:
        return len(self._by_key)


def require_kv_backend(name: str, device: torch.device, backend: str) -> None:
    """Raise InvalidRequest for a quantized KV cache on a CPU, unless a backend other than `native` was asked for."""
    if device.type == "cpu" and name != "auto" and backend in ("auto", "native"):
        raise InvalidRequest(
            f"kv_dtype = {name!r} is not supported by the native backend of a CPU, where the cache takes only the "
            "memory that is used: leave it out, or set backend = 'eager', which is several times slower"
        )


def resolve_kv_dtype(name: str, model: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the setting `kv_dtype` (auto, int8 or fp8). Raises InvalidRequest if unsupported here."""
    dtypes = {"auto": model, "int8": torch.int8}
    # The kernels convert fp8 from compute capability 8.9 (Ada) on; a CPU converts in software.
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)):
        dtypes["fp8"] = torch.float8_e4m3fn
    if name not in dtypes:
        raise InvalidRequest(f"kv_dtype = {name!r} is not supported on {device.type}: use {', '.join(dtypes)}")
    return dtypes[name]
