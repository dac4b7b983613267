"""Soak test: all APIs at once, with disconnects, bad requests, killed engines, restarts of the server and a reload.

Every request must be answered or cut cleanly, and every answer must equal the answer to the same request alone: samples
within one step of 16 bits. After the disturbances a steady phase measures memory, file descriptors, threads and files.

As a program it runs the long form and prints the figures: scripts/soak [--requests 10000] [--model nano]
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ormsgpack
import websockets

from shoal.paths import rss_bytes
from tests import nano
from tests.server.conftest import Serving, free_port, start
from tests.waiting import wait_until
from tests.websocket import PATIENT

PHRASES = ("Hello there.", "How are you?", "The quick brown fox.", "One, two.", "Good night.")
MSGPACK = {"content-type": "application/msgpack"}
BAD = (
    ("/v1/tts", {"text": 5}),
    ("/v1/tts", {"text": "hi", "colour": "blue"}),
    ("/v1/tts", {"text": "hi", "reference_id": "nobody"}),
    ("/v1/audio/speech", {"model": "tts-1", "input": "", "voice": "alloy"}),
    ("/v1/audio/speech", {"model": "none", "input": "hi", "voice": "alloy"}),
    ("/v1/vqgan/decode", {"tokens": [[[1, 2], [3]]]}),
    ("/invocations", ["not an object"]),
)
ANSWER_SECONDS = 300.0
REFUSED = (429, 500, 503)  # while an engine or the server restarts; each with a JSON body


@dataclass(frozen=True)
class Probe:
    """A request that has the same answer every time. The id of its `kind` and number names its solo answer."""

    kind: str
    number: int

    @property
    def speech(self) -> dict[str, Any]:
        """Limited to a fraction of a second, to have many short requests. The speech guard would reject them."""
        return {
            "text": PHRASES[self.number % len(PHRASES)],
            "seed": self.number % 7,
            "max_new_tokens": 4 + self.number % 9,
            "format": "pcm",
        }


class Cut(Exception):
    """The answer began and ended before its end."""

    def __init__(self, received: bytes) -> None:
        super().__init__(f"cut after {len(received)} bytes")
        self.received = received


class Refused(Exception):
    """Answered with an error status and a JSON body, or not connected while the server was down."""


class Clients:
    """Sends probes through all APIs."""

    def __init__(self, http: httpx.AsyncClient, port: int, codebooks: int) -> None:
        self._http, self._port = http, port
        self._kinds: dict[str, Callable[[Probe], AsyncGenerator[bytes, None]]] = {
            "fish": lambda probe: self._post("/v1/tts", {**probe.speech, "streaming": probe.number % 2 == 0}),
            "msgpack": lambda probe: self._post("/v1/tts", probe.speech, packed=True),
            "openai": lambda probe: self._post("/v1/audio/speech", _openai(probe.speech)),
            "sagemaker": lambda probe: self._post("/invocations", probe.speech),
            "decode": lambda probe: self._post("/v1/vqgan/decode", _codes(codebooks, probe.number), packed=True),
            "live": self._live,
        }

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    def send(self, probe: Probe) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the answer. Raises Refused before the first, Cut after it."""
        return self._kinds[probe.kind](probe)

    async def send_bad(self, number: int) -> int:
        path, body = BAD[number % len(BAD)]
        try:
            return (await self._http.post(path, json=body)).status_code
        except httpx.TransportError as problem:
            raise Refused from problem

    async def wait_for_server(self) -> None:
        """Wait until the server accepts requests again, so that a restart does not use up the requests of the test."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                with suppress(httpx.TransportError):
                    if (await self._http.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def _post(self, path: str, body: dict[str, Any], *, packed: bool = False) -> AsyncGenerator[bytes, None]:
        content = {"content": ormsgpack.packb(body), "headers": MSGPACK} if packed else {"json": body}
        received = b""
        try:
            async with self._http.stream("POST", path, **content) as answer:
                if answer.status_code != 200:
                    error = await answer.aread()
                    assert answer.status_code in REFUSED, (answer.status_code, error)
                    assert isinstance(json.loads(error), dict)
                    raise Refused(answer.status_code)
                async for piece in answer.aiter_bytes():
                    received += piece
                    yield piece
        except httpx.TimeoutException as problem:
            raise AssertionError(f"no answer in {ANSWER_SECONDS:g} s: {path}") from problem
        except httpx.TransportError as problem:
            raise (Cut(received) if received else Refused()) from problem

    async def _live(self, probe: Probe) -> AsyncGenerator[bytes, None]:
        received, url = b"", f"ws://127.0.0.1:{self._port}/v1/tts/live"
        request, text = {**probe.speech, "text": ""}, probe.speech["text"]
        events = ({"event": "start", "request": request}, {"event": "text", "text": text}, {"event": "stop"})
        try:
            async with asyncio.timeout(ANSWER_SECONDS), websockets.connect(url, **PATIENT) as socket:
                for event in events:
                    await socket.send(ormsgpack.packb(event))
                async for message in socket:
                    event = ormsgpack.unpackb(message)
                    if event["event"] == "finish":
                        if event["reason"] == "stop":
                            return
                        break
                    received += event.get("audio", b"")
                    yield event.get("audio", b"")
        except TimeoutError as problem:
            raise AssertionError("no answer from a live session") from problem
        except (websockets.WebSocketException, OSError) as problem:
            raise (Cut(received) if received else Refused()) from problem
        raise Cut(received) if received else Refused


def _openai(speech: dict[str, Any]) -> dict[str, Any]:
    rest = {name: speech[name] for name in ("seed", "max_new_tokens")}
    return {"model": "tts-1", "input": speech["text"], "voice": "alloy", "response_format": "pcm", **rest}


def _codes(codebooks: int, number: int) -> dict[str, Any]:
    codes = np.random.default_rng(number).integers(0, 100, (codebooks, 3 + number % 5))
    return {"tokens": [codes.tolist()]}


def equal(kind: str, received: bytes, solo: bytes, *, prefix: bool = False) -> bool:
    """Return whether an answer or its start equals the answer alone: 16-bit samples differ by at most one."""
    if len(received) > len(solo) or (not prefix and len(received) < len(solo)):
        return False
    if kind == "decode":
        return prefix or _float16_equal(received, solo)
    size = min(len(received), len(solo)) // 2
    mine, other = (np.frombuffer(each[: 2 * size], "<i2").astype(np.int32) for each in (received, solo))
    return not size or int(np.abs(mine - other).max()) <= 1


def _float16_equal(received: bytes, solo: bytes) -> bool:
    mine, other = (ormsgpack.unpackb(each)["audios"] for each in (received, solo))
    pairs = [(np.frombuffer(a, "<f2"), np.frombuffer(b, "<f2")) for a, b in zip(mine, other, strict=True)]
    return all(np.allclose(a, b, rtol=0, atol=2e-3) for a, b in pairs)


@dataclass
class Figures:
    """Memory, threads and file descriptors of one process at one time."""

    requests: int
    server_bytes: int
    engine_bytes: int
    descriptors: int
    threads: int


@dataclass
class Soak:
    server: Serving
    port: int
    restart: Callable[[], Serving]
    rng: random.Random
    codebooks: int
    solo: dict[Probe, bytes] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    series: list[Figures] = field(default_factory=list)
    sent: int = 0
    killed: int = 0  # process id of the engine that was killed last

    async def learn(self, numbers: int) -> None:
        """Record the answer to every probe when it runs alone."""
        async with self._clients() as clients:
            for kind in clients.kinds:
                for number in range(numbers):
                    probe = Probe(kind, number)
                    self.solo[probe] = b"".join([piece async for piece in clients.send(probe)])
                    assert self.solo[probe], probe

    async def run(self, requests: int, workers: int, disturb: Callable[[], Awaitable[None]] | None = None) -> None:
        """Send requests from `workers` tasks, with `disturb` beside them until they are done."""
        end = self.sent + requests
        async with self._clients() as clients:
            disturbing = asyncio.create_task(disturb()) if disturb is not None else None
            await asyncio.gather(*(self._worker(clients, end) for _ in range(workers)))
            if disturbing is not None:
                await disturbing

    def measure(self) -> Figures:
        """Append the current figures of server and engine."""
        engine = self.engine_id
        figures = Figures(
            self.sent,
            rss_bytes(self.server.process.pid),
            rss_bytes(engine),
            sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (self.server.process.pid, engine)),
            sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in (self.server.process.pid, engine)),
        )
        self.series.append(figures)
        return figures

    @property
    def engine_id(self) -> int:
        """Return the engine process: the child of the server that holds most memory."""
        return max(children_of(self.server.process.pid), key=rss_bytes)

    def kill_engine(self) -> None:
        self.killed = self.engine_id
        os.kill(self.killed, signal.SIGKILL)
        self.outcomes["engine killed"] += 1

    async def wait_until_ready(self) -> None:
        """Wait until the server has replaced the killed engine."""
        await asyncio.to_thread(wait_until, lambda: self.killed not in children_of(self.server.process.pid))
        await asyncio.to_thread(self.server.wait_until_ready)

    async def stop_and_start(self) -> None:
        """End the server with SIGTERM while requests run, and start it again on the same port."""
        assert await asyncio.to_thread(self.server.end) == 0, self.server.log.read_text()[-5000:]
        self.server = await asyncio.to_thread(self.restart)
        self.outcomes["server stopped"] += 1

    async def reload(self) -> None:
        self.server.process.send_signal(signal.SIGUSR2)
        self.outcomes["reloaded"] += 1

    def _clients(self) -> "OpenClients":
        return OpenClients(self.server.url, self.port, self.codebooks)

    async def _worker(self, clients: Clients, end: int) -> None:
        probes = sorted(self.solo, key=str)
        while self.sent < end:
            self.sent += 1
            roll, number = self.rng.random(), self.sent
            if roll < 0.1:
                await self._send_bad(clients, number)
            else:
                await self._send(clients, self.rng.choice(probes), disconnects=roll < 0.4)

    async def _send_bad(self, clients: Clients, number: int) -> None:
        try:
            status = await clients.send_bad(number)
        except Refused:
            self.outcomes["bad, not connected"] += 1
            await clients.wait_for_server()
            return
        self.outcomes["bad, refused"] += 1
        if not (400 <= status < 500 or status == 503):
            self.wrong.append(f"bad request {number % len(BAD)} was answered with {status}")

    async def _send(self, clients: Clients, probe: Probe, *, disconnects: bool) -> None:
        received, outcome = b"", "complete"
        # Half of those that disconnect do so at any time, the others at the first piece of the answer.
        patience = self.rng.random() * 0.2 if disconnects and self.rng.random() < 0.5 else None
        try:
            async with asyncio.timeout(patience), aclosing(clients.send(probe)) as pieces:
                async for piece in pieces:
                    received += piece
                    if disconnects and patience is None:
                        outcome = "disconnected"
                        break
        except TimeoutError:
            outcome = "disconnected"
        except Refused:
            self.outcomes["refused"] += 1
            await clients.wait_for_server()
            return
        except Cut:
            outcome = "cut"
        except AssertionError as problem:
            outcome = "wrong"
            self.wrong.append(f"{probe}: {problem}")
        self.outcomes[outcome] += 1
        self._check(probe, received, prefix=outcome != "complete")

    def _check(self, probe: Probe, received: bytes, *, prefix: bool = False) -> None:
        if not equal(probe.kind, received, self.solo[probe], prefix=prefix):
            self.wrong.append(f"{probe} differs from its solo answer")


def children_of(pid: int) -> list[int]:
    """Return the ids of the processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


