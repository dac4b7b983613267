"""Processes that make the missing shards, and the one that watches them."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path

from training.data.plan import Plan
from training.data.shards import claim, is_complete, shard_stem, write_shard
from training.data.sound import SAMPLE_RATE
from training.data.teachers import Teachers


def work(plan: Plan, teachers: Path, out: Path, shards: Sequence[int]) -> None:
    """Make these shards, one after another. Leaves between shards when the parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # The parent decides when to stop; a Ctrl-C must not kill the teachers under a half-made shard.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for shard in shards:
        if parent is not None and not parent.is_alive():
            return
        with Teachers(teachers) as running:
            write_shard(out, shard, plan.shard(shard), running)


def generate(plan: Plan, teachers: Path, out: Path, hours: float, processes: int) -> int:
    """Make the shards of the plan that are missing and return how many there were; raises on a failed worker."""
    claim(out, plan)
    missing = [shard for shard in range(plan.shards_for(hours)) if not is_complete(out, shard)]
    # Striding hands out the first shards first, so training can start on them while the last are made.
    shares = [missing[k::processes] for k in range(min(processes, len(missing)))]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(plan, teachers, out, share), daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    try:
        follow(workers, out, missing)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        for leftover in out.glob(".*.tmp"):
            leftover.unlink()
    return len(missing)


def follow(workers: Sequence[multiprocessing.process.BaseProcess], out: Path, missing: Sequence[int]) -> None:
    """Report progress until every worker is done; raises if one fails."""
    started, reported, running = time.monotonic(), -1, bool(workers)
    while running:
        workers_wait(workers, 2.0)
        # Looked at before the exit codes: a worker that ends in between is seen in another round.
        running = any(worker.is_alive() for worker in workers)
        if any(worker.exitcode for worker in workers):
            raise RuntimeError("a worker failed; complete shards are kept, run again to go on")
        done = [shard for shard in missing if is_complete(out, shard)]
        if len(done) != reported:
            reported = len(done)
            print(progress(out, done, len(missing), time.monotonic() - started), flush=True)


def workers_wait(workers: Sequence[multiprocessing.process.BaseProcess], seconds: float) -> None:
    """Sleep until a worker ends or the time is over."""
    connection.wait([worker.sentinel for worker in workers if worker.is_alive()], seconds)


def progress(out: Path, done: Sequence[int], total: int, elapsed: float) -> str:
    stored = sum(shard_stem(out, shard).with_suffix(".pcm").stat().st_size for shard in done)
    seconds = stored / 2 / SAMPLE_RATE
    left = elapsed / len(done) * (total - len(done)) if done else math.inf
    eta = f"{left:.0f} s left" if done else "starting"
    return f"{len(done)}/{total} shards, {seconds / 3600:.2f} h, {seconds / elapsed:.0f}x real time, {eta}"
