import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cli import main


@dataclass
class Run:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def said(self) -> str:
        """Standard error as one line, without wrapping."""
        return " ".join(self.err.split())


Shoal = Callable[..., Run]


@pytest.fixture(autouse=True)
def no_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `shoal say` from finding a server of the person who runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def shoal(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[Shoal]:
    """Run the command in this process: `shoal("say", "Hello.", "-o", path)`."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object, stdin: bytes | None = None) -> Run:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfdbinary.readouterr()
        return Run(int(left.value.code or 0), out, err.decode())

    yield run
    signal.signal(signal.SIGTERM, before)


class Terminal(io.TextIOWrapper):
    """Standard input that is a terminal without input."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def isatty(self) -> bool:
        return True
