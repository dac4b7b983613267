"""Load tests against servers with known delays."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from shoal.errors import GenerationFailed, InvalidRequest
from shoal.tools.bench.load.audio_meter import AudioMeter
from shoal.tools.bench.load.client import LoadTarget, parse_target, send_request
from shoal.tools.bench.load.http import open_client
from shoal.tools.bench.load.playback import stalled_seconds
from shoal.tools.bench.load.run import LoadPlan, run_load, target_names
from shoal.tools.bench.load.stage import Arrivals, LoadStage, arrival_times, parse_stages
from shoal.tools.bench.load.summary import Objective
from shoal.tools.bench.report.metrics import metrics
from tests.cli.conftest import Shoal, shoal  # noqa: F401
from tests.tools.bench.virtual import RATE, VirtualAnswer, VirtualLoop, VirtualServer, VirtualServers

OPENAI = parse_target("http://fake:1")


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.events.new_event_loop", VirtualLoop)


def measured(server: VirtualServer, stages: str, arrivals: Arrivals, seconds: float = 20.0, **plan: object) -> dict:
    document = run_load(
        [OPENAI], LoadPlan(parse_stages(stages, arrivals, seconds=seconds), **plan), progress=False, http=server
    )
    assert document["complete"]
    return document["runs"][0]


@pytest.mark.usefixtures("virtual")
def test_known_delays_are_measured_exactly() -> None:
    stage = measured(VirtualServer(first=0.25, gap=0.05, pieces=11), "3", "closed")["stages"][0]
    assert stage["first_audio"]["p50"] == pytest.approx(0.25)
    assert stage["latency"]["p99"] == pytest.approx(0.25 + 10 * 0.05)
    assert stage["rtf"]["mean"] == pytest.approx(0.75 / 1.1)
    # Three clients with requests of 0.75 s: four requests per second with 1.1 s of audio each.
    assert stage["throughput"] == pytest.approx(4, rel=0.05)
    assert stage["audio_per_second"] == pytest.approx(4.4, rel=0.05)
    assert stage["errors"] == {}
    assert stage["sender_late"]["max"] == pytest.approx(0)


@pytest.mark.usefixtures("virtual")
def test_open_loop_latency_includes_the_time_in_the_queue() -> None:
    """One slot, 0.1 s of work, 8 requests/s: the M/D/1 queue waits rho / (2 mu (1 - rho)) = 0.2 s on average."""
    server = VirtualServer(first=0.1, pieces=1, slots=1)
    stage = measured(server, "8", "open", seconds=1000.0)["stages"][0]
    assert stage["requests"] == pytest.approx(8_000, rel=0.03)
    assert stage["first_audio"]["mean"] == pytest.approx(0.1 + 0.2, rel=0.1)


@pytest.mark.usefixtures("virtual")
def test_the_search_finds_the_highest_rate_that_meets_the_objective() -> None:
    """Four slots of 0.5 s serve eight requests per second; beyond that the queue grows and audio starts too late."""
    server = VirtualServer(first=0.5, pieces=1, slots=4)
    run = measured(server, "1", "open", seconds=300.0, search=True, objective=Objective(first_audio=1.5, share=0.95))
    assert 6.0 < run["highest_rate"] < 8.0
    kept = {stage["load"]: stage["kept"] for stage in run["stages"]}
    assert kept[run["highest_rate"]]
    assert not any(holds for rate, holds in kept.items() if rate > run["highest_rate"])
    assert list(kept) == sorted(kept)


@pytest.mark.usefixtures("virtual")
def test_a_server_that_never_meets_the_objective_has_no_highest_rate() -> None:
    server = VirtualServer(first=2.0)
    assert measured(server, "4", "open", search=True)["highest_rate"] is None


@pytest.mark.usefixtures("virtual")
def test_errors_are_counted_by_kind_and_lower_goodput() -> None:
    stage = measured(VirtualServer(fails=4), "2", "closed", warm_up=0)["stages"][0]
    refused = stage["errors"]["HTTP 429"]
    assert refused == stage["requests"] // 4
    assert stage["good_share"] == pytest.approx(0.75, abs=0.01)
    assert stage["goodput"] < stage["throughput"] + 1e-9


@pytest.mark.usefixtures("virtual")
def test_complete_answers_without_audio_are_counted_apart_from_errors() -> None:
    run = measured(VirtualServer(silent=4), "2", "closed", warm_up=0)
    stage = run["stages"][0]
    assert stage["errors"] == {}
    assert stage["empty"] == stage["requests"] // 4
    assert stage["latency"]["count"] == stage["first_audio"]["count"] == stage["requests"] - stage["empty"]
    assert stage["good_share"] == pytest.approx(0.75, abs=0.01)
    compared = {metric.name: metric for metric in metrics({"kind": "load", "runs": [run]})}
    assert compared["errors"].values == [0.0]
    assert len(compared["latency"].values) == stage["latency"]["count"]


@pytest.mark.usefixtures("virtual")
def test_a_server_without_audio_fails_the_warm_up() -> None:
    with pytest.raises(GenerationFailed, match="no audio"):
        measured(VirtualServer(silent=1), "1", "closed")


@pytest.mark.usefixtures("virtual")
def test_audio_slower_than_real_time_stalls_playback() -> None:
    """0.1 s of audio every 0.13 s: 30 ms are missing after each of 4 pieces, until the buffer is used up."""
    stage = measured(VirtualServer(gap=0.13, pieces=5), "1", "closed")["stages"][0]
    starved = {each["buffer"]: each for each in stage["starved"]}
    assert starved[0.05]["share"] == starved[0.1]["share"] == 1.0
    assert starved[0.05]["stalled_seconds"] == pytest.approx(4 * 0.03 - 0.05)
    assert starved[0.1]["stalled_seconds"] == pytest.approx(4 * 0.03 - 0.1)
    assert starved[0.2]["share"] == 0.0
    assert stage["good_share"] == 0.0


@pytest.mark.usefixtures("virtual")
def test_compared_servers_receive_the_same_texts() -> None:
    servers = {"fast:1": VirtualServer(first=0.1), "slow:1": VirtualServer(first=0.4)}
    targets = [parse_target(f"http://{name}") for name in servers]
    plan = LoadPlan(parse_stages("5", "open", seconds=20.0))
    runs = run_load(targets, plan, progress=False, http=VirtualServers(servers))["runs"]
    assert [run["stages"][0]["first_audio"]["p50"] for run in runs] == pytest.approx([0.1, 0.4])
    assert servers["fast:1"].bodies == servers["slow:1"].bodies
    texts = [json.loads(body)["input"] for body in servers["fast:1"].bodies]
    assert len(set(texts)) == len(texts)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("arrivals", ["closed", "open"])
def test_a_stage_can_end_after_a_number_of_requests(arrivals: Arrivals) -> None:
    plan = LoadPlan(parse_stages("2", arrivals, seconds=86_400.0, requests=10))
    document = run_load([OPENAI], plan, progress=False, http=VirtualServer(first=0.5, pieces=1))
    (stage,) = document["runs"][0]["stages"]
    assert len(stage["outcomes"]) == 10
    expected = 4.0 if arrivals == "closed" else 10 / stage["seconds"]  # two clients with requests of half a second
    assert stage["throughput"] == pytest.approx(expected, rel=0.05)


@pytest.mark.usefixtures("virtual")
def test_the_requests_of_a_burst_start_together_and_the_next_burst_after_their_end() -> None:
    server = VirtualServer(first=0.5, gap=0.25, pieces=3, slots=2)
    plan = LoadPlan(parse_stages("4", "burst", seconds=86_400.0, requests=10), warm_up=0)
    (stage,) = run_load([OPENAI], plan, progress=False, http=server)["runs"][0]["stages"]
    # Two slots: of four requests two begin when the first two end, after 1 s.
    due = [0.0] * 4 + [2.1] * 4 + [4.2] * 2
    assert [outcome["due"] for outcome in stage["outcomes"]] == pytest.approx(due)
    assert [outcome["first_audio"] for outcome in stage["outcomes"]] == pytest.approx(
        [0.5, 0.5, 1.5, 1.5] * 2 + [0.5] * 2
    )
    assert (stage["name"], stage["arrivals"], stage["load"]) == ("4 at once", "burst", 4)


@pytest.mark.usefixtures("virtual")
def test_bursts_end_with_the_time_of_the_stage() -> None:
    stage = measured(VirtualServer(first=1.0, pieces=1), "3", "burst", seconds=5.0)["stages"][0]
    assert stage["requests"] == 3 * 5
    assert stage["errors"] == {}


@pytest.mark.parametrize("text", ["1..4", "0", "2.5", "4001", "x"])
def test_invalid_bursts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a number of requests at once"):
        parse_stages(text, "burst", seconds=1.0)


@pytest.mark.usefixtures("virtual")
def test_a_ramp_of_clients_grows_to_its_end() -> None:
    stage = measured(VirtualServer(first=0.1, pieces=1), "1..4", "closed", seconds=40.0)["stages"][0]
    due = [outcome["due"] for outcome in stage["outcomes"]]
    quarters = [sum(at // 10 == quarter for at in due) for quarter in range(4)]
    assert quarters == pytest.approx([100, 200, 300, 400], rel=0.05)
    assert stage["ramp_from"] == 1


def test_poisson_arrivals_have_the_rate_and_a_ramp_climbs() -> None:
    times = list(arrival_times(LoadStage("open", 50, 50, 100.0), seed=1))
    assert len(times) == pytest.approx(5000, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
    ramp = list(arrival_times(LoadStage("open", 0.0001, 100, 100.0), seed=1))
    assert len(ramp) == pytest.approx(5000, rel=0.05)
    assert sum(at < 50 for at in ramp) == pytest.approx(1250, rel=0.1)


@pytest.mark.parametrize(
    ("arrivals", "buffer", "stalled"),
    [
        ([], 0.1, 0.0),
        ([(1.0, 5.0)], 0.0, 0.0),
        ([(1.0, 0.5), (1.4, 0.5), (1.9, 0.5)], 0.0, 0.0),
        ([(1.0, 0.5), (2.0, 0.5)], 0.1, 0.4),
        ([(1.0, 0.5), (2.0, 0.5), (2.9, 0.5)], 0.1, 0.4 + 0.4),
        ([(1.0, 2.0), (2.0, 0.5), (3.4, 0.5)], 0.0, 0.0),
    ],
)
def test_playback_stalls_when_audio_is_late(arrivals: list, buffer: float, stalled: float) -> None:
    assert stalled_seconds(arrivals, buffer) == pytest.approx(stalled)


def wav(seconds: float, rate: int = 44_100, extra: bytes = b"") -> bytes:
    from shoal.audio.wav import wav_header

    header = wav_header(rate, None)
    data = header.index(b"data")
    return header[:data] + extra + header[data:] + b"\0\0" * round(seconds * rate)


@pytest.mark.parametrize("step", [1, 7, 45, 100_000])
@pytest.mark.parametrize("extra", [b"", b"LIST\x03\0\0\0abc\0"])
def test_a_wav_header_is_not_counted_however_it_is_split(step: int, extra: bytes) -> None:
    content, meter = wav(0.1, extra=extra), AudioMeter(8000)
    seconds = sum(meter.feed(content[at : at + step]) for at in range(0, len(content), step)) + meter.end()
    assert seconds == pytest.approx(0.1)


def test_bare_pcm_counts_from_the_first_byte() -> None:
    meter = AudioMeter(8000)
    assert meter.feed(b"R") + meter.feed(b"I") + meter.end() == pytest.approx(2 / 16_000)
    assert AudioMeter(8000).feed(b"\1\2" * 8000) == pytest.approx(1.0)


def test_the_route_decides_the_api() -> None:
    assert parse_target("http://a:1").url == "http://a:1/v1/audio/speech"
    assert parse_target("http://a:1/v1/").url == "http://a:1/v1/audio/speech"
    assert parse_target("http://a:1", "fish") == LoadTarget("http://a:1/v1/tts", "fish")
    assert parse_target("http://a:1/behind/v1/tts").api == "fish"
    for url, api in (
        ("a:1", None),
        ("ftp://a", None),
        ("http://me:secret@a", None),
        ("http://a/v1/tts", "openai"),
        ("http://a", "soap"),
    ):
        with pytest.raises(InvalidRequest):
            parse_target(url, api)


def test_target_names_are_unique_and_short() -> None:
    urls = ("http://a:1", "http://b:1", "http://b:1/v1/tts", "http://c:1", "http://c:1")
    assert target_names([parse_target(url) for url in urls]) == [
        "a:1", "b:1 openai", "b:1 fish", "c:1 openai (4)", "c:1 openai (5)"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1..", "1.5", "99999", "1,,2"])
def test_invalid_loads_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_stages(text, "closed", seconds=1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("http://a", "http://b"),
        ("--compare", "http://a"),
        ("http://a", "--slo-buffer", "70"),
        ("http://a", "--find-rate", "--clients", "3"),
        ("http://a", "--find-rate", "--burst", "3"),
        ("http://a", "--rate", "fast"),
        ("http://a", "--clients", "1..4", "--requests", "10"),
        ("http://a", "--find-rate", "--requests", "10"),
        ("nowhere",),
    ],
)
def test_invalid_flags_are_rejected_before_any_request(shoal: Shoal, arguments: tuple[str]) -> None:  # noqa: F811
    assert shoal("load", *arguments).code == 2


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("how", [SystemExit(143), KeyboardInterrupt()], ids=["SIGTERM", "SIGINT"])
def test_a_signal_that_raises_inside_a_request_ends_the_stage_when_it_came(how: BaseException) -> None:
    class Interrupted(VirtualServer):
        @asynccontextmanager
        async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[VirtualAnswer]:
            if len(self.bodies) == 10:
                raise how
            async with super().post(url, body, headers) as answer:
                yield answer

    plan = LoadPlan(parse_stages("2", "closed", seconds=60.0))
    document = run_load([OPENAI], plan, progress=False, http=Interrupted(first=0.25, gap=0.05, pieces=11))
    assert not document["complete"]
    stage = document["runs"][0]["stages"][0]
    assert stage["requests"] == 7  # of ten two were for warming up, one was in flight
    assert stage["seconds"] == pytest.approx(4 * 0.75, abs=0.01)


class SlowServer:
    """Real sockets: every request is answered after `first` seconds, in `pieces` that come `gap` seconds apart."""

    def __init__(
        self, first: float, gap: float, pieces: int, kind: str = "audio/pcm", path: Path | None = None
    ) -> None:
        self.first, self.gap, self.pieces, self.kind = first, gap, pieces, kind
        self.answered = 0
        self.listener = unix_listener(path) if path else socket.create_server(("127.0.0.1", 0))
        self.url = "http://unix:1" if path else f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._run)

    def virtual_loop(self) -> VirtualLoop:
        """A loop with a clock of its own, in which this server answers, too."""
        loop = VirtualLoop()
        loop.create_task(asyncio.start_server(self._answer, sock=self.listener))
        return loop

    def _run(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._answer, sock=self.listener))
        self.loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.05))
        self.loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = writer.get_extra_info("socket")
        if line.family == socket.AF_INET:
            # Else the kernel holds the first piece back until the client has acknowledged the headers: 40 ms.
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                await asyncio.sleep(self.first)
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {self.kind}\r\n".encode())
                writer.write(b"transfer-encoding: chunked\r\n\r\n")
                for number in range(self.pieces):
                    await asyncio.sleep(self.gap if number else 0)
                    piece = b"\0\0" * (RATE // 10)
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                self.answered += 1
        writer.close()

    def __enter__(self) -> "SlowServer":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture
def slow_server() -> Iterator[SlowServer]:
    with SlowServer(first=0.2, gap=0.05, pieces=5) as server:
        yield server


def unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The names of Unix sockets have a short limit."""
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        yield Path(directory)


