import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.api.config import ServerConfig
from shoal.api.engine_client import EngineHandle
from shoal.api.exceptions import SchemaViolation
from shoal.api.keys import ANONYMOUS
from shoal.api.requests import SpeechJob, openai_job, response_headers
from shoal.api.schemas import OpenAISpeech
from shoal.text.plan import TextRules
from shoal.voices.store import VoiceStore
from tests.server.standin import Standin

CONFIG = ServerConfig()


@pytest.fixture
def engine(tmp_path: Path) -> EngineHandle:
    return EngineHandle(Standin(), VoiceStore(tmp_path), 25.0)


def job(engine: EngineHandle, config: ServerConfig = CONFIG, **fields: str) -> SpeechJob:
    body = OpenAISpeech(model="tts-1", voice="alloy", **({"input": "Hello."} | fields))
    return asyncio.run(openai_job(body, engine, config, ANONYMOUS, "id"))


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
    from shoal.checkpoint.random import random_checkpoint
    from shoal.engine.preprocess import text_rules

    assert text_rules(random_checkpoint(size)).directions is follows


def test_instructions_are_refused_or_named_as_ignored_by_models_that_follow_none(engine: EngineHandle) -> None:
    with pytest.raises(SchemaViolation, match="instructions: this model follows no instructions"):
        job(engine, instructions="Sing.")
    lenient = replace(CONFIG, ignore_instructions=True)
    ignored = job(engine, lenient, instructions="Sing.")
    assert (ignored.request.text, ignored.ignored) == ("Hello.", ("instructions",))
    assert response_headers(ignored, lenient)["X-Ignored-Fields"] == "instructions"
    assert job(engine, lenient).ignored == ()
