"""Load test with many clients, some of which disconnect: checks the audio, and measures memory and latency.

As a program it runs the full form and prints the figures: python -m tests.server.crowd [--model MODEL] [--requests 500]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from tests.server.conftest import Serving, samples_of, start
from tests.waiting import wait_until

PHRASES = ["Hello there.", "How are you?", "The quick brown fox.", "One, two.", "Good night."]


def request_of(number: int) -> dict[str, object]:
    """Limited to a fraction of a second, to have many short requests. An audio guard would reject them."""
    number %= 20
    return {
        "text": PHRASES[number % len(PHRASES)],
        "seed": number % 12,
        "max_new_tokens": 6 + number % 7,
        "streaming": number % 3 != 0,
    }


def key_of(number: int) -> str:
    return str(sorted(request_of(number).items()))


class Crowd:
    def __init__(self, server: Serving, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.solo: dict[str, np.ndarray] = {}
        self.health: list[float] = []
        self.disconnected = self.received = self.different = 0

    def learn(self, count: int) -> None:
        """Record the audio of each request when it runs alone."""
        with self.server.client() as http:
            for number in range(count):
                if key_of(number) not in self.solo:
                    answer = http.post("/v1/tts", json=request_of(number))
                    self.solo[key_of(number)] = samples_of(answer.content)

    async def run(self, requests: int, clients: int) -> None:
        numbers = asyncio.Queue[int]()
        for number in range(requests):
            numbers.put_nowait(number)
        limits = httpx.Limits(max_connections=clients + 1)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=240, limits=limits, trust_env=False, verify=False
        ) as http:
            watch = asyncio.create_task(self._watch(http))
            await asyncio.gather(*(self._client(http, numbers) for _ in range(clients)))
            watch.cancel()

    async def _client(self, http: httpx.AsyncClient, numbers: "asyncio.Queue[int]") -> None:
        while not numbers.empty():
            number = numbers.get_nowait()
            disconnects = self.rng.random() < 0.2
            async with http.stream("POST", "/v1/tts", json=request_of(number)) as answer:
                assert answer.status_code == 200, await answer.aread()
                audio = b""
                async for piece in answer.aiter_bytes():
                    audio += piece
                    if disconnects:
                        break
            if disconnects:
                self.disconnected += 1
            else:
                self._compare(number, samples_of(audio))

    def _compare(self, number: int, samples: np.ndarray) -> None:
        solo = self.solo[key_of(number)]
        # The last step of 16 bits may differ: chunk boundaries depend on timing.
        same = samples.shape == solo.shape and (not samples.size or np.abs(samples - solo).max() <= 1)
        self.received += 1
        self.different += not same

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            self.health.append(time.monotonic() - began)
            await asyncio.sleep(0.05)


def wait_until_settled(server: Serving) -> None:
    """Wait until no request is active in the engine or in flight in the server."""

    def settled() -> bool:
        text = http.get("/metrics").text
        return "\nshoal_engine_active_requests 0.0" in text and http.get("/ready").json()["in_flight"] == 0

    with server.client() as http:
        wait_until(settled, interval=0.05)


def full_form(model: str, requests: int, clients: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        server = start(Path(folder) / "home", spawn=True, model=model, slots=16, request_seconds=600, guard=False)
        try:
            crowd = Crowd(server, seed=2)
            crowd.learn(20)
            asyncio.run(crowd.run(requests=clients, clients=clients))
            before, began = server.memory(), time.monotonic()
            crowd.health.clear()
            asyncio.run(crowd.run(requests=requests, clients=clients))
            seconds = time.monotonic() - began
            late = sorted(crowd.health)
            return {
                "model": model,
                "clients": clients,
                "requests": requests,
                "seconds": round(seconds, 1),
                "received": crowd.received,
                "disconnected": crowd.disconnected,
                "unlike_solo": crowd.different,
                "server_memory_before": before,
                "server_memory_growth": server.memory() - before,
                "health_p50_ms": round(1000 * late[len(late) // 2], 1),
                "health_p95_ms": round(1000 * late[int(len(late) * 0.95)], 1),
            }
        finally:
            server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=64)
    found = full_form(**vars(parser.parse_args()))
    print(json.dumps(found, indent=2))
    sys.exit(0 if not found["unlike_solo"] else 1)


if __name__ == "__main__":
    main()
