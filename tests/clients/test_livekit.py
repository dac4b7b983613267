"""LiveKit's Fish Audio plugin, as published, against a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.clients.conftest import KEY
from tests.lazy import LazyModule
from tests.nano import OTHER_VOICE
from tests.server.conftest import Serving
from tests.waiting import TIMEOUT_SECONDS, wait_until

agents, fishaudio = LazyModule("livekit.agents"), LazyModule("livekit.plugins.fishaudio")
Talk = Callable[["fishaudio.TTS"], Awaitable[None]]


def once() -> agents.APIConnectOptions:
    return agents.APIConnectOptions(max_retry=0, timeout=240)


@asynccontextmanager
async def plugin(server: Serving, **options: Any) -> AsyncIterator[fishaudio.TTS]:
    """The plugin with its defaults, but for the address, the key and the voice."""
    async with aiohttp.ClientSession() as session:
        speaker = fishaudio.TTS(
            api_key=KEY, base_url=server.url, http_session=session, **{"voice_id": OTHER_VOICE, **options}
        )
        try:
            yield speaker
        finally:
            await speaker.aclose()


def with_plugin(server: Serving, talk: Talk, **options: Any) -> None:
    async def run() -> None:
        async with plugin(server, **options) as speaker:
            await asyncio.wait_for(talk(speaker), TIMEOUT_SECONDS)

    asyncio.run(run())


async def reply(speaker: fishaudio.TTS, *pieces: str) -> tuple[float, np.ndarray]:
    """Push the pieces of a reply as a language model writes them; return its seconds and samples."""
    stream = speaker.stream(conn_options=once())
    for piece in pieces:
        stream.push_text(piece)
    stream.end_input()
    async with stream:
        frames = [event.frame async for event in stream]
    samples = np.concatenate([np.frombuffer(frame.data, np.int16) for frame in frames])
    assert {(frame.sample_rate, frame.num_channels) for frame in frames} == {(speaker.sample_rate, 1)}
    return sum(frame.duration for frame in frames), samples


@pytest.mark.parametrize("output_format", ["wav", "pcm", "mp3", "opus"])
def test_synthesize_returns_speech(nano: Serving, output_format: str) -> None:
    async def talk(speaker: fishaudio.TTS) -> None:
        frame = await speaker.synthesize("Good morning.", conn_options=once()).collect()
        assert (frame.sample_rate, frame.num_channels) == (speaker.sample_rate, 1)
        assert 0.3 < frame.duration < 5
        assert np.abs(np.frombuffer(frame.data, np.int16)).max() > 1000

    with_plugin(nano, talk, output_format=output_format)


def test_several_replies_use_one_connection(nano: Serving) -> None:
    async def talk(speaker: fishaudio.TTS) -> None:
        for number, pieces in enumerate((("Hello", " there. How are", " you?"), ("I am well.",), ("Good", "bye."))):
            seconds, samples = await reply(speaker, *pieces)
            assert 0.2 < seconds < 10
            assert np.abs(samples).max() > 1000
            assert speaker._pool.last_connection_reused is (number > 0)
        assert len(speaker._pool._connections) == 1

    with_plugin(nano, talk, latency_mode="low", normalize_loudness=True, speed=1.1, min_chunk_length=0)


def test_an_interrupted_reply_frees_its_place_and_the_next_one_is_spoken(nano: Serving) -> None:
    async def talk(speaker: fishaudio.TTS) -> None:
        stream = speaker.stream(conn_options=once())
        stream.push_text("One two three four five six seven eight nine ten eleven twelve. " * 10)
        await anext(aiter(stream))
        await stream.aclose()
        seconds, _ = await reply(speaker, "Sorry.")
        assert seconds > 0.1

    with_plugin(nano, talk)
    with nano.client() as http:
        wait_until(lambda: http.get("/ready").json()["in_flight"] == 0)


def test_the_default_voice_of_the_model_needs_no_voice_id(nano: Serving) -> None:
    async def talk(speaker: fishaudio.TTS) -> None:
        seconds, _ = await reply(speaker, "Hello.")
        assert seconds > 0.1

    with_plugin(nano, talk, voice_id=agents.NOT_GIVEN)


def test_an_unknown_voice_is_an_error_that_names_it(nano: Serving) -> None:
    async def talk(speaker: fishaudio.TTS) -> None:
        with pytest.raises(agents.APIStatusError) as raised:
            await reply(speaker, "Hello.")
        assert fishaudio.tts.DEFAULT_VOICE_ID in str(raised.value.body)
        with pytest.raises(agents.APIStatusError) as missing:
            await speaker.synthesize("Hello.", conn_options=once()).collect()
        assert missing.value.status_code == 404

    with_plugin(nano, talk, voice_id=fishaudio.tts.DEFAULT_VOICE_ID)