class OpenClients:
    def __init__(self, url: str, port: int, codebooks: int) -> None:
        self._codebooks = codebooks
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False)
        self._port = port

    async def __aenter__(self) -> Clients:
        return Clients(await self._http.__aenter__(), self._port, self._codebooks)

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()


def open_soak(home: Path, model: str, seed: int) -> Soak:
    port = free_port()
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(home / "tmp")

    # Speech that is kept for a while would hide what a request leaves behind.
    settings = {"guard": False, "request_seconds": 240, "drain_seconds": 240, "kept_speech_bytes": 0}

    def begin() -> Serving:
        return start(home / "home", spawn=True, model=model, port=port, slots=8, **settings)

    codebooks = nano.CODEBOOKS if model == "nano" else 10  # the released families have ten
    return Soak(begin(), port, begin, random.Random(seed), codebooks)


def temporary_files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in (home / "tmp").rglob("*"))


async def long_form(soak: Soak, requests: int, workers: int, kills: int, stops: int) -> None:
    """Half of the requests with disturbances, half without, during which memory is measured."""
    await soak.learn(numbers=20)

    async def disturb() -> None:
        disturbances = [soak.stop_and_start] * stops + [_kill(soak)] * kills + [soak.reload]
        soak.rng.shuffle(disturbances)
        for number, act in enumerate(disturbances, start=1):
            due = requests // 2 * number // (len(disturbances) + 1)
            while soak.sent < due:
                await asyncio.sleep(0.1)
            await soak.wait_until_ready()
            await act()
            print(f"{soak.sent} requests, {dict(soak.outcomes)}", file=sys.stderr, flush=True)
        await soak.wait_until_ready()

    await soak.run(requests // 2, workers, disturb)
    for _ in range(10):
        await soak.run(requests // 20, workers)
        print(soak.measure(), file=sys.stderr, flush=True)


def _kill(soak: Soak) -> Callable[[], Awaitable[None]]:
    async def kill() -> None:
        soak.kill_engine()

    return kill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, began = Path(folder), time.monotonic()
        soak = open_soak(home, given.model, given.seed)
        try:
            asyncio.run(long_form(soak, given.requests, given.workers, given.kills, given.stops))
        finally:
            soak.server.end()
        report = {
            "model": given.model,
            "requests": soak.sent,
            "seconds": round(time.monotonic() - began, 1),
            "outcomes": dict(sorted(soak.outcomes.items())),
            "wrong": soak.wrong,
            "series": [vars(each) for each in soak.series],
            "temporary_files": temporary_files(home),
        }
    print(json.dumps(report, indent=2))
    sys.exit(bool(soak.wrong or report["temporary_files"]))


if __name__ == "__main__":
    main()
