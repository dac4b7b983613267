"""Engine and Service: texts and voices in, chunks out."""

import asyncio
import gc
import math
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.audio.pcm import to_int16
from shoal.audio.wav import wav_header
from shoal.checkpoint.load import Checkpoint
from shoal.codec.layers import WindowTransformer
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.kv_cache import resolve_kv_dtype
from shoal.engine.load import choose_device, choose_dtype, voice_cache
from shoal.engine.preprocess import build_turns, prompt_builder
from shoal.errors import (
    AudioError,
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    TextError,
    VoiceNotFound,
)
from shoal.speech import AudioChunk, FinishReason, Recording, Sampling, SamplingParams, SpeechRequest
from shoal.voices.store import VoiceStore, voice_directory
from shoal.voices.voice import Voice
from tests.engine.oracle import Oracle, assert_nothing_leaked
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
SHORT = SamplingParams(seed=1, max_frames=6)
PLAIN = EngineConfig(slots=4, guard=False)


def recording(seconds: float = 1.2, pitch: float = 220.0, rate: int = 16_000) -> bytes:
    at = np.arange(round(seconds * rate)) / rate
    sound = 0.5 * np.sin(2 * np.pi * pitch * at) * np.sin(2 * np.pi * 1.7 * at) ** 2
    pcm = to_int16(sound.astype(np.float32)).tobytes()
    return wav_header(rate, len(pcm)) + pcm


@pytest.fixture
def engine(tiny: Checkpoint, tmp_path: Path) -> Iterator[Engine]:
    with Engine(EngineCore(tiny, PLAIN), voice_cache(tiny, tmp_path / "voices")) as made:
        yield made
        settle(made)
        assert_nothing_leaked(made.service.core)


def settle(engine: Engine) -> None:
    """Wait until no utterance is active; cancelled ones are released at the next step."""
    wait_until(lambda: not engine.service.thread.active and engine.service.core.idle)


def test_speak_equals_generate(engine: Engine, oracle: Oracle) -> None:
    speech = engine.speak("hello there", sampling=SHORT)
    expected_output = oracle.speak(build_turns("hello there", None, oracle.checkpoint), SHORT)
    assert np.array_equal(speech.codes, expected_output.codes)
    assert np.allclose(speech.samples, expected_output.samples, atol=1e-5)
    assert (speech.finish, speech.sample_rate) == (FinishReason.LENGTH, engine.sample_rate)
    assert speech.seconds == pytest.approx(6 * 640 / 16_000)


def test_streamed_chunks_equal_the_whole_speech(engine: Engine) -> None:
    chunks = list(engine.speak("hello there", sampling=SHORT, stream=True))
    assert len(chunks) > 1
    whole = engine.speak("hello there", sampling=SHORT)
    assert np.allclose(np.concatenate([chunk.samples for chunk in chunks]), whole.samples, atol=1e-6)


def test_twenty_tasks_run_concurrently(engine: Engine, oracle: Oracle) -> None:
    async def speak() -> list[shoal.Speech]:
        return await asyncio.gather(
            *(engine.aspeak("hello", sampling=Sampling(seed=seed, max_frames=2 + seed % 5)) for seed in range(20))
        )

    turns = build_turns("hello", None, oracle.checkpoint)
    for seed, speech in enumerate(asyncio.run(speak())):
        assert np.array_equal(
            speech.codes, oracle.speak(turns, SamplingParams(seed=seed, max_frames=2 + seed % 5)).codes
        )


def test_a_voice_object_is_used_as_given(engine: Engine, oracle: Oracle, voice: Voice) -> None:
    expected_output = oracle.speak(build_turns("hello", voice, oracle.checkpoint), SHORT)
    assert np.array_equal(engine.speak("hello", voice=voice, sampling=SHORT).codes, expected_output.codes)
    assert np.array_equal(asyncio.run(engine.aspeak("hello", voice=voice, sampling=SHORT)).codes, expected_output.codes)


