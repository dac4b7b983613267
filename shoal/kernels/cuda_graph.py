"""CUDA graph capture and replay for fixed-shape workloads, and pinned host buffers that feed them."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.errors import describe_error, device_errors
from shoal.kernels.jit import compile_only

logger = logging.getLogger(__name__)


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
        """Start copying values of the target's shape; waits only while the upload before the last is in flight."""
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
        return results.to("cpu", copy=True)
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    return host.copy_(results, non_blocking=True)


class Launches(Protocol):
    """Kernel launches of fixed shapes."""

    def run(self) -> None:
        """Launch the kernels."""


class Workload(Launches, Protocol):
    """A fixed-shape computation that reads its inputs from one tensor and writes its results to preallocated ones."""

    inputs: Tensor

    def padding(self) -> np.ndarray:
        """Return inputs of which every row is padding: they may be run at any time and change no sequence."""


def compile_ahead(workloads: Iterable[Launches], *, strict: bool = False) -> None:
    """Compile the kernels of these workloads in parallel; compilation dominates a cold start.

    Each workload runs once with its kernel launches suppressed. Operators that are not Triton kernels do run, on
    uninitialised memory, so they must accept any values. A workload that raises, for lack of memory for example, is
    skipped, so that only its own first launch fails; with `strict` the error is raised.
    """
    with torch.inference_mode(), compile_only() as possible:
        for workload in workloads if possible else ():
            with nullcontext() if strict else device_errors(_skip_compilation):
                workload.run()


def _skip_compilation(error: Exception) -> None:
    logger.info("a workload could not be compiled ahead of its first launch: %s", describe_error(error))


ResultT = TypeVar("ResultT")


# Streams per device in torch's pool, from which torch.cuda.Stream() returns one after the other.
STREAMS = 32
# Holds contexts instead of streams: torch's stream objects crash when a weak reference to them is cleared.
_live: "weakref.WeakSet[CaptureContext]" = weakref.WeakSet()


class CaptureContext:
    """Stream and memory of graphs that are replayed on one stream, so that no two of them run at the same time.

    A graph keeps the cuBLAS workspace of the stream it was captured on. By default torch.cuda.graph captures everything
    on one stream, so graphs of the model and of the codec, which run at the same time, would share a workspace and
    overwrite each other's partial sums. Each live context has a stream of its own: keep the context as long as its
    graphs.
    """

    def __init__(self) -> None:
        self.stream = _reserve_stream()
        self._pool: Any = None
        _live.add(self)

    def capture(self, launch: Callable[[], ResultT]) -> tuple[torch.cuda.CUDAGraph, ResultT]:
        """Launch once, then capture the same launches as a graph; return it with their result."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.inference_mode():
            # Compiles the kernels and warms up the allocator outside the capture.
            launch()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because other threads may encode voices, and so allocate memory, during the capture.
        mode = "thread_local"
        with torch.inference_mode(), torch.cuda.graph(graph, self._pool, self.stream, capture_error_mode=mode):
            result = launch()
        self._pool = graph.pool()
        return graph, result


def _reserve_stream() -> torch.cuda.Stream:
    """Return a stream of the current device that no other live context has. Raises RuntimeError if there is none."""
    if (stream := _free_stream()) is None:
        gc.collect()  # engines that are not used any more may hold streams
        stream = _free_stream()
    if stream is None:
        raise RuntimeError(f"no free CUDA stream: all {STREAMS} of this device are used by engines of this process")
    return stream


def _free_stream() -> torch.cuda.Stream | None:
    reserved = {context.stream for context in _live}
    return next((stream for _ in range(STREAMS) if (stream := torch.cuda.Stream()) not in reserved), None)


class LaunchGraph:
    """Captured launches without host inputs: they read the results of another graph on the device."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor, context: CaptureContext) -> None:
        self._graph, self._result, self._context = graph, result, context

    @classmethod
    def capture(cls, launch: Callable[[], Tensor], context: CaptureContext) -> "LaunchGraph":
        return cls(*context.capture(launch), context)

    def replay(self) -> Tensor:
        """Replay the launches and return their result, which the next replay overwrites."""
        self._graph.replay()
        return self._result


WorkloadT = TypeVar("WorkloadT", bound=Workload)


