"""The processes that speak and encode the corpus while the language model trains."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Speaking:
    """Teacher, text and codec, and the folders of recordings and codes."""

    teachers: Path  # Kokoro's model, as `training.kokoro.convert` writes it
    text: Path  # phonemized sentences
    heldout_text: Path
    codec: Path
    codebooks: int | None
    speech: Path
    codes: Path
    heldout_codes: Path
    hours: float
    processes: int  # no effect: the teacher is one process on the GPU

    @property
    def heldout_speech(self) -> Path:
        return self.speech.with_name(f"{self.speech.name}-heldout")

    def commands(self) -> dict[str, list[str]]:
        """Return the arguments of each process by its name."""
        speech = ["training.kokoro.produce", "--model", str(self.teachers), "--utterances", str(self.text)]
        speech += ["--heldout", str(self.heldout_text), "--out", str(self.speech)]
        speech += ["--heldout-out", str(self.heldout_speech), "--hours", str(self.hours)]
        encode = ["training.encode", "--codec", str(self.codec), "--follow", "--discard"]
        encode += ["--shards", str(self.heldout_speech), str(self.heldout_codes)]
        encode += ["--shards", str(self.speech), str(self.codes)]
        if self.codebooks is not None:
            encode += ["--codebooks", str(self.codebooks)]
        return {"encode": encode, "speech": speech}


@dataclass
class Makers:
    """Running processes by name; leaving the `with` ends them."""

    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def start(cls, speaking: Speaking | None, logs: Path) -> Makers:
        """Start what `speaking` asks for; each writes its log beside the model's."""
        makers = cls()
        for name, command in ({} if speaking is None else speaking.commands()).items():
            # Behind the trainer, which must never wait for a processor.
            polite = [] if name == "encode" else ["nice", "-n", "10"]
            with (logs / f"{name}.log").open("ab") as log:
                makers.running[name] = subprocess.Popen(
                    [*polite, sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT
                )
        return makers

    def check(self) -> None:
        """Raises RuntimeError naming who failed."""
        for name, process in self.running.items():
            if process.poll():
                raise RuntimeError(f"{name} ended with status {process.returncode}; see {name}.log")

    def __enter__(self) -> Makers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