def test_over_real_sockets_known_delays_are_found_within_five_percent(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    plan = LoadPlan(parse_stages("8", "closed", seconds=2.5), warm_up=1)
    server = SlowServer(first=1.0, gap=0.25, pieces=5, path=short_path / "socket")
    # Both ends in one loop whose clock stands still while bytes are in transit; TCP may hand them over later.
    monkeypatch.setattr("asyncio.events.new_event_loop", server.virtual_loop)
    through = partial(aiohttp.UnixConnector, str(short_path / "socket"))
    monkeypatch.setattr(aiohttp, "TCPConnector", lambda resolver, **options: through(**options))
    with server.listener:
        stage = run_load([parse_target(server.url)], plan, progress=False)["runs"][0]["stages"][0]
    assert stage["errors"] == {}
    assert stage["requests"] >= 8
    for kind in ("min", "p99"):
        assert stage["first_audio"][kind] == pytest.approx(1.0, rel=0.05)
        assert stage["latency"][kind] == pytest.approx(2.0, rel=0.05)


def test_unreachable_servers_and_wrong_content_types_are_reported() -> None:
    plan = LoadPlan(parse_stages("1", "closed", seconds=1.0))
    with pytest.raises(GenerationFailed, match="no connection"):
        run_load([parse_target("http://127.0.0.1:9")], plan, progress=False)
    with SlowServer(0.0, 0.0, 1, kind="audio/mpeg") as server, pytest.raises(GenerationFailed, match="audio/mpeg"):
        run_load([parse_target(server.url)], plan, progress=False)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ntransfer-encoding: chunked\r\n\r\n"


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def request_error(connected: Connected, timeout: float = 60.0) -> str | None:
    """Send one request to a server whose connections `connected` handles; return the error of its outcome."""

    async def run() -> str | None:
        closed = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await connected(reader, writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            closed.set()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            target = parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with open_client(timeout) as http:
                outcome = await send_request(http, target, "Hello.", 0, 0.0, 0.0)
            await closed.wait()
            return outcome.error

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "cut off"),
        (HEAD, "cut off"),
        (HEAD + b"4\r\n\0\0", "cut off"),
        (HEAD + b"4\r\n\0\0\0\0\r\n", "cut off"),
        (HEAD + b"not a length\r\n", "cut off"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ncontent-length: 4\r\n\r\n\0\0", "cut off"),
        (b"not HTTP\r\n\r\n", "cut off"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "HTTP 503"),
        (b"HTTP/1.1 307 Elsewhere\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", "HTTP 307"),
        (HEAD + b"4\r\n\0\0\0\0\r\n0\r\n\r\n", None),
    ],
)
def test_incomplete_answers_are_reported_with_their_cause(answer: bytes, error: str | None) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")  # the whole request
        writer.write(answer)

    assert request_error(close) == error


