"""Two replicas behind one port: the same APIs, and what happens when one dies, is replaced or taken down.

The tests share one cluster and stand in the order of its life: the last one takes it down.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ormsgpack

from tests.cluster.conftest import SLOTS, Cluster
from tests.lazy import LazyModule
from tests.server.conftest import samples_of, signal_all, slowed
from tests.waiting import wait_until
from tests.websocket import connect

openai = LazyModule("openai")
SHORT = {"text": "Hello there.", "max_new_tokens": 10, "seed": 3}
LONGEST = 200  # frames: far more than one pulse of `begin_speaking` generates; the seed's speech does not end before
PULSE_SECONDS = 0.05
WAV_HEADER = 44
LONG = {"text": "Hello there.", "max_new_tokens": 100, "streaming": True, "seed": 10, "temperature": 1.5, "top_p": 1.0}


def test_health_counts_the_replicas_and_workers_describe_them(cluster: Cluster) -> None:
    answer = cluster.health()
    assert (answer.status_code, answer.json()["status"], answer.json()["ready"]) == (200, "ok", 2)
    workers = cluster.workers()
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert len({worker["pid"] for worker in workers}) == 2
    assert all(worker["state"] == "ready" and worker["restarts"] == 0 for worker in workers)
    # Half a GPU each is one GPU.
    assert [worker["gpus"] for worker in workers] == [["0"], ["0"]]


def test_the_same_request_sounds_the_same_from_every_replica(cluster: Cluster) -> None:
    with cluster.client() as http:
        answers = [http.post("/v1/tts", json=SHORT) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert all(worker["requests"] for worker in cluster.workers())
    assert all(len(answer.headers.get_list("x-request-id")) == 1 for answer in answers)


def test_audio_is_streamed_while_it_is_generated(cluster: Cluster) -> None:
    with cluster.client() as http, http.stream("POST", "/v1/tts", json=LONG) as answer:
        pieces = list(answer.iter_raw())
    assert len(pieces) > 5
    assert len(samples_of(b"".join(pieces))) == 100 * 640


def test_errors_keep_their_formats(cluster: Cluster) -> None:
    with cluster.client() as http:
        fish = http.post("/v1/tts", json={**SHORT, "reference_id": "nobody"})
        assert (fish.status_code, fish.json()["message"]) == (404, "there is no voice 'nobody'")
        spoken = http.post("/v1/audio/speech", json={"model": "tts-1", "input": "Hi.", "voice": "nobody"})
        assert (spoken.status_code, spoken.json()["error"]["code"]) == (404, "voice_not_found")


def test_recordings_are_encoded_and_decoded_again(cluster: Cluster, recording: bytes) -> None:
    packed = {"content-type": "application/msgpack"}
    with cluster.client() as http:
        encoded = http.post("/v1/vqgan/encode", content=ormsgpack.packb({"audios": [recording]}), headers=packed)
        decoded = http.post("/v1/vqgan/decode", content=encoded.content, headers=packed)
        noise = http.post("/v1/vqgan/encode", content=ormsgpack.packb({"audios": [b"noise"]}), headers=packed)
    assert len(ormsgpack.unpackb(decoded.content)["audios"][0]) == 2 * 2 * 16_000
    assert noise.status_code == 400


def test_openais_client_speaks(cluster: Cluster) -> None:
    with cluster.client() as http:
        client = openai.OpenAI(api_key="any", base_url=f"{cluster.url}/v1", max_retries=0, http_client=http)
        more = {"max_new_tokens": 10, "seed": 3}
        answer = client.audio.speech.create(
            model="tts-1", voice="alloy", input="Hello there.", response_format="wav", extra_body=more
        )
    assert len(samples_of(answer.content)) == 10 * 640


def test_fish_audios_client_speaks_plain_and_live(cluster: Cluster) -> None:
    from fishaudio import FishAudio
    from fishaudio.types import TTSConfig

    with cluster.client() as http:
        client = FishAudio(api_key="any", base_url=cluster.url, httpx_client=http)
        config = TTSConfig(format="wav", max_new_tokens=10)
        plain = client.tts.convert(text="Hello there.", config=config)
        live = b"".join(client.tts.stream_websocket(iter(["Hello there. ", "And more."]), config=config))
    assert plain.startswith(b"RIFF")
    assert live.startswith(b"RIFF")


def test_a_live_session_ends_with_its_reason(cluster: Cluster) -> None:
    with connect(f"ws://127.0.0.1:{cluster.port}/v1/tts/live") as socket:
        start = {"text": "", "max_new_tokens": 10, "seed": 5, "format": "pcm"}
        for event in ({"event": "start", "request": start}, {"event": "text", "text": "Hello."}, {"event": "stop"}):
            socket.send(ormsgpack.packb(event))
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["event"] != "finish":  # the socket stays open for another session
            heard.append(ormsgpack.unpackb(socket.recv(timeout=240)))  # type: ignore[arg-type]
    assert [event["event"] for event in heard[:-1]] == ["audio"] * (len(heard) - 1)
    assert heard[-1]["reason"] == "stop"
    assert sum(len(event.get("audio", b"")) for event in heard) == 10 * 640 * 2


def test_a_voice_is_spoken_where_it_is_cached_and_found_by_every_replica(cluster: Cluster, recording: bytes) -> None:
    with cluster.client() as http:
        for name in ("one", "two", "three", "four"):
            form = {"id": name, "text": "What is said in it."}
            added = http.post("/v1/references/add", data=form, files={"audio": recording})
            assert added.status_code == 200, added.text
            answers = [http.post("/v1/tts", json={**SHORT, "reference_id": name}) for _ in range(3)]
            assert {answer.status_code for answer in answers} == {200}
        at_home = [Counter(worker["voices"]) for worker in cluster.workers()]
        assert sum(at_home, Counter()) == Counter(f"name:{name}" for name in ("one", "two", "three", "four"))
        # More at once than one replica has slots: the voice spills over to the other.
        long = {**LONG, "reference_id": "one", "streaming": False, "max_new_tokens": 60}
        with concurrent.futures.ThreadPoolExecutor(2 * SLOTS) as pool:
            statuses = list(pool.map(lambda _: http.post("/v1/tts", json=long).status_code, range(2 * SLOTS)))
    assert set(statuses) == {200}
    assert all("name:one" in worker["voices"] for worker in cluster.workers())


def test_a_batch_is_spread_over_the_same_cluster(cluster: Cluster) -> None:
    lines = [{"text": f"Line {number}.", "max_new_tokens": 10, "seed": 3} for number in range(20)]
    (cluster.home / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": ""}]))
    out = cluster.home / "out"
    command = ["batch", str(cluster.home / "in.jsonl"), "-o", str(out), "--model", "random:tiny", "--json"]
    command += ["--ray", "--gpus", "0"]
    first = cluster.run(*command, "--address", "auto", "--replicas", "1", "--cpus", "0.5", "--slots", "4")
    assert first.returncode == 1, first.stderr
    assert "line 21: text" in first.stderr
    assert {key: json.loads(first.stdout)[key] for key in ("done", "failed")} == {"done": 20, "failed": 1}
    assert all(len(samples_of(path.read_bytes())) == 10 * 640 for path in out.glob("*.wav"))
    reported = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in reported] == list(range(1, 22))
    again = cluster.run(*command, "--address", "auto")
    assert json.loads(again.stdout)["done_before"] == 20


def test_a_client_that_disconnects_frees_its_slot(cluster: Cluster) -> None:
    with cluster.client() as http, http.stream("POST", "/v1/tts", json={**LONG, "max_new_tokens": 1500}) as answer:
        next(answer.iter_raw())

    def idle() -> bool:
        return not any(worker["in_flight"] or worker["engine"]["running"] for worker in cluster.workers())

    wait_until(idle, interval=0.1)
    assert sum(worker["cancelled"] for worker in cluster.workers()) == 1


@dataclass
class Listener:
    """A streamed request that is on its way: how it ends, and the bytes that were heard of it."""

    http: httpx.Client
    frames: int
    heard: int = 0
    end: str = ""

    def listen(self) -> None:
        try:
            with self.http.stream("POST", "/v1/tts", json={**LONG, "max_new_tokens": self.frames}) as answer:
                for piece in answer.iter_raw():
                    self.heard += len(piece)
            self.end = str(answer.status_code)
        except httpx.TransportError as broken:
            self.end = type(broken).__name__


def in_flight(cluster: Cluster) -> list[int]:
    return [worker["in_flight"] for worker in cluster.workers()]


def fill_every_slot(cluster: Cluster, listeners: list[Listener], pool: concurrent.futures.Executor) -> list[Any]:
    """Send one request after the other to paused engines, so that the router knows the load of the ones before."""
    running = []
    for number, listener in enumerate(listeners, 1):
        running.append(pool.submit(listener.listen))
        wait_until(lambda number=number: sum(in_flight(cluster)) == number, interval=0.1)  # type: ignore[misc]
    assert in_flight(cluster) == [SLOTS, SLOTS]
    return running


def begin_speaking(engines: list[int], listeners: list[Listener]) -> None:
    """Let paused engines run in short pulses until every client has heard something, and none the end.

    Between pulses they stand still ten times as long: audio must reach the clients before much more of it is generated.
    """
    while not all(listener.heard for listener in listeners):
        signal_all(engines, signal.SIGCONT)
        time.sleep(PULSE_SECONDS)
        signal_all(engines, signal.SIGSTOP)
        time.sleep(10 * PULSE_SECONDS)
    assert not any(listener.end for listener in listeners)


def all_have_arrived(counts: list[int]) -> bool:
    return sum(counts) == 4 * SLOTS and min(counts) > SLOTS


@contextlib.contextmanager
def paused_engines(cluster: Cluster) -> Iterator[list[int]]:
    """Stop the engine processes: what is running stays running, and new requests wait. Yields their ids."""
    engines = [worker["engine_pid"] for worker in cluster.workers()]
    signal_all(engines, signal.SIGSTOP)
    try:
        yield engines
    finally:
        signal_all(engines, signal.SIGCONT)


def test_a_killed_replica_is_replaced_and_its_waiting_requests_run_elsewhere(cluster: Cluster) -> None:
    """Long speeches fill every slot of both replicas; short ones wait behind them, at both."""
    sizes = {frames: WAV_HEADER + frames * 640 * 2 for frames in (LONGEST, 40)}
    with contextlib.ExitStack() as clients, concurrent.futures.ThreadPoolExecutor(4 * SLOTS) as pool:
        https = [clients.enter_context(cluster.client()) for _ in range(4 * SLOTS)]
        speaking, waiting = ([Listener(http, size) for http in https[half::2]] for half, size in enumerate(sizes))
        with paused_engines(cluster) as engines:
            running = fill_every_slot(cluster, speaking, pool)
            begin_speaking(engines, speaking)
            running += [pool.submit(each.listen) for each in waiting]
            # Ray passes over a replica that does not report its queue length in time, so the short ones need not be
            # divided evenly.
            wait_until(lambda: all_have_arrived(in_flight(cluster)), interval=0.1)
            victim = cluster.workers()[0]
            os.kill(victim["pid"], signal.SIGKILL)
        for each in running:
            each.result(240)
    assert all(each.heard == sizes[each.frames] for each in (*speaking, *waiting) if each.end == "200")
    # Only a client that has received audio sees an error, as a closed connection.
    assert {each.end for each in waiting} == {"200"}
    broken = [each for each in speaking if each.end != "200"]
    assert len(broken) == SLOTS
    assert all(each.end in ("RemoteProtocolError", "ReadError") for each in broken)
    assert all(0 < each.heard < sizes[LONGEST] for each in broken)
    cluster.wait_until(ready=2)
    back = cluster.workers()[victim["rank"]]
    assert back["pid"] != victim["pid"]
    assert back["restarts"] == 1


def frontends(cluster: Cluster) -> list[int]:
    """Return the ids of this cluster's frontend processes, by the titles that Ray gives its workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"ServeReplica:shoal:fronts" in (process / "cmdline").read_bytes():
                environment = (process / "environ").read_bytes()
                found += [int(process.name)] if str(cluster.scratch).encode() in environment else []
    return found