@pytest.mark.parametrize("voice", [Path("me.wav"), 5, b"me"])
def test_values_that_are_no_voice_are_refused(engine: Engine, voice: Any) -> None:
    message = r"voice must be the name of a stored voice, a Voice or None, not "
    with pytest.raises(InvalidRequest, match=message):
        engine.speak("hello", voice=voice)
    with pytest.raises(InvalidRequest, match=message):
        engine.speak("hello", voice=voice, stream=True)
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(engine.aspeak("hello", voice=voice))
    with pytest.raises(InvalidRequest, match="voice must be the name of a stored voice or None"):
        SpeechRequest("hello", voice=voice)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_frames"])
@pytest.mark.parametrize("value", ["1", [1], 1j])
def test_sampling_settings_that_are_no_numbers_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be "):
        Sampling(**{field: value})


@pytest.mark.parametrize("field", ["top_k", "seed", "max_frames"])
def test_fractions_are_refused_before_they_can_fail_a_step(field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field} must be a whole number from 0 to \d+, not 1\.5"):
        Sampling(**{field: 1.5})


def test_numbers_of_numpy_are_those_of_python(engine: Engine) -> None:
    given = {"seed": 2**40 + 1, "top_k": 5, "temperature": 0.5, "max_frames": 6}
    of_numpy = {name: np.asarray(value).astype("i8" if value != 0.5 else "f4")[()] for name, value in given.items()}
    expected = engine.speak("hello", sampling=Sampling(**given))  # type: ignore[arg-type]
    assert np.array_equal(engine.speak("hello", sampling=Sampling(**of_numpy)).codes, expected.codes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": None}, "text must be a string, not None"),
        ({"text": b"hello"}, "text must be a string, not b'hello'"),
        ({"sampling": {"seed": 7}}, r"sampling must be a shoal.Sampling or None, not \{'seed': 7\}"),
        ({"timeout": "9"}, "timeout must be greater than 0 seconds, not '9'"),
    ],
)
def test_values_of_another_type_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SpeechRequest(**{"text": "hello", **values})


def test_a_text_is_no_request_for_a_stream(engine: Engine) -> None:
    text: Any = "hello"
    with pytest.raises(InvalidRequest, match=r"astream takes a shoal\.SpeechRequest, not 'hello'"):
        asyncio.run(anext(engine.astream(text)))


def test_speeches_can_be_compared_and_hashed(engine: Engine) -> None:
    first, second = (engine.speak("hello", sampling=SHORT) for _ in range(2))
    assert first in {first}
    assert first != second
    chunks = list(engine.speak("hello", sampling=SHORT, stream=True))
    assert chunks.index(chunks[-1]) == len(chunks) - 1


def test_fields_that_are_not_given_have_the_models_defaults(tiny: Checkpoint, oracle: Oracle, tmp_path: Path) -> None:
    defaults = SamplingParams(
        temperature=1.3, top_p=0.95, top_k=7, repetition_penalty=1.0, repetition="window", max_frames=6
    )
    model = replace(tiny, profile=replace(tiny.profile, sampling=defaults))
    turns = build_turns("hello", None, oracle.checkpoint)
    with Engine(EngineCore(model, PLAIN), voice_cache(model, tmp_path / "voices")) as engine:
        for sampling, resolved in (
            (Sampling(seed=7), replace(defaults, seed=7)),
            (Sampling(seed=7, temperature=0.8), replace(defaults, seed=7, temperature=0.8)),
            (replace(Sampling(seed=6), seed=7), replace(defaults, seed=7)),
        ):
            expected = oracle.speak(turns, resolved).codes
            assert np.array_equal(engine.speak("hello", sampling=sampling).codes, expected)
            assert np.array_equal(asyncio.run(engine.aspeak("hello", sampling=sampling)).codes, expected)


