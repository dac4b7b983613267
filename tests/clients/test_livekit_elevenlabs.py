"""LiveKit's ElevenLabs plugin, which speaks over `multi-stream-input` and `/stream`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

import aiohttp
import httpx
import pytest

from tests.clients.conftest import KEY
from tests.lazy import LazyModule
from tests.nano import OTHER_VOICE, VOICES, is_plausible
from tests.server.conftest import Serving
from tests.waiting import wait_until

agents, elevenlabs = LazyModule("livekit.agents"), LazyModule("livekit.plugins.elevenlabs")
CLOCK = 0.15  # seconds
T = TypeVar("T")


def patient() -> agents.APIConnectOptions:
    return agents.APIConnectOptions(max_retry=0, timeout=240)


def with_plugin(nano: Serving, use: Callable[[elevenlabs.TTS], Awaitable[T]], model: str = "eleven_turbo_v2_5") -> T:
    async def run() -> T:
        async with asyncio.timeout(240), aiohttp.ClientSession() as session:
            tts = elevenlabs.TTS(
                voice_id=OTHER_VOICE, api_key=KEY, base_url=f"{nano.url}/v1", model=model, http_session=session
            )
            try:
                return await use(tts)
            finally:
                await tts.aclose()

    return asyncio.run(run())


async def speak(tts: elevenlabs.TTS, text: str) -> tuple[float, agents.tts.SynthesizeStream]:
    """Return the seconds of audio of a reply, and its stream. Its words come with it, with their times."""
    async with tts.stream(conn_options=patient()) as stream:
        for word in text.split(" "):
            stream.push_text(f"{word} ")
        stream.end_input()
        frames = [event.frame async for event in stream]
    seconds = sum(frame.duration for frame in frames)
    check_words(
        [word for frame in frames for word in frame.userdata.get(agents.types.USERDATA_TIMED_TRANSCRIPT, [])],
        text,
        seconds,
    )
    return seconds, stream


def check_words(words: list[agents.types.TimedString], text: str, seconds: float) -> None:
    assert "".join(words).split() == text.split()
    starts = [word.start_time for word in words if word.strip()]
    # With mp3 the plugin counts time by bytes, which an encoder holds back.
    assert all(after >= before - CLOCK for before, after in pairwise(starts))
    assert -CLOCK <= starts[0] < starts[-1] < seconds
    assert len(set(starts)) > len(starts) // 2, "a very short word may share the start of the next one"
    assert all(word.start_time - CLOCK <= word.end_time <= seconds + CLOCK for word in words)


def test_a_text_is_synthesized(nano: Serving) -> None:
    async def use(tts: elevenlabs.TTS) -> float:
        return (await tts.synthesize("Good morning.", conn_options=patient()).collect()).duration

    assert is_plausible(with_plugin(nano, use), "Good morning.")


@pytest.mark.parametrize("model", ["eleven_turbo_v2_5", "eleven_v3"])
def test_a_reply_without_words_is_silent_and_no_failure(nano: Serving, model: str) -> None:
    """Without audio the plugin would repeat the reply, and LiveKit close its session after a few."""

    async def use(tts: elevenlabs.TTS) -> list[float]:
        async with tts.stream(conn_options=patient()) as stream:
            stream.push_text("\N{PARTY POPPER}")
            stream.end_input()
            return [event.frame.duration async for event in stream]

    assert 0 < sum(with_plugin(nano, use, model)) < 0.5


def test_replies_use_one_connection_and_can_be_interrupted(nano: Serving) -> None:
    async def use(tts: elevenlabs.TTS) -> tuple[list[float], list[bool]]:
        first, one = await speak(tts, "Good morning. The tide is coming in.")
        stream = tts.stream(conn_options=patient())
        stream.push_text("One sentence follows another. " * 3)
        await anext(aiter(stream))
        await stream.aclose()
        last, other = await speak(tts, "It is going out.")
        return [first, last], [one._connection_reused, other._connection_reused]

    seconds, reused = with_plugin(nano, use)
    assert is_plausible(seconds[0], "Good morning. The tide is coming in.")
    assert is_plausible(seconds[1], "It is going out.")
    assert reused == [False, True]
    wait_until_settled(nano)


def test_newer_models_speak_over_the_dialogue_api(nano: Serving) -> None:
    async def use(tts: elevenlabs.TTS) -> list[float]:
        whole = (await tts.synthesize("Good morning.", conn_options=patient()).collect()).duration
        first, _ = await speak(tts, "Good morning. The tide is coming in.")
        second, stream = await speak(tts, "It is going out.")
        assert stream._connection_reused
        return [whole, first, second]

    whole, first, second = with_plugin(nano, use, model="eleven_v3")
    assert is_plausible(whole, "Good morning.")
    assert is_plausible(first, "Good morning. The tide is coming in.")
    assert is_plausible(second, "It is going out.")


def test_the_voices_are_listed(nano: Serving) -> None:
    voices = with_plugin(nano, lambda tts: tts.list_voices())
    assert set(VOICES) <= {voice.id for voice in voices}


def wait_until_settled(nano: Serving) -> None:
    """Wait until no request is in flight."""
    with httpx.Client(trust_env=False, verify=False, headers={"authorization": f"Bearer {KEY}"}) as http:
        wait_until(lambda: "\nshoal_requests_in_flight 0.0" in http.get(f"{nano.url}/metrics").text, interval=0.05)