def test_a_request_whose_frontend_dies_gets_an_error_in_json(cluster: Cluster) -> None:
    with paused_engines(cluster), cluster.client() as http, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/v1/tts", json=SHORT)
        wait_until(lambda: any(in_flight(cluster)), lambda: cluster.log, interval=0.1)
        for frontend in frontends(cluster):
            os.kill(frontend, signal.SIGKILL)
        answer = waiting.result(240)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["statusCode"] == 503
    cluster.wait_until(ready=2)


def test_an_upgrade_to_another_model_fails_no_request(cluster: Cluster) -> None:
    ended, statuses = threading.Event(), Counter[int | str]()

    def go_on(number: int) -> None:
        with cluster.client() as http:
            while not ended.wait(0.5):  # without a pause the requests, not the upgrade, would take the cores
                answer = http.post("/v1/tts", json={**SHORT, "streaming": number % 2 == 0, "max_new_tokens": 20})
                statuses[answer.status_code] += 1

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(go_on, number) for number in range(3)]
        changed = ["--autoscale", "1:2", "--shrink-after", "1", "--cpus", "0.5", "--gpus", "0.5", "--slots", "2"]
        changed += ["--model", "random:tiny-s2", "--set", "request_seconds=600"]
        upgrade = cluster.run("cluster", "up", "--address", "auto", *changed, "--port", str(cluster.port))
        ended.set()
        for each in running:
            each.result(240)
    assert upgrade.returncode == 0, upgrade.stderr
    assert set(statuses) == {200}
    assert {(worker["model_info"]["model"], worker["engine"]["slots"]) for worker in cluster.workers()} == {
        ("random:tiny-s2", 2)
    }
    with cluster.client() as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "random:tiny-s2"


