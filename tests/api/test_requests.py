from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shoal.api.bodies.elevenlabs import (
    OUTPUTS,
    AudioDelivery,
    ElevenLabsDialogue,
    ElevenLabsSpeech,
    dialogue_job,
    elevenlabs_job,
)
from shoal.api.bodies.schemas import OpenAISpeech
from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineHandle
from shoal.api.exceptions import SchemaViolation
from shoal.api.keys import ANONYMOUS
from shoal.api.requests import SpeechJob, openai_job, response_headers
from shoal.errors import InvalidRequest
from shoal.text.plan import TextRules, plan_text
from shoal.voices.store import VoiceStore
from tests.server.standin import Standin

CONFIG = ServerConfig()
STREAM = AudioDelivery(OUTPUTS["pcm_16000"], whole=False)


@pytest.fixture
def engine(tmp_path: Path) -> EngineHandle:
    return EngineHandle(Standin(), VoiceStore(tmp_path), 25.0)


def job(engine: EngineHandle, config: ServerConfig = CONFIG, **fields: Any) -> SpeechJob:
    body = OpenAISpeech(**({"model": "tts-1", "voice": "alloy", "input": "Hello."} | fields))
    return openai_job(body, engine, config, ANONYMOUS, "id")


@pytest.mark.parametrize(
    ("text", "instructions", "spoken"),
    [
        ("Hello.", "Speak slowly.", "[Speak slowly.] Hello."),
        ("Hello.", "Like a\npirate [arr]", "[Like a pirate (arr)] Hello."),
        ("<|speaker:0|>Hello.<|speaker:1|>Hi.", "whisper", "<|speaker:0|>[whisper] Hello.<|speaker:1|>Hi."),
        ("Hello.", " ", "Hello."),
    ],
)
def test_instructions_are_a_direction_before_the_text(
    engine: EngineHandle, text: str, instructions: str, spoken: str
) -> None:
    s2 = replace(engine, text_rules=TextRules(directions=True))
    assert job(s2, input=text, instructions=instructions).request.text == spoken


@pytest.mark.parametrize(("size", "follows"), [("tiny", False), ("tiny-s2", True)])
def test_only_the_s2_family_follows_instructions(size: str, follows: bool) -> None:
    from shoal.checkpoint.format.text_rules import checkpoint_text_rules
    from shoal.checkpoint.random import random_checkpoint

    assert checkpoint_text_rules(random_checkpoint(size)).directions is follows


def test_instructions_are_refused_or_named_as_ignored_by_models_that_follow_none(engine: EngineHandle) -> None:
    with pytest.raises(SchemaViolation, match="instructions: this model follows no instructions"):
        job(engine, instructions="Sing.")
    lenient = replace(CONFIG, ignore_instructions=True)
    ignored = job(engine, lenient, instructions="Sing.")
    assert (ignored.request.text, ignored.ignored) == ("Hello.", ("instructions",))
    assert response_headers(ignored, lenient)["X-Ignored-Fields"] == "instructions"
    assert job(engine, lenient).ignored == ()


def test_several_voices_are_the_speakers_of_a_dialogue(engine: EngineHandle) -> None:
    def voices(voice: object) -> tuple[str | None, tuple[str, ...]]:
        request = job(engine, voice=voice).request
        return request.voice, request.voices

    assert voices(["anna", "ben"]) == (None, ("anna", "ben"))
    assert voices(["anna"]) == voices("anna") == voices({"id": "anna"}) == ("anna", ())
    assert voices(["alloy"]) == voices("alloy") == ("alloy", ())
    with pytest.raises(ValidationError):
        voices([])


def test_an_openai_name_falls_back_to_its_voice_without_a_look_at_the_store(engine: EngineHandle) -> None:
    """The engine process looks it up together with all voices: here a file would block, or cost two hand-offs."""
    unread = replace(engine, voices=None, openai_voices={"alloy": "anna"})  # type: ignore[arg-type]
    for name, expected in (("alloy", ("anna",)), ("nova", (None,)), ("anna", ())):
        assert job(unread, voice=name).request.fallback_voices == expected
        body = ElevenLabsSpeech(text="Hello.")
        spoken = elevenlabs_job(body, name, STREAM, unread, CONFIG, ANONYMOUS, "id")
        assert (spoken.request.voice, spoken.request.fallback_voices) == (name, expected)
        assert dialogue(unread, (name, "Hello.")).request.fallback_voices == expected


def dialogue(engine: EngineHandle, *lines: tuple[str, str], **fields: Any) -> SpeechJob:
    inputs = [{"voice_id": voice, "text": text} for voice, text in lines]
    body = ElevenLabsDialogue(inputs=inputs, **fields)
    return dialogue_job(body, STREAM, engine, CONFIG, ANONYMOUS, "id")


def test_the_lines_of_a_dialogue_get_the_tags_of_their_speakers(engine: EngineHandle) -> None:
    request = dialogue(engine, ("ben", "One."), ("anna", "Two."), ("ben", "Three.")).request
    assert request.text == "<|speaker:0|>One.<|speaker:1|>Two.<|speaker:0|>Three."
    assert (request.voice, request.voices) == (None, ("ben", "anna"))
    alone = dialogue(engine, ("ben", "One."), ("ben", "Two.")).request
    assert (alone.text, alone.voice, alone.voices) == ("One. Two.", "ben", ())
    assert dialogue(engine, ("ben", "One."), settings={"stability": 0.5}).ignored == ("settings",)
    with pytest.raises(InvalidRequest, match="use at most 16 voices, not 17"):
        dialogue(engine, *((f"voice{number}", "Hi.") for number in range(17)))


def test_a_stream_begins_with_enough_audio_to_play(engine: EngineHandle) -> None:
    def first_frames(delivery: AudioDelivery) -> int | None:
        body = ElevenLabsSpeech(text="Hello.")
        spoken = elevenlabs_job(body, "alloy", delivery, engine, CONFIG, ANONYMOUS, "id")
        return spoken.request.first_chunk_frames

    assert first_frames(STREAM) == round(0.46 * engine.frame_rate)
    assert first_frames(replace(STREAM, low_latency=True)) is None
    assert first_frames(replace(STREAM, whole=True)) is None


def test_a_direction_of_ssml_is_placed_inside_the_document(engine: EngineHandle) -> None:
    s2 = replace(engine, text_rules=TextRules(directions=True))
    made = job(s2, input='<speak version="1.1">Hello.</speak>', instructions="calm & quiet")
    assert plan_text(made.request, s2.text_rules).text == "[calm & quiet] Hello."
