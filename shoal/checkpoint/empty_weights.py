"""Modules without weights: the shapes are there, what fills them comes from a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class SkipInit(TorchFunctionMode):
    """Draws no first weights. On the meta device torch would do it by way of its compiler, whose import takes longer
    than everything else before the first sound."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules made within take no memory and hold nothing."""
    with torch.device("meta"), SkipInit():
        yield
