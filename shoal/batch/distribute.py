"""Distribute a batch over several engines on a Ray cluster, with Ray Data.

Every worker has an engine, reads its lines from the shared input by offset, and writes audio files and its own journal
into the shared output directory. A worker processes several slices of lines concurrently, so that the engine's batch
stays full while one slice ends and the next begins.
"""

import asyncio
import logging
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from shoal.api.engine_client import load_engine
from shoal.batch.journal import JournalEntry
from shoal.batch.lines import InputFile, LineTask
from shoal.batch.manifest import Manifest, worker_journal
from shoal.batch.run import BatchPlan, ProgressCallback, speak_all
from shoal.batch.speaker import LineSpeaker
from shoal.cluster.lifecycle import last_error_line
from shoal.engine.process.worker import EngineSource
from shoal.errors import EngineStopped, InvalidRequest

SLICE = 16  # lines per Ray Data block


@dataclass(frozen=True)
class WorkerConfig:
    """Number of engines, and the Ray resources of each."""

    count: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


class BatchWorker:
    """Actor of Ray Data with one engine. Ray Data calls it from several threads."""

    def __init__(self, source: EngineSource, voices: Path, out: Path, lines: InputFile) -> None:
        _check_shared(lines.path)
        self._lines = lines
        self._speaker = LineSpeaker(load_engine(source, voices), out, lines.defaults)
        self._journal = worker_journal(out)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Speak a block of tasks, given as Ray Data columns; return their journal entries as columns."""
        columns = (rows[each.name].tolist() for each in fields(LineTask))
        tasks = [LineTask(*row) for row in zip(*columns, strict=True)]
        lines = ((task, self._lines.raw(task)) for task in tasks)
        entries: list[JournalEntry] = []
        asyncio.run(
            speak_all(lines, self._speaker, self._journal.add, len(tasks), lambda task, entry: entries.append(entry))
        )
        rows_out = [asdict(entry) for entry in entries]
        return {name: [row[name] for row in rows_out] for name in rows_out[0]}


def distribute(
    found: BatchPlan,
    lines: InputFile,
    source: EngineSource,
    voices: Path,
    manifest: Manifest,
    workers: WorkerConfig,
    watch: ProgressCallback,
) -> None:
    """Speak the remaining lines on all workers. `Manifest.settle` merges their journals.

    Raises EngineStopped with the last error of a worker.
    """
    _silence_ray_data()
    shared = replace(lines, path=lines.path.absolute())
    by_name = {task.name: task for task in found.tasks}
    dataset = ray.data.from_items(
        [asdict(task) for task in found.tasks], override_num_blocks=math.ceil(len(found.tasks) / SLICE)
    ).map_batches(
        BatchWorker,
        fn_constructor_args=(source, voices.absolute(), manifest.out.absolute(), shared),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(
            size=workers.count, max_concurrent_calls_per_actor=1 + math.ceil(source.config.slots / SLICE)
        ),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
    )
    try:
        for row in dataset.iter_rows():
            watch(by_name[row["id"]], JournalEntry(**row))
    except RayError as problem:
        raise EngineStopped(f"the workers failed: {last_error_line(str(problem))}") from None


def _check_shared(path: Path) -> None:
    """Raise InvalidRequest if this worker's machine cannot read the input."""
    try:
        path.open("rb").close()
    except OSError as problem:
        raise InvalidRequest(
            f"a worker cannot read {path} ({problem.strerror}): put the input on storage that all machines share"
        ) from None


def _silence_ray_data() -> None:
    """Disable Ray Data's own progress bars and logs: the command shows a progress bar."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