class CapturedGraph(Generic[WorkloadT]):
    """A workload with its host buffer. Runs as a CUDA graph after `capture`, launch by launch before."""

    def __init__(self, workload: WorkloadT) -> None:
        self.workload = workload
        self.host_buffer = HostBuffer(workload.inputs)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._context: CaptureContext | None = None

    def run(self, inputs: np.ndarray) -> None:
        self.host_buffer.upload(inputs)
        if self._graph is None:
            self.workload.run()
        else:
            self._graph.replay()

    def launch_padding(self) -> None:
        """Launch the workload once over padding and wait for it. Raises what the compiler or the device raises."""
        with torch.inference_mode():
            self.run(self.workload.padding())
        if self.workload.inputs.device.type == "cuda":
            torch.cuda.synchronize(self.workload.inputs.device)

    def capture(self, context: CaptureContext) -> None:
        """Capture the graph, after one run of the workload over padding."""
        self.host_buffer.upload(self.workload.padding())
        self._graph, _ = context.capture(self.workload.run)
        self._context = context

    def replay_seconds(self, replays: int) -> float:
        """Replay the captured graph over padding `replays` times and return the shortest time in seconds."""
        self.host_buffer.upload(self.workload.padding())
        return min(self._timed_replay() for _ in range(replays))

    def _timed_replay(self) -> float:
        assert self._graph is not None, "captured before it is timed"
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


KeyT = TypeVar("KeyT")


class GraphSizes(Generic[KeyT, WorkloadT]):
    """The sizes of one kind of workload, smallest first. A size that fails is dropped; a larger one serves its batches.

    Each size has a key that sorts: the number of rows, or a tuple such as (context width, rows).
    """

    def __init__(self, name: str, workloads: Mapping[KeyT, WorkloadT]) -> None:
        self.name = name  # used in messages
        self.available = {key: CapturedGraph(workload) for key, workload in workloads.items()}
        self.dropped: dict[KeyT, str] = {}  # reason by size
        self._withdrawn: dict[KeyT, CapturedGraph[WorkloadT]] = {}  # failed in `run`; `restore` brings them back
        self._failed: tuple[KeyT, str] | None = None  # size and reason, if the last run raised

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self.available)

    def __getitem__(self, key: KeyT) -> CapturedGraph[WorkloadT]:
        return self.available[key]

    def build(self, context: CaptureContext | None) -> None:
        """Capture every size, or without a context launch it once, largest first; drop those that fail.

        Smaller graphs reuse the memory of the largest. Raises RuntimeError if no size works.
        """
        for key, graph in reversed(list(self.available.items())):
            with device_errors(partial(self._drop, key)):
                if context is None:
                    graph.launch_padding()
                else:
                    graph.capture(context)
        if not self.available:
            raise RuntimeError(f"no size of {self.name} works: {next(iter(self.dropped.values()))}")

    def add(self, key: KeyT, make: Callable[[], WorkloadT], context: CaptureContext) -> None:
        """Make and capture a size larger than the others, or leave it out if that fails."""
        with device_errors(partial(self._drop, key)):
            graph = CapturedGraph(make())
            graph.capture(context)
            self.available[key] = graph

    def run(self, key: KeyT, inputs: np.ndarray) -> WorkloadT:
        """Run one size and return its workload, which holds the results."""
        self._failed = None
        with device_errors(partial(self._raise_failed_run, key)):
            self.available[key].run(inputs)
        return self.available[key].workload

    def _raise_failed_run(self, key: KeyT, error: Exception) -> NoReturn:
        """Note the size for `drop_failed`, and raise the error again: the caller chooses another size."""
        self._failed = key, describe_error(error)
        raise error

    def drop_failed(self) -> bool:
        """Withdraw the size whose run raised last; return whether others remain. False if the last run succeeded."""
        failed, self._failed = self._failed, None
        if failed is None or len(self.available) == 1:
            return False
        key, reason = failed
        self.dropped[key] = reason
        logger.warning("%s of size %s failed and is left out until the next retry: %s", self.name, key, reason)
        self._withdrawn[key] = self.available.pop(key)
        return True

    def restore(self) -> None:
        """Use the sizes again that `drop_failed` has withdrawn."""
        if self._withdrawn:
            self.available |= self._withdrawn
            self.available = dict(sorted(self.available.items()))
            for key in self._withdrawn:
                del self.dropped[key]
            self._withdrawn = {}

    def _drop(self, key: KeyT, error: Exception) -> None:
        self.dropped[key] = describe_error(error)
        self.available.pop(key, None)
        logger.info("%s of size %s cannot be built and is left out: %s", self.name, key, self.dropped[key])
