"""Repeat one operation of a store in child processes, each with a fault one step later than the last.

    python faults.py add|rename|delete|get kill|error DIRECTORY

A step is a file system call of the operation, reported by Python's audit events, so this file does not depend on how
the store works. The fault is SIGKILL or a full disk. Round n works in DIRECTORY/n, where there is a voice "old", and
fails at step n. One line per round says how it ended: killed, survived, the error's class, or at last "unharmed" where
there was no step n.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from shoal.audio.pcm import to_int16
from shoal.audio.wav import wav_header
from shoal.voices.store import VoiceStore

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "fcntl.flock", "shutil.rmtree"}
RATE = 16_000
PCM = to_int16(np.sin(np.arange(RATE // 2) / 9).astype(np.float32)).tobytes()
WAV = wav_header(RATE, len(PCM)) + PCM


class OnesEncoder:
    sample_rate, frame_rate, fingerprint = RATE, 10.0, "ones"

    def encode(self, samples: np.ndarray) -> np.ndarray:
        return np.ones((2, len(samples) // 1600), np.int32)


OPERATIONS: dict[str, Callable[[VoiceStore], object]] = {
    "add": lambda store: store.add_recordings("new", [(WAV, "new one"), (WAV, "new two")]),
    "rename": lambda store: store.rename("old", "new"),
    "delete": lambda store: store.delete("old"),
    "get": lambda store: store.get("old", OnesEncoder()),
}
FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "error": lambda: full_disk(),
}


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Trap:
    """Injects the fault at the given step, once."""

    def __init__(self, fault: Callable[[], None], steps: int) -> None:
        self.fault, self.left = fault, steps
        sys.addaudithook(self.step)

    def step(self, event: str, _: tuple[object, ...]) -> None:
        self.left -= event in STEPS
        if event in STEPS and self.left == 0:
            self.fault()


def attempt(operation: str, fault: str, steps: int, directory: Path) -> str:
    store = VoiceStore(directory, sample_rate=RATE)
    store.add("old", WAV, "old one")
    trap = Trap(FAULTS[fault], steps)
    try:
        OPERATIONS[operation](store)
    except Exception as error:  # noqa: BLE001 the test looks at the kind
        return type(error).__name__
    return "unharmed" if trap.left > 0 else "survived"


def round_in_a_child(operation: str, fault: str, steps: int, directory: Path) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, attempt(operation, fault, steps, directory).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read() or "killed"


def main(operation: str, fault: str, directory: str) -> None:
    for steps in count(1):
        ended = round_in_a_child(operation, fault, steps, Path(directory, str(steps)))
        print(steps, ended, flush=True)
        if ended == "unharmed":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
