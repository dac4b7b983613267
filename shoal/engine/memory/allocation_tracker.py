"""What a computation would take at most, found out without doing it."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationTracker(TorchDispatchMode):
    """Counts the tensors that are made and live at one time while it is entered. On the meta device none is computed.

    What libraries take for themselves, as workspaces of convolutions, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
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
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size
