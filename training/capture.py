"""Capture a training step as one CUDA graph; a step that cannot be captured runs launch by launch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def as_graph(step: Callable[[], None], feed: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Return the step as a captured graph, or unchanged if it cannot be captured; `feed` prepares its inputs.

    Runs three real training steps before the capture.
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
    except Exception as problem:  # noqa: BLE001 - edge to the driver, which raises anything; the plain step works
        logger.warning("not captured: %s", problem)
        torch.cuda.synchronize()
        return step
    return graph.replay