def test_sampling_survives_pickling() -> None:
    defaults, overrides = SamplingParams(temperature=0.5, max_frames=9), Sampling(top_p=0.8, seed=3)
    sent = pickle.loads(pickle.dumps(overrides))
    expected = SamplingParams(temperature=0.5, top_p=0.8, seed=3, max_frames=9)
    assert sent.resolve(defaults) == overrides.resolve(defaults) == expected
    assert Sampling().resolve(defaults) == defaults


def test_integers_of_numpy_are_settings_like_any_other(engine: Engine) -> None:
    def codes(seed: int, count: int) -> np.ndarray:
        sampling = Sampling(seed=seed, top_k=count, max_frames=count)
        stream = engine.service.speak_blocking(
            SpeechRequest("One here. Two here. Three here.", chunk_bytes=16, sampling=sampling)
        )
        assert sum(chunk.samples.size for chunk in stream)
        return stream.codes()

    own = codes(2**64 - 5, 4)
    assert own.shape[1] > 4  # several turns, each with a seed of its own
    assert np.array_equal(own, codes(np.uint64(2**64 - 5), np.int64(4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "7"),
        ("top_k", 2**63),
        ("top_k", 1.5),
        ("max_frames", 2.5),
        ("max_frames", -1),
        ("temperature", "1"),
        ("top_p", math.nan),
    ],
)
def test_a_sampling_setting_that_would_fail_on_the_engine_thread_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be "):
        Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("first_chunk_frames", 1.5), ("chunk_bytes", 60.5), ("client", []), ("text", b"hello")]
)
def test_a_field_of_a_request_that_would_fail_on_the_engine_thread_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be "):
        SpeechRequest(**{"text": "hello", name: value})  # type: ignore[arg-type]


def test_a_recording_is_encoded_once_and_its_prompt_computed_once(engine: Engine) -> None:
    request = SpeechRequest("hello", recordings=(Recording(recording(), "some words"),), sampling=SHORT)

    async def listen() -> list[AudioChunk]:
        return [chunk async for chunk in engine.astream(request)]

    first, second = asyncio.run(listen()), asyncio.run(listen())
    assert np.allclose(
        np.concatenate([chunk.samples for chunk in first]),
        np.concatenate([chunk.samples for chunk in second]),
        atol=1e-6,
    )
    statistics = engine.service.statistics()
    assert statistics["voices"]["encodes"] == 1
    assert statistics["prefix_cache"]["tokens_saved"] > 30


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (SpeechRequest(""), TextError),
        (SpeechRequest("hello", voice="nobody"), VoiceNotFound),
        (SpeechRequest("hello", voice="nobody", fallback_voices=("somebody",)), VoiceNotFound),
        (SpeechRequest("hello", voice="../etc"), InvalidRequest),
        (SpeechRequest("hello", recordings=(Recording(b"not audio", "words"),)), AudioError),
        (SpeechRequest("hello", recordings=(Recording(recording(), " "),)), TextError),
    ],
)
def test_invalid_text_is_refused_before_it_reaches_the_engine(
    engine: Engine, asked: SpeechRequest, error: type[Exception]
) -> None:
    async def listen() -> None:
        async for _ in engine.astream(asked):
            pass

    with pytest.raises(error):
        asyncio.run(listen())
    with pytest.raises(error):
        engine.service.speak_blocking(asked)
    assert engine.service.core.scheduler.stats.admitted == 0


def test_a_voice_that_is_not_stored_falls_back_to_the_first_that_is(engine: Engine, tmp_path: Path) -> None:
    def resolved(*fallbacks: str | None) -> str | None:
        voice = engine.service.resolve_blocking(SpeechRequest("", voice="alloy", fallback_voices=fallbacks))
        return None if voice is None else voice.name

    store = VoiceStore(tmp_path / "voices", sample_rate=engine.sample_rate)
    store.add("anna", recording(), "some words")
    assert resolved("ben", "anna") == "anna"
    assert resolved("ben", None, "anna") is None  # the model's default
    store.add("alloy", recording(pitch=150), "other words")
    assert resolved("anna") == resolved(None) == "alloy"
    with pytest.raises(InvalidRequest, match="fallback_voices"):
        SpeechRequest("", fallback_voices=("anna",))


