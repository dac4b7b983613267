"""The memory behind the block pool, as the cache that the slow transformer writes to and attends over."""

import logging
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.blocks import Key
from shoal.errors import InvalidRequest
from shoal.kernels.kv_quant import QMAX, SCALE_DTYPE, KVScales, write_kv
from shoal.kernels.paged_attention import paged_decode_reference, paged_prefill_reference
from shoal.model.config import BlockConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Tokens of one sequence's prefill: rows [first, first + count) of the pass, ending at token `end`."""

    first: int
    count: int
    end: int
    table: Tensor  # [blocks]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which token belongs where. Prefill segments come first, then one token per decoding sequence."""

    where: Tensor  # [tokens] place in memory: block * size + offset
    segments: list[PrefillSegment]
    tables: Tensor  # [decodes, blocks]
    lengths: Tensor  # [decodes], the new token included


class PagedKV:
    """`dtype` is the type that keys and values are kept in: that of the model, or a byte with scales beside it."""

    def __init__(
        self,
        config: BlockConfig,
        blocks: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        # One block more than can be handed out, for rows that only fill up a batch of fixed size.
        shape = (config.n_layer, blocks + 1, size, config.n_local_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        quantised = dtype in QMAX
        self.key_scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device) if quantised else None
        self.value_scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device) if quantised else None
        self.blocks = self.spare = blocks
        self._pass: AttentionMetadata | None = None

    @staticmethod
    def bytes_per_block(config: BlockConfig, size: int, dtype: torch.dtype) -> int:
        row = config.head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if dtype in QMAX else 0)
        return 2 * config.n_layer * size * config.n_local_heads * row

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[Tensor]:
        """Everything a block is made of: [layers, blocks, ...] each."""
        return [part for part in (self.keys, self.values, self.key_scales, self.value_scales) if part is not None]

    def begin_pass(self, plan: AttentionMetadata) -> None:
        """The tokens of the next forward pass."""
        self._pass = plan

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self._pass
        assert plan is not None, "open() comes before the forward pass"
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


class HostCache:
    """Blocks that had to leave the device, kept in host memory until room is needed; least recently used go first.

    Nobody waits for a copy: all of them, and whatever reads or overwrites a block, are in order on one stream.
    """

    def __init__(self, kv: PagedKV, most_bytes: int) -> None:
        self.kv = kv
        self.most = most_bytes // max(1, sum(part[:, 0].nbytes for part in kv.parts()))
        pinned = self.most > 0 and kv.keys.device.type == "cuda"
        try:
            self._places = [
                torch.empty((self.most, *part[:, 0].shape), dtype=part.dtype, pin_memory=pinned) for part in kv.parts()
            ]
        except RuntimeError as problem:  # a container may not let anybody have memory that stays where it is
            logger.warning("no host memory for keys and values that leave the device, so none are kept: %s", problem)
            self.most, self._places = 0, []
        self._free = list(range(self.most))
        self._kept: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def save(self, block: int, key: Key) -> None:
        if self.most == 0:
            return
        place = self._place(key)
        for part, places in zip(self.kv.parts(), self._places, strict=True):
            places[place].copy_(part[:, block], non_blocking=True)

    def restore(self, key: Key, block: int) -> bool:
        """Copy what is kept under `key` into `block`; False if nothing is."""
        if key not in self._kept:
            return False
        place = self._place(key)
        for part, places in zip(self.kv.parts(), self._places, strict=True):
            part[:, block].copy_(places[place], non_blocking=True)
        return True

    def _place(self, key: Key) -> int:
        """Where a key has its place; a new one takes that of the least recently used if there is no other."""
        place = self._kept.pop(key, None)
        if place is None:
            place = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        self._kept[key] = place
        return place

    def __len__(self) -> int:
        return len(self._kept)


def resolve_kv_dtype(name: str, model: torch.dtype, device: torch.device) -> torch.dtype:
    """A setting: auto, int8 or fp8. Raises InvalidRequest, with what there is, for what a device cannot do."""
    kinds = {"auto": model, "int8": torch.int8}
    # The kernels convert fp8 on Ada, Hopper and later; a CPU does it in software.
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        kinds["fp8"] = torch.float8_e4m3fn
    if name not in kinds:
        raise InvalidRequest(f"kv_dtype = {name!r} cannot be used on {device.type}; here it can be {', '.join(kinds)}")
    return kinds[name]