@pytest.mark.parametrize("answer", [b"", HEAD, HEAD + b"4\r\n\0\0\0\0\r\n"])
def test_a_server_that_stops_sending_is_a_timeout(answer: bytes) -> None:
    async def stop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()  # the request, until the client closes the connection

    assert request_error(stop, timeout=0.1) == "timeout"


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    plan = LoadPlan(parse_stages("1", "closed", seconds=60.0, requests=1))
    with SlowServer(0.0, 0.0, 1) as server:
        assert run_load([parse_target(server.url)], plan, progress=False)["runs"][0]["stages"][0]["errors"] == {}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_finished_measurements(slow_server: SlowServer, tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "load.json"
    command = [sys.executable, "-m", "shoal.cli", "load", slow_server.url, "--clients", "2", "--seconds", "3600"]
    child = subprocess.Popen([*command, "--json", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    # A client sends its next request after the last has ended; the first two requests are the warm-up.
    while slow_server.answered < 8 and child.poll() is None:
        time.sleep(0.05)
    os.kill(child.pid, how)
    said, _ = child.communicate(timeout=240)
    assert child.returncode == 130, said
    document = json.loads(path.read_text())
    assert not document["complete"]
    stage = document["runs"][0]["stages"][0]
    assert stage["requests"] > 0
    assert stage["seconds"] < 3000  # not the hour that it was to last
    assert b"interrupted" in said
