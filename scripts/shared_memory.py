"""Run the fused kernels with the tiles of cards that have less shared memory per block than this one.

    python -m scripts.shared_memory --limits 101376,65536 --json shared.json

For every limit an engine is built whose kernels choose their tiles for it. The same 64 requests must have the codes of
the engine without a limit; then steps are timed. The kernels still run on this card;
`python -m tests.kernels.offline` checks whether they fit the other one. Prints one line of JSON per engine; exits with
1 if codes differ.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from scripts.many_voices import utterance, write
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.load import choose_device, choose_dtype
from shoal.tools.bench.profile import step_seconds

Figures = dict[str, Any]
Codes = list[NDArray[np.int32]]

KV_BYTES = 4 << 30
STEPS = (1, 2, 4, 8, 16, 32, 64)


@contextmanager
def limited(limit: int | None) -> Iterator[None]:
    """Make every kernel module choose tiles for `limit` bytes of shared memory; None changes nothing."""
    names = [name for name in sys.modules if name.startswith("shoal.kernels.")]
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], "shared_memory_limit")]
    patches = [patch.object(module, "shared_memory_limit", lambda device: limit) for module in modules]
    for each in patches if limit is not None else ():
        each.start()
    try:
        yield
    finally:
        for each in patches if limit is not None else ():
            each.stop()


def build(checkpoint: Checkpoint, slots: int) -> EngineCore:
    on_gpu = checkpoint.model.device.type == "cuda"
    config = (
        EngineConfig(slots=slots, guard=False, kv_bytes=KV_BYTES) if on_gpu else EngineConfig(slots=slots, guard=False)
    )
    return EngineCore(checkpoint, config)


def spoken(core: EngineCore, requests: int, frames: int) -> Codes:
    """Run the requests in one batch and return the codes of each. Raises their errors."""
    utterances = [utterance(core, number, frames) for number in range(requests)]
    for each in utterances:
        core.add(each)
    while not core.idle:
        for event in core.step():
            if event.error is not None:
                raise event.error
    return [each.all_codes() for each in utterances]


def measure(checkpoint: Checkpoint, limit: int | None, slots: int, frames: int) -> tuple[Figures, Codes]:
    """Build an engine under a limit; return its figures and the codes of its requests."""
    with limited(limit):
        core = build(checkpoint, slots)
        codes = spoken(core, slots, frames)
        steps = {size: step_seconds(core, size) for size in STEPS if size <= slots}
    dropped = [*core.runner.dropped, *core.audio_decoder.dropped]
    backends = [core.runner.backend, core.audio_decoder.backend]
    return {"limit": limit, "backends": backends, "dropped": dropped, "step_seconds": steps}, codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:s1-mini")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limits", default="101376,65536", help="bytes of shared memory, separated by commas")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--frames", type=int, default=40, help="frames per request")
    parser.add_argument("--json", type=Path, help="file for the results; written after each engine")
    given = parser.parse_args()
    where = choose_device(given.device)
    checkpoint = resolve_model(given.model, dtype=choose_dtype(None, where), device=where, encoder=False)
    results: Figures = {"runs": []}
    expected = None
    for limit in (None, *map(int, given.limits.split(","))):
        figures, codes = measure(checkpoint, limit, given.slots, given.frames)
        expected = expected or codes
        figures["equal"] = sum(map(np.array_equal, codes, expected))
        results["runs"].append(figures | {"requests": len(codes)})
        print(json.dumps(results["runs"][-1]), flush=True)
        write(given.json, results)
    return 0 if all(run["equal"] == run["requests"] for run in results["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
