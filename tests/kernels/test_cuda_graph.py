"""Graphs of two capture contexts may run at the same time."""

import gc

import pytest
import torch
from torch import Tensor

from shoal.kernels.cuda_graph import STREAMS, CaptureContext

pytestmark = pytest.mark.gpu


class Products:
    """Chain of products of few rows and a long inner dimension, which cuBLAS splits: partial sums in the workspace."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x = torch.randn(3, 8192, device="cuda", generator=generator)
        self.weights = [torch.randn(8192, 8192, device="cuda", generator=generator) / 90 for _ in range(8)]

    def run(self) -> Tensor:
        x = self.x
        for weight in self.weights:
            x = x @ weight
        return x


def test_graphs_that_run_at_the_same_time_share_no_workspace() -> None:
    """Sharing it, these two graphs do not end, and model and codec of the plain-graph backend gave other codes."""
    contexts = [CaptureContext() for _ in range(2)]
    work = [Products(seed) for seed in range(2)]
    captured = [context.capture(each.run) for context, each in zip(contexts, work, strict=True)]
    expected = [each.run() for each in work]
    torch.cuda.synchronize()
    for _ in range(50):
        for context, (graph, _) in zip(contexts, captured, strict=True):
            with torch.cuda.stream(context.stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, result), wanted in zip(captured, expected, strict=True):
            assert torch.equal(result, wanted)


def test_live_contexts_have_different_streams() -> None:
    first = CaptureContext()
    for _ in range(STREAMS - 1):
        torch.cuda.Stream()
    # torch would hand out the stream of the first context again.
    assert CaptureContext().stream != first.stream


def test_streams_of_contexts_that_are_gone_are_reused() -> None:
    gc.disable()
    try:
        for _ in range(2 * STREAMS):
            unused: list[object] = [CaptureContext()]
            unused.append(unused)  # a cycle, as engines have
    finally:
        gc.enable()


def test_more_contexts_than_streams_are_refused() -> None:
    gc.collect()
    with pytest.raises(RuntimeError, match="no free CUDA stream"):
        [CaptureContext() for _ in range(STREAMS + 1)]
