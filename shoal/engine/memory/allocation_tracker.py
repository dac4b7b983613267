"""Peak memory of a computation on the meta device, measured without running it."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that tracks the bytes of the tensors created while it is active.

    Library workspaces, such as those of convolutions, are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), known)
        return result

    def _count(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        if id(storage) in known or storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self._now += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size
