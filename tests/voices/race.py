"""Eight processes add a voice of the same name at the same time, in several rounds.

    python race.py ROUNDS DIRECTORY

Prints one line per round with the result of each process. The transcript of process n is "I am n".
"""

import os
import sys
from pathlib import Path

from faults import RATE, WAV

from shoal.errors import ShoalError
from shoal.voices.store import VoiceStore

PROCESSES = 8


def attempt(directory: Path, name: str, process: int, start: int) -> str:
    store = VoiceStore(directory, sample_rate=RATE)
    os.read(start, 1)  # returns for all at once, when the parent closes its end
    try:
        store.add(name, WAV, f"I am {process}")
    except ShoalError as error:
        return type(error).__name__
    return f"won{process}"


def race(directory: Path, name: str) -> list[str]:
    start, gun = os.pipe()
    reading, writing = os.pipe()
    children = []
    for process in range(PROCESSES):
        child = os.fork()
        if child == 0:
            os.close(gun)
            os.write(writing, f"{attempt(directory, name, process, start)}\n".encode())
            os._exit(0)
        children.append(child)
    for end in (gun, start, writing):
        os.close(end)
    for child in children:
        os.waitpid(child, 0)
    with os.fdopen(reading) as answers:
        return sorted(answers.read().split())


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        print(*race(Path(sys.argv[2]), f"round {number}"), flush=True)