def test_a_request_may_have_a_timeout(engine: Engine) -> None:
    request = SpeechRequest("hello", sampling=Sampling(seed=1, max_frames=0), timeout=0.05)
    with pytest.raises(DeadlineExceeded):
        list(engine.service.speak_blocking(request))


def test_closing_a_stream_early_cancels_it(engine: Engine) -> None:
    chunks = engine.speak("hello", sampling=Sampling(seed=1, max_frames=0), stream=True)
    next(chunks)
    chunks.close()
    speaking = engine.service.speak_blocking(SpeechRequest("hello", sampling=Sampling(seed=1, max_frames=0)))
    speaking.close()
    settle(engine)
    assert engine.service.core.scheduler.stats.cancelled == 2


def test_closing_an_async_stream_cancels_it(engine: Engine) -> None:
    async def cancel_early() -> None:
        async for _ in engine.astream(SpeechRequest("hello", sampling=Sampling(seed=1, max_frames=0))):
            break
        task = asyncio.create_task(engine.aspeak("hello", sampling=Sampling(seed=1, max_frames=0)))
        while engine.service.core.scheduler.stats.admitted < 2:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_early())
    settle(engine)


def test_a_failing_encoder_fails_only_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = engine.service.core.checkpoint.codec.encode

    def fail(*_: object) -> None:
        raise RuntimeError("the encoder broke")

    request = SpeechRequest("hello", recordings=(Recording(recording(), "some words"),), sampling=SHORT)
    chunks = engine.speak("hello", sampling=SHORT, stream=True)
    monkeypatch.setattr(engine.service.core.checkpoint.codec, "encode", fail)
    with pytest.raises(RuntimeError, match="the encoder broke"):
        engine.service.speak_blocking(request)
    assert list(chunks)[-1].finish is FinishReason.LENGTH
    monkeypatch.setattr(engine.service.core.checkpoint.codec, "encode", encode)
    assert list(engine.service.speak_blocking(request))[-1].finish is FinishReason.LENGTH


def test_recordings_are_encoded_and_codes_decoded_without_the_model(engine: Engine, tiny: Checkpoint) -> None:
    codes = engine.service.encode(recording(seconds=1.0))
    assert codes.shape == (10, 25)
    assert len(engine.service.decode(codes)) == 25 * 640
    with pytest.raises(InvalidRequest):
        engine.service.decode(codes + 1000)


def test_statistics_cover_every_component(engine: Engine) -> None:
    engine.speak("hello", sampling=SHORT)
    settle(engine)
    figures = engine.service.statistics()
    assert (figures["live"], figures["running"], figures["waiting"], figures["slots"]) == (0, 0, 0, 4)
    assert figures["blocks"]["all"] == 4 * 2048 // 16
    assert figures["speech"] == {"frames": 6, "samples": 6 * 640, "completed": 1, "retried": 0, "failed": 0}
    assert figures["scheduler"]["finished"] == 1
    assert figures["steps"]["steps"] >= 6
    assert figures["codec_seconds"] > 0


def test_released_memory_changes_no_audio(engine: Engine) -> None:
    first = engine.speak("A text that fills several blocks of the cache.", sampling=SHORT)
    settle(engine)
    service = engine.service
    cached = service.statistics()["blocks"]["cached"]
    assert cached > 0
    live = engine.speak("hello", sampling=SamplingParams(seed=1, max_frames=40), stream=True)
    received = [next(live)]
    released = service.release_memory()  # while a request is in progress
    assert released["prefix_blocks"] == cached
    assert released["device_bytes"] == released["host_blocks"] == 0
    samples = np.concatenate([chunk.samples for chunk in (*received, *live)])
    assert np.array_equal(samples, engine.speak("hello", sampling=SamplingParams(seed=1, max_frames=40)).samples)
    again = engine.speak("A text that fills several blocks of the cache.", sampling=SHORT)
    assert np.array_equal(again.samples, first.samples)


