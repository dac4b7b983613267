"""Build modules on the meta device, without allocating or initializing their weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class SkipInit(TorchFunctionMode):
    """Skips the initialization of weights: tensors on the meta device have none.

    For some of it torch would import its compiler, which takes seconds.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules created inside the block have shapes but no storage."""
    with torch.device("meta"), SkipInit():
        yield
