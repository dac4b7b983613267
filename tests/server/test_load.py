"""Many at once: nothing lost, nothing mixed up, and the event loop stays free."""

import asyncio
import random
import time

import httpx
import numpy as np
import pytest

from tests.server.conftest import Serving, samples_of

PHRASES = ["Hello there.", "How are you?", "The quick brown fox.", "One, two.", "Good night."]


def request_of(number: int) -> dict[str, object]:
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
        self.server, self.dice = server, random.Random(seed)
        self.solo: dict[str, np.ndarray] = {}
        self.health: list[float] = []
        self.left = self.heard = 0

    def learn(self, count: int) -> None:
        """What each request sounds like alone."""
        with self.server.client() as http:
            for number in range(count):
                if key_of(number) not in self.solo:
                    answer = http.post("/v1/tts", json=request_of(number))
                    self.solo[key_of(number)] = samples_of(answer.content)

    async def come(self, requests: int, clients: int) -> None:
        numbers = asyncio.Queue[int]()
        for number in range(requests):
            numbers.put_nowait(number)
        limits = httpx.Limits(max_connections=clients + 1)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits, trust_env=False) as http:
            watch = asyncio.create_task(self._watch(http))
            await asyncio.gather(*(self._client(http, numbers) for _ in range(clients)))
            watch.cancel()

    async def _client(self, http: httpx.AsyncClient, numbers: "asyncio.Queue[int]") -> None:
        while not numbers.empty():
            number = numbers.get_nowait()
            leave = self.dice.random() < 0.2
            async with http.stream("POST", "/v1/tts", json=request_of(number)) as answer:
                assert answer.status_code == 200, await answer.aread()
                audio = b""
                async for piece in answer.aiter_bytes():
                    audio += piece
                    if leave:
                        break
            if leave:
                self.left += 1
            else:
                self._compare(number, samples_of(audio))

    def _compare(self, number: int, samples: np.ndarray) -> None:
        solo = self.solo[key_of(number)]
        assert samples.shape == solo.shape
        assert np.abs(samples - solo).max() <= 1
        self.heard += 1

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            self.health.append(time.monotonic() - began)
            await asyncio.sleep(0.05)


def settled(server: Serving) -> bool:
    with server.client() as http:
        for _ in range(100):
            text = http.get("/metrics").text
            if "\nshoal_engine_live 0.0" in text and http.get("/ready").json()["under_way"] == 0:
                return True
            time.sleep(0.05)
    return False


def test_sixteen_clients_hear_what_they_would_hear_alone(server: Serving) -> None:
    crowd = Crowd(server, seed=1)
    crowd.learn(20)
    asyncio.run(crowd.come(requests=60, clients=16))
    assert crowd.heard + crowd.left == 60
    assert crowd.left > 3
    assert settled(server)


@pytest.mark.slow
def test_sixty_four_clients_and_five_hundred_requests(server: Serving) -> None:
    crowd = Crowd(server, seed=2)
    crowd.learn(20)
    asyncio.run(crowd.come(requests=100, clients=64))
    before = server.memory()
    crowd.health.clear()
    asyncio.run(crowd.come(requests=500, clients=64))
    assert crowd.heard + crowd.left == 600
    assert settled(server)
    assert server.memory() - before < 64 << 20
    late = sorted(crowd.health)[int(len(crowd.health) * 0.95)]
    assert late < 0.05


def test_leaving_frees_the_slot_at_once(server: Serving) -> None:
    with server.client() as http:
        with http.stream(
            "POST", "/v1/tts", json={"text": "Hello.", "max_new_tokens": 900, "streaming": True, "seed": 12}
        ) as answer:
            next(answer.iter_bytes())
        began = time.monotonic()
        assert settled(server)
        assert time.monotonic() - began < 2.0


def test_a_whole_answer_is_given_up_when_nobody_waits(server: Serving) -> None:
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post(
            "/v1/tts", json={"text": "Hello.", "max_new_tokens": 900, "temperature": 1.5, "top_p": 1.0}, timeout=0.4
        )
    assert settled(server)
