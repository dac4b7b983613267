"""CUDA graph capture and replay for fixed-shape workloads, and pinned host buffers that feed them."""

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.kernels.jit import compile_only


class HostBuffer:
    """Double-buffered pinned host memory behind a device tensor that the host rewrites every step.

    Uploads are asynchronous and ordered with the kernels of the current stream.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._cuda = target.device.type == "cuda"
        # Two staging buffers, each with an event: a buffer must not be overwritten while its copy is in flight.
        self._buffers = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=self._cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() if self._cuda else None for _ in range(2)]
        self._current = 0

    def upload(self, values: np.ndarray) -> None:
        self._current = 1 - self._current
        buffer, copied = self._buffers[self._current], self._copied[self._current]
        if copied is not None:
            copied.synchronize()
        buffer.numpy()[...] = values
        self.target.copy_(buffer, non_blocking=True)
        if copied is not None:
            copied.record()


def to_host(results: Tensor) -> Tensor:
    """Start an asynchronous copy to pinned host memory; the caller must wait for an event recorded after this call.

    The copy is ordered before the next replay, so the next run may overwrite `results`.
    """
    if results.device.type != "cuda":
        return results.clone()
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    return host.copy_(results, non_blocking=True)


class Workload(Protocol):
    """A fixed-shape computation that reads its inputs from one tensor and writes its results to preallocated ones."""

    inputs: Tensor

    def run(self) -> None:
        """Launch the kernels."""


def compile_ahead(workloads: Iterable[Workload]) -> None:
    """Compile the kernels of these workloads in parallel; compilation dominates a cold start.

    Each workload runs once with its kernel launches suppressed. Operators that are not Triton kernels do run, on
    uninitialised memory, so they must accept any values.
    """
    with torch.inference_mode(), compile_only() as possible:
        for workload in workloads if possible else ():
            workload.run()


WorkloadT = TypeVar("WorkloadT", bound=Workload)


class CapturedGraph(Generic[WorkloadT]):
    """A workload with its host buffer. Runs as a CUDA graph after `capture`, launch by launch before."""

    def __init__(self, workload: WorkloadT) -> None:
        self.workload = workload
        self.host_buffer = HostBuffer(workload.inputs)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, inputs: np.ndarray) -> None:
        self.host_buffer.upload(inputs)
        if self._graph is None:
            self.workload.run()
        else:
            self._graph.replay()

    def capture(self, pool: Any) -> Any:
        """Capture the graph and return its memory pool, which other graphs may share.

        The workload runs once before the capture, so the current inputs must have no side effects.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            # Compiles the kernels and warms up the allocator outside the capture.
            self.workload.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            self.workload.run()
        self._graph = graph
        return graph.pool()