def test_a_closed_engine_raises_engine_stopped(tiny: Checkpoint, tmp_path: Path) -> None:
    engine = Engine(EngineCore(tiny, PLAIN), voice_cache(tiny, tmp_path))
    chunks = engine.speak("hello", sampling=Sampling(seed=1, max_frames=0), stream=True)
    next(chunks)
    assert engine.service.ready
    engine.close()
    engine.close()
    assert not engine.service.ready
    with pytest.raises(EngineStopped):
        list(chunks)
    with pytest.raises(EngineStopped):
        engine.speak("hello")
    with pytest.raises(EngineStopped):
        asyncio.run(engine.aspeak("hello"))
    with pytest.raises(EngineStopped):
        engine.service.release_memory()


def test_an_engine_that_is_dropped_ends_after_its_streams(tiny: Checkpoint, tmp_path: Path) -> None:
    engine = Engine(EngineCore(tiny, PLAIN), voice_cache(tiny, tmp_path / "voices"))
    core = weakref.ref(engine.service.core)
    chunks = engine.speak("hello", sampling=SHORT, stream=True)
    del engine
    gc.collect()
    assert sum(len(chunk.samples) for chunk in chunks) == 6 * 640

    def freed() -> bool:
        gc.collect()
        return core() is None

    wait_until(freed)


def test_a_drained_engine_has_finished_all_requests(tiny: Checkpoint, tmp_path: Path) -> None:
    engine = Engine(EngineCore(tiny, PLAIN), voice_cache(tiny, tmp_path))
    streams = [engine.speak("hello", sampling=Sampling(seed=seed, max_frames=5), stream=True) for seed in range(6)]
    engine.close(drain=True)
    assert all(list(chunks)[-1].finish is FinishReason.LENGTH for chunks in streams)


