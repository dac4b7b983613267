"""A real server process on loopback, shared by tests that do not need their own."""

import contextlib
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from shoal.audio.encode import encode_file
from shoal.paths import rss_bytes
from shoal.server import preflight
from tests.server import engine_forks
from tests.server.server_forks import ForkedServer
from tests.waiting import TIMEOUT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]


@dataclass
class Serving:
    """A server process and its address."""

    process: subprocess.Popen[bytes] | ForkedServer
    url: str
    log: Path
    voices: Path
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **headers: str) -> httpx.Client:
        # verify=False in all tests: loading the CA bundle takes 20 ms per client, and there is no TLS on loopback.
        client = httpx.Client(
            base_url=self.url, timeout=TIMEOUT_SECONDS, headers=headers, trust_env=False, verify=False
        )
        self.clients.append(client)
        return client

    def wait_until_ready(self, path: str = "/ready") -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}{path}", trust_env=False, verify=False).status_code == 200
            return False

        wait_until(ready, self.log.read_text, interval=0.1)

    def end(self) -> int:
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_SECONDS)

    def memory(self) -> int:
        """Return the RSS in bytes of the server process, without the engine process."""
        return rss_bytes(self.process.pid)


def engine_of(serving: Serving) -> int:
    """Return the process id of the engine process."""
    return engines_of(serving)[0]


def engines_of(serving: Serving) -> list[int]:
    if (serving.log.parent / engine_forks.PROCESSES).exists():
        return engine_forks.forks(serving.log.parent)
    tasks = Path(f"/proc/{serving.process.pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    names = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, line in names.items() if b"spawn_main" in line]


def pause_engine(serving: Serving) -> int:
    """Stop the engine process as soon as it exists, and return its id."""
    wait_until(lambda: engines_of(serving), serving.log.read_text)
    engine = engine_of(serving)
    os.kill(engine, signal.SIGSTOP)
    return engine


@contextlib.contextmanager
def slowed(*engines: int) -> Iterator[None]:
    """Let engine processes run for a tenth of the time only, so that what they speak can be interrupted."""
    done = threading.Event()

    def toggle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not done.wait(0.04):
                signal_all(engines, signal.SIGSTOP)
                done.wait(0.4)
                signal_all(engines, signal.SIGCONT)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def signal_all(processes: Iterable[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


def figure(http: httpx.Client, name: str) -> float:
    """Return a metric without labels."""
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def free_port() -> int:
    with contextlib.closing(socket.socket()) as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.server.launch", *arguments]


def surroundings(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "S1_MINI_"))}
    return kept | {
        "XDG_CONFIG_HOME": str(home),
        "XDG_DATA_HOME": str(home),
        "XDG_STATE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }


def start(home: Path, *, wait: bool = True, spawn: bool = False, **settings: object) -> Serving:
    """Start a server; with `spawn` it and its engines start as in production, not as forks of prepared processes."""
    port = int(str(settings.pop("port", 0))) or free_port()
    model = str(settings.pop("model", "random:tiny"))
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    arguments = ["serve", "--model", model, "--port", str(port), *flags]
    home.mkdir(exist_ok=True)
    log = home / "log"
    process: subprocess.Popen[bytes] | ForkedServer
    with log.open("wb") as out:
        if engine_forks.POSSIBLE and not spawn:
            env = surroundings(home) | engine_forks.forking_environment(home)
            process = ForkedServer(arguments, out, env, engine_forks.fork_server()[1])
        else:
            process = subprocess.Popen(command(*arguments), stdout=out, stderr=out, cwd=ROOT, env=surroundings(home))
    serving = Serving(process, f"http://127.0.0.1:{port}", log, home / "shoal" / "voices")
    if wait:
        serving.wait_until_ready()
    return serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = start(tmp_path_factory.mktemp("server"), slots=8, body_seconds=2, header_seconds=2)
    yield serving
    assert serving.end() == 0, serving.log.read_text()


Start = Callable[..., Serving]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Start]:
    started: list[Serving] = []

    def begin(**settings: object) -> Serving:
        started.append(start(tmp_path / f"home{len(started)}", **settings))
        return started[-1]

    yield begin
    for serving in started:
        serving.end()


@pytest.fixture
def forked_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process that checks the device from the one that forks engines, which has imported torch."""

    def context(method: str) -> BaseContext:
        engine_forks.fork_server()
        return multiprocessing.get_context("forkserver")

    if engine_forks.POSSIBLE:
        monkeypatch.setattr(preflight, "multiprocessing", SimpleNamespace(get_context=context))


@pytest.fixture(scope="session")
def http(server: Serving) -> httpx.Client:
    return server.client()


@pytest.fixture(scope="session")
def recording() -> bytes:
    """Two seconds of audio that are accepted as a voice."""
    seconds = np.arange(2 * 16_000) / 16_000
    wave = 0.3 * np.sin(2 * np.pi * 180 * seconds) * (1 + np.sin(2 * np.pi * 3 * seconds)) / 2
    return encode_file(wave.astype(np.float32), "wav", 16_000)


def samples_of(audio: bytes) -> np.ndarray:
    """Return the 16-bit samples of a wav file as wide integers, which can be subtracted."""
    from shoal.audio.decode import AudioLimits, read_audio

    heard = read_audio(io.BytesIO(audio), 16_000, AudioLimits(min_seconds=0.0))
    return np.rint(heard.samples * 32768).astype(np.int32)
