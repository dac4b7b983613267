"""A batch over several engines on a Ray cluster, with Ray Data.

Every worker has an engine, and writes its files and its own journal into the shared directory. It takes a few slices of
lines at one time, so that the engine's batch stays full while one slice ends and the next begins.
"""

import asyncio
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from shoal.batch.journal import Entry
from shoal.batch.lines import Defaults, Input, Task
from shoal.batch.manifest import Manifest, worker_journal
from shoal.batch.run import Survey, Watcher, speak_all
from shoal.batch.speaker import Speaker
from shoal.cluster.life import last_words
from shoal.engine.worker import EngineSource
from shoal.errors import EngineStopped
from shoal.server.run import load

SLICE = 16  # lines


@dataclass(frozen=True)
class Workers:
    """How many engines, and what each gets of the cluster."""

    count: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


class SliceSpeaker:
    """One worker. Ray Data calls it from several threads."""

    def __init__(self, source: EngineSource, voices: Path, out: Path, defaults: Defaults) -> None:
        self._speaker = Speaker(load(source, voices), out, defaults)
        self._journal = worker_journal(out)

    def __call__(self, lines: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Lines by column, as Ray Data has them; the entries in their place."""
        rows = zip(*(lines[name].tolist() for name in ("number", "name", "digest", "raw")), strict=True)
        tasks = [(Task(number, name, digest, 0, len(raw)), raw) for number, name, digest, raw in rows]
        entries: list[Entry] = []
        asyncio.run(
            speak_all(
                iter(tasks), self._speaker, self._journal.add, len(tasks), lambda task, entry: entries.append(entry)
            )
        )
        told = [asdict(entry) for entry in entries]
        return {name: [each[name] for each in told] for name in told[0]}


def spread(
    found: Survey,
    lines: Input,
    source: EngineSource,
    voices: Path,
    manifest: Manifest,
    workers: Workers,
    watch: Watcher,
) -> None:
    """Speak what is missing on all workers. The manifest takes in what they wrote when it is settled.

    Raises EngineStopped with what a worker said last.
    """
    _be_quiet()
    by_name = {task.name: task for task in found.tasks}
    dataset = ray.data.from_items(
        list(_rows(found.tasks, lines)), override_num_blocks=math.ceil(len(found.tasks) / SLICE)
    ).map_batches(
        SliceSpeaker,
        fn_constructor_args=(source, voices.absolute(), manifest.out.absolute(), lines.defaults),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(
            size=workers.count, max_concurrent_calls_per_actor=1 + math.ceil(source.config.slots / SLICE)
        ),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
    )
    try:
        for row in dataset.iter_rows():
            watch(by_name[row["id"]], Entry(**row))
    except RayError as problem:
        raise EngineStopped(f"the workers failed: {last_words(str(problem))}") from None


def _rows(tasks: list[Task], lines: Input) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield {"number": task.number, "name": task.name, "digest": task.digest, "raw": lines.raw(task)}


def _be_quiet() -> None:
    """There is a progress bar already."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
