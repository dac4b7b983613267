"""The memory behind the block pool, as the cache that the slow transformer writes to and attends over."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.blocks import Key
from shoal.kernels.paged_attention import paged_decode_reference, paged_prefill_reference
from shoal.model.config import BlockConfig


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence's prefill: rows [first, first + count) of the pass, ending at column `end`."""

    first: int
    count: int
    end: int
    table: Tensor  # [blocks]


@dataclass(frozen=True, slots=True)
class Pass:
    """Which token belongs where. Prefill segments come first, then one token per decoding sequence."""

    where: Tensor  # [tokens] place in memory: block * size + offset
    segments: list[Segment]
    tables: Tensor  # [decodes, blocks]
    lengths: Tensor  # [decodes], the new token included


class PagedKV:
    def __init__(
        self, config: BlockConfig, blocks: int, size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        # One block more than can be handed out, for rows that only fill up a batch of fixed size.
        shape = (config.n_layer, blocks + 1, size, config.n_local_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.blocks = self.spare = blocks
        self._pass: Pass | None = None

    @staticmethod
    def bytes_per_block(config: BlockConfig, size: int, dtype: torch.dtype) -> int:
        return 2 * config.n_layer * size * config.n_local_heads * config.head_dim * dtype.itemsize

    def open(self, plan: Pass) -> None:
        """The tokens of the next forward pass."""
        self._pass = plan

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self._pass
        assert plan is not None, "open() comes before the forward pass"
        keys, values = self.keys[layer], self.values[layer]
        keys.flatten(0, 1).index_copy_(0, plan.where, k)
        values.flatten(0, 1).index_copy_(0, plan.where, v)
        mixed = [
            paged_prefill_reference(q[s.first : s.first + s.count], keys, values, s.table, s.end) for s in plan.segments
        ]
        if len(plan.lengths):
            mixed.append(paged_decode_reference(q[-len(plan.lengths) :], keys, values, plan.tables, plan.lengths))
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


class HostTier:
    """Blocks that had to leave the device, kept in host memory until room is needed; least recently used go first."""

    def __init__(self, kv: PagedKV, most_bytes: int) -> None:
        self.kv = kv
        self.most = most_bytes // max(1, 2 * kv.keys[:, 0].nbytes)
        self._kept: OrderedDict[Key, tuple[Tensor, Tensor]] = OrderedDict()

    def save(self, block: int, key: Key) -> None:
        if self.most == 0:
            return
        self._kept[key] = (self.kv.keys[:, block].to("cpu", copy=True), self.kv.values[:, block].to("cpu", copy=True))
        self._kept.move_to_end(key)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def restore(self, key: Key, block: int) -> bool:
        """Copy what is kept under `key` into `block`; False if nothing is."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        self._kept.move_to_end(key)
        self.kv.keys[:, block] = kept[0].to(self.kv.keys.device)
        self.kv.values[:, block] = kept[1].to(self.kv.values.device)
        return True

    def __len__(self) -> int:
        return len(self._kept)
