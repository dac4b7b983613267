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
    """Whose voices say what, and where recordings and codes go."""

    teachers: Path
    text: Path
    heldout_text: Path
    codec: Path
    codebooks: int | None
    speech: Path
    codes: Path
    heldout_codes: Path
    hours: float
    processes: int

    @property
    def heldout_speech(self) -> Path:
        return self.speech.with_name(f"{self.speech.name}-heldout")

    def commands(self) -> dict[str, list[str]]:
        """By name. The held-out sentences are few: two processes have them ready within a minute."""
        few = min(2, self.processes)
        heldout = ["training.data", "--heldout", *self._data(self.heldout_text, self.heldout_speech, few)]
        speech = ["training.data", *self._data(self.text, self.speech, self.processes)]
        speech += ["--hours", str(self.hours), "--vary-tempo", "--join"]
        encode = ["training.encode", "--codec", str(self.codec), "--follow", "--discard"]
        encode += ["--shards", str(self.heldout_speech), str(self.heldout_codes)]
        encode += ["--shards", str(self.speech), str(self.codes)]
        if self.codebooks is not None:
            encode += ["--codebooks", str(self.codebooks)]
        return {"encode": encode, "heldout": heldout, "speech": speech}

    def _data(self, text: Path, out: Path, processes: int) -> list[str]:
        said = ["--text", str(text), "--teachers", str(self.teachers)]
        return [*said, "--out", str(out), "--processes", str(processes)]


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
