"""A step as one CUDA graph, with a way back."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def as_graph(step: Callable[[], None], feed: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """The step, captured where that works; `feed` puts in place what it reads.

    Takes three steps on the way, which count like any other.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            feed()
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except Exception as problem:  # noqa: BLE001 - a step that cannot be captured is slow, not wrong
        logger.warning("not captured: %s", problem)
        torch.cuda.synchronize()
        return step
    return graph.replay