def test_the_number_of_replicas_follows_the_load(cluster: Cluster) -> None:
    """With the bounds of the upgrade before."""
    cluster.wait_until(ready=1)
    ended, statuses = threading.Event(), Counter[int | str]()

    def go_on(_: int) -> None:
        with cluster.client() as http:
            while not ended.is_set():
                statuses[http.post("/v1/tts", json={**LONG, "streaming": False}).status_code] += 1

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # A slow engine has the same load, and the cores are free for the second replica.
        with slowed(cluster.workers()[0]["engine_pid"]):
            running = [pool.submit(go_on, number) for number in range(4)]
            cluster.wait_until(ready=2)
        ended.set()
        for each in running:
            each.result(240)
    cluster.wait_until(ready=1)
    assert set(statuses) == {200}


def test_status_reports_the_cluster_and_down_stops_it(cluster: Cluster) -> None:
    reported = cluster.run("cluster", "status", "--json")
    assert reported.returncode == 0, reported.stderr
    status = json.loads(reported.stdout)
    assert (status["state"], len(status["workers"])) == ("RUNNING", 1)
    assert "voices" in cluster.run("cluster", "status").stdout
    assert cluster.run("cluster", "down").returncode == 0
    assert cluster.process.wait(240) == 0, cluster.log
    nowhere = cluster.run("cluster", "status")
    assert nowhere.returncode == 2
    assert "no Ray cluster" in nowhere.stderr
