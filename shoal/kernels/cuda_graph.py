"""Computations of fixed shape, recorded once as CUDA graphs, and the numbers the host feeds them."""

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.kernels.jit import compiling


class Inbox:
    """Numbers that the host writes anew for every step. The device gets them in order, and the host does not wait."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._cuda = target.device.type == "cuda"
        # A copy under way must not be overwritten, so there are two places to copy from, each with its event.
        self._places = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=self._cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() if self._cuda else None for _ in range(2)]
        self._turn = 0

    def put(self, values: np.ndarray) -> None:
        self._turn = 1 - self._turn
        place, copied = self._places[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        place.numpy()[...] = values
        self.target.copy_(place, non_blocking=True)
        if copied is not None:
            copied.record()


def to_host(results: Tensor) -> Tensor:
    """A copy on the host, good once an event recorded after this has come; the next run may overwrite `results`."""
    if results.device.type != "cuda":
        return results.clone()
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    return host.copy_(results, non_blocking=True)


class Workload(Protocol):
    """A computation of fixed shape that reads its inputs from one tensor and leaves its results in others."""

    inputs: Tensor

    def run(self) -> None:
        """Launch it."""


def compile_ahead(works: Iterable[Workload]) -> None:
    """Compile the kernels of these computations, many at a time: a cold start is hardly anything else.

    They go through all their launches and none is made; whatever else they do must not mind what it is given.
    """
    with torch.inference_mode(), compiling() as possible:
        for work in works if possible else ():
            work.run()


Work = TypeVar("Work", bound=Workload)


class Captured(Generic[Work]):
    """A computation of fixed shape with its inbox; replayed as a graph if it has been captured."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.inbox = Inbox(work.inputs)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, inputs: np.ndarray) -> None:
        self.inbox.put(inputs)
        if self._graph is None:
            self.work.run()
        else:
            self._graph.replay()

    def capture(self, pool: Any) -> Any:
        """Record the graph; the inputs have to be harmless. Returns the memory pool that others may share."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            # Compiles the kernels, and fills the allocator, before anything is recorded.
            self.work.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            self.work.run()
        self._graph = graph
        return graph.pool()
