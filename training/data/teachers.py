"""Teachers: one process each, a line in, samples out (training/teachers/protocol.h)."""

from __future__ import annotations

import os
import select
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from training.data.sound import Samples, Signal, scale_formants
from training.data.voices import Voice

TEACHER_TIMEOUT_SECONDS = 30.0


class TeacherFailed(RuntimeError):
    """The teacher's process died, hung or refused the sentence."""


@dataclass(slots=True)
class Teacher:
    """A running teacher program."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, name: str) -> Teacher:
        command = [str((folder / name).resolve()), str((folder / f"{name}-data").resolve())]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        return cls(process)

    def ask(self, request: str) -> Samples:
        """The teacher's answer; raises TeacherFailed, after which this teacher is closed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request.encode())
            (count,) = struct.unpack("<I", self._read(4))
            samples = np.frombuffer(self._read(2 * count), dtype="<i2").astype(np.int16)
        except (OSError, TeacherFailed) as error:
            self.close()
            raise TeacherFailed(f"{error}: {request.strip()!r}") from None
        if not count:
            raise TeacherFailed(f"nothing was said: {request.strip()!r}")
        return samples

    def _read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        source = self.process.stdout.fileno()
        received = bytearray()
        while len(received) < count:
            if not select.select([source], [], [], TEACHER_TIMEOUT_SECONDS)[0]:
                raise TeacherFailed("no answer in time")
            piece = os.read(source, count - len(received))
            if not piece:
                raise TeacherFailed("the process ended")
            received += piece
        return bytes(received)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass(slots=True)
class Teachers:
    """The teachers one shard needs, started when first asked.

    They live as long as one shard: both programs draw noise from a generator that runs on from sentence to sentence,
    so a fresh start is what makes a shard's sound independent of the shards its worker made before.
    """

    folder: Path
    running: dict[str, Teacher] = field(default_factory=dict)

    def speak(self, voice: Voice, text: str, tempo: float) -> Signal:
        """Speech in [-1, 1] as the voice says it, before post-processing."""
        teacher = self.running.get(voice.teacher)
        if teacher is None or not teacher.alive:
            teacher = self.running[voice.teacher] = Teacher.start(self.folder, voice.teacher)
        samples = teacher.ask(voice.request(text, tempo))
        return scale_formants(samples / 32768.0, voice.formants)

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for teacher in self.running.values():
            teacher.close()