def test_concurrent_callers_get_the_same_output_as_alone(
    engine: Engine, oracle: Oracle, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty tasks with voices, failing recordings and early cancellations."""
    rng = Random(2)
    encode = engine.service.core.checkpoint.codec.encode

    def flaky(*samples: object) -> object:
        if rng.random() < 0.5:
            raise RuntimeError("the encoder broke")
        return encode(*samples)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.service.core.checkpoint.codec, "encode", flaky)
    solos = {
        (seed, someone is None): oracle.speak(
            build_turns("hello", someone, oracle.checkpoint), SamplingParams(seed=seed, max_frames=2 + seed)
        )
        for seed in range(4)
        for someone in (None, voice)
    }

    async def one(number: int) -> str:
        await asyncio.sleep(rng.random() * 0.5)
        kind, seed = number % 4, number % 4
        sampling = SamplingParams(seed=seed, max_frames=2 + seed)
        if kind == 0:
            clip = Recording(recording(pitch=200.0 + number), "some words")
            stream = engine.astream(SpeechRequest("hello", recordings=(clip,), sampling=sampling))
            try:
                return "received" if [chunk async for chunk in stream] else "silence"
            except RuntimeError:
                return "no voice"
        if kind == 1:
            async for _ in engine.astream(SpeechRequest("hello", sampling=replace(sampling, max_frames=0))):
                return "hung up"
        someone = voice if kind == 2 else None
        speech = await engine.aspeak("hello", voice=someone, sampling=sampling)
        return "as alone" if np.array_equal(speech.codes, solos[seed, someone is None].codes) else "otherwise"

    async def all_of_them() -> list[str]:
        outcomes = await asyncio.gather(*(one(number) for number in range(60)))
        assert len(asyncio.all_tasks()) == 1
        return outcomes

    outcomes = asyncio.run(all_of_them())
    assert {name: outcomes.count(name) for name in ("as alone", "hung up")} == {"as alone": 30, "hung up": 15}
    assert outcomes.count("received") + outcomes.count("no voice") == 15
    assert "no voice" in outcomes


def test_load_returns_a_working_engine(tmp_path: Path) -> None:
    with shoal.load("random:tiny", device="cpu", dtype="float32", voices=tmp_path) as engine:
        assert engine.speak("hello", sampling=SHORT).codes.shape == (10, 6)


def test_the_model_may_be_a_path() -> None:
    with shoal.load(Path(shoal.__file__).parent / "models" / "nano", device="cpu") as engine:
        assert engine.speak("hello", sampling=SHORT).seconds > 0


def test_completion_offers_the_public_names_before_their_first_use() -> None:
    assert set(shoal.__all__) <= set(dir(shoal))


def test_load_refuses_unknown_models_and_devices() -> None:
    model: Any = None
    with pytest.raises(InvalidRequest, match="model must be a name or a directory, not None"):
        shoal.load(model)
    with pytest.raises(ModelNotFound):
        shoal.load("random:huge")
    with pytest.raises(InvalidRequest, match="unknown dtype"):
        shoal.load("random:tiny", dtype="float8")
    with pytest.raises(InvalidRequest, match="unknown device"):
        shoal.load("random:tiny", device="abacus")


def test_device_and_dtype_defaults_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(InvalidRequest, match="no usable CUDA"):
        choose_device("cuda:0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_device("auto") == "cuda"
    assert choose_dtype(None, "cpu") == torch.float32
    for capability, expected in {(7, 5): torch.float16, (8, 0): torch.bfloat16, (12, 0): torch.bfloat16}.items():
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, found=capability: found)
        assert choose_dtype(None, "cuda") == expected
    assert choose_dtype("bfloat16", "cuda") == torch.bfloat16
    with pytest.raises(InvalidRequest, match="no Apple GPU"):
        choose_device("mps")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert choose_device("mps") == "mps"
    assert choose_dtype(None, "mps") == torch.float32
    assert resolve_kv_dtype("auto", torch.float32, torch.device("mps")) == torch.float32
    with pytest.raises(InvalidRequest, match="not supported on mps"):
        resolve_kv_dtype("fp8", torch.float32, torch.device("mps"))


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "architectures", "usable"),
    [
        ((6, 1), WHEEL, False),  # GTX 1080
        ((7, 0), WHEEL, False),  # V100
        ((7, 5), WHEEL, True),
        ((8, 9), WHEEL, True),  # runs the code of 8.6
        ((12, 1), WHEEL, True),
        ((11, 0), WHEEL, False),
        ((11, 0), [*WHEEL, "compute_100"], True),  # compiled by the driver
        ((11, 0), ["sm_101"], True),  # Jetson Thor before CUDA 13
        ((12, 0), ["sm_80", "sm_90a"], False),  # RTX 50 and an older wheel
        ((6, 1), [], True),  # unknown
    ],
)
def test_a_gpu_for_which_torch_has_no_code_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    architectures: list[str],
    usable: bool,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: architectures)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Reef 9000")
    assert choose_device("auto") == ("cuda" if usable else "cpu")
    assert ("using the CPU: Reef 9000" in caplog.text) == (not usable)
    if usable:
        assert choose_device("cuda:0") == "cuda:0"
        return
    with pytest.raises(InvalidRequest, match="install another build of torch"):
        choose_device("cuda:0")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SHOAL_VOICES": "/voices", "XDG_DATA_HOME": "/data"}, "/voices"),
        ({"XDG_DATA_HOME": "/data"}, "/data/shoal/voices"),
        ({"HOME": "/home/somebody"}, "/home/somebody/.local/share/shoal/voices"),
    ],
)
def test_the_voice_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("SHOAL_VOICES", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert voice_directory() == Path(expected)


def test_dialogue_is_split_by_speaker_turns_for_s2(tiny_s2: Checkpoint) -> None:
    dialogue = "<|speaker:0|>Good morning to you.<|speaker:1|>And to you."
    turns = build_turns(dialogue, None, tiny_s2, chunk_bytes=40)
    assert [turn.text for turn in turns] == ["<|speaker:0|>Good morning to you.", "<|speaker:1|>And to you."]


def test_numbers_are_spelled_out_if_the_profile_asks_for_it(tiny: Checkpoint) -> None:
    spelling = replace(tiny, profile=replace(tiny.profile, normalize=True))
    assert [turn.text for turn in build_turns("Room 12.", None, spelling)] == ["Room twelve."]
    assert [turn.text for turn in build_turns("Room 12.", None, tiny)] == ["Room 12."]
    assert [turn.text for turn in build_turns("Room 12.", None, spelling, normalize=False)] == ["Room 12."]


def test_normalization_may_not_grow_a_text_beyond_the_limit(tiny: Checkpoint) -> None:
    spelling = replace(tiny, profile=replace(tiny.profile, normalize=True, max_characters=100))
    assert build_turns("In 1984, 99 people paid $5.99 for it. " * 2, None, spelling)
    with pytest.raises(TextError, match="spelled out, the limit is 400: split it"):
        build_turns("a " + "≥" * 98, None, spelling)
    assert build_turns("a " + "≥" * 98, None, spelling, normalize=False)


def test_turns_share_the_tokens_of_their_voice(tiny: Checkpoint, voice: Voice) -> None:
    """Otherwise a long text of short turns would hold hundreds of copies of its voice."""
    turns = build_turns("One thing. " * 50, voice, tiny, chunk_bytes=16)
    assert len(turns) > 40
    assert len({id(turn.prefix) for turn in turns}) == 1
    # A view of a grid with the voice would keep it alive.
    assert all(turn.continuation.base is None for turn in turns)
    assert all(turn.body.base is turn.continuation for turn in turns)
    for turn in turns[:3]:
        expected = prompt_builder(tiny).prompt(turn.text, voice.references).T
        assert np.array_equal(turn.prompt, expected)
        assert turn.prompt_length == len(expected)


def test_codec_tables_are_reserved_for_the_longest_recording_at_load(tiny: Checkpoint, tmp_path: Path) -> None:
    """Tables that grow later would replace tensors that a running decoder reads."""
    voice_cache(tiny, tmp_path, EngineConfig(reference_seconds=400.0))
    before = [each.table for each in tiny.codec.modules() if isinstance(each, WindowTransformer)]
    tiny.codec.reserve(round(400 * tiny.codec.config.frame_rate))
    after = [each.table for each in tiny.codec.modules() if isinstance(each, WindowTransformer)]
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(("quantize", "advice"), [("auto", "use smaller weights"), ("int4", "use a smaller model")])
def test_a_model_that_does_not_fit_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, quantize: str, advice: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("shoal.engine.load.resolve_model", full)
    monkeypatch.setattr("shoal.engine.load.check_requested", lambda *_: None)
    with pytest.raises(InvalidRequest, match=advice):
        shoal.load("random:tiny", device="cpu", config=EngineConfig(quantize=quantize))


@pytest.mark.parametrize(
    ("dtype", "capabilities", "warned"),
    [
        ("bfloat16", {"avx2": True, "avx512_bf16": False}, True),
        ("bfloat16", {"avx2": True, "avx512_bf16": True}, False),
        ("float16", {"avx512_bf16": True, "amx_fp16": False}, True),
        ("float32", {"avx2": True}, False),
    ],
)
def test_a_dtype_that_the_cpu_emulates_is_warned_about(
    dtype: str,
    capabilities: dict[str, bool],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    with shoal.load("random:tiny", device="cpu", dtype=dtype):
        assert ("emulates them" in caplog.text) == warned
