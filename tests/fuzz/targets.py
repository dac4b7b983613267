"""Fuzz targets: one per parser of untrusted input. Each returns or raises a ShoalError; nothing else may happen."""

import asyncio
import contextlib
import io
import json
import string
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ormsgpack
from hypothesis import strategies as st

from shoal.api.bodies.parsing import parse_form, parse_json, unpack, validated
from shoal.api.bodies.scan import MAX_ELEMENTS
from shoal.api.bodies.schemas import Invocation, SpeechBody, form_fields
from shoal.api.config import ServerConfig
from shoal.api.exceptions import SchemaViolation
from shoal.api.live.elevenlabs import parse_message as parse_elevenlabs
from shoal.api.live.events import parse_message as parse_live
from shoal.audio.decode import AudioLimits, read_audio
from shoal.audio.encode import encode_file
from shoal.audio.wav import wav_header
from shoal.errors import ShoalError, TextError
from shoal.server.routes.codec import Audios, Tokens
from shoal.server.wyoming import MAX_HEADER_BYTES, WyomingConnection
from shoal.speech import SpeechRequest
from shoal.text.lexicon import pronunciation
from shoal.text.normalize import normalize
from shoal.text.plan import TextRules, plan_text
from tests.text.normalize.held_out_second import SECOND_HELD_OUT
from tests.text.normalize.held_out_third import THIRD_HELD_OUT

MAX_ERROR_BYTES = 16_000
MAX_REPEATED_BYTES = 1 << 19  # hypothesis keeps the inputs of several examples
MODELS = (SpeechBody, Invocation, Audios, Tokens)
RATE = 16_000
MAX_TEXT = 10_000  # characters, as the server allows
SPOKEN_CHARACTERS = frozenset(string.ascii_letters + " .,?!'-;:")
TEXT_PIECES = [
    *(b"1", b"1,000 ", b"1/2 ", b"$5-", b"10:30-", b"5'", b"V", b"IV ", b"A-Z", b"Mon-", b"U.S.", b"Dr. ", b"a@b.c "),
    *(b"$x^", b"\\frac{", b"\\(", b"Inc. The ", b"1 John 3:16-", b"NY 10001 ", b"on 1/2 ", b"v. ", b"0800 123 "),
    *(
        b"<style>",
        b"**a",
        b"[a](",
        b"| a ",
        b"- ",
        b"\n",
        "½".encode(),
        "²".encode(),
        "★".encode(),
        "₿".encode(),
        b"http://a/",
    ),
]
MARKED_UP = [
    b"The tide [pause:0.8s] is in (excited). [whisper] Yes!",
    b'<speak><s>The tide</s><break time="800ms"/><voice name="a"><prosody rate="90%">is in</prosody></voice></speak>',
    b'<speak><say-as interpret-as="date" format="mdy">1/2/2024</say-as><sub alias="b">a</sub></speak>',
    b"<|speaker:0|>Hi.<|speaker:1|><|phoneme_start|>R EH1 D<|phoneme_end|>",
]
MARKUP_PIECES = [
    *(
        b"<s>",
        b"</s>",
        b'<break time="1s"/>',
        b"[pause:1s]",
        b"(",
        b"[",
        b"<|",
        b"|>",
        b"&amp;",
        b"&#",
        b"\\",
        b"<!--",
        b".",
    ),
    *(b'<prosody rate="50%">', b'<voice name="x">', b"<speak>", b"]]>", b"<![CDATA["),
]
AUDIO_LIMITS = AudioLimits(max_seconds=5.0)


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], object]
    inputs: st.SearchStrategy[bytes]


def hostile(seeds: list[bytes], pieces: list[bytes]) -> st.SearchStrategy[bytes]:
    """Damaged seeds, and one piece of the format many times within a seed or alone."""
    seed = st.sampled_from(seeds)
    repeated = st.builds(_repeat, st.sampled_from(pieces), st.integers(1, MAX_REPEATED_BYTES))
    return st.one_of(
        st.binary(max_size=64),
        st.builds(_damage, seed, st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=6)),
        st.builds(lambda data, cut: data[: cut % (len(data) + 1)], seed, st.integers(0, 1 << 16)),
        st.builds(_insert, seed, st.integers(0, 300), repeated),
    )


def _repeat(piece: bytes, size: int) -> bytes:
    return piece * max(1, size // len(piece))


def _damage(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for place, value in changes:
        changed[place % len(changed)] = value
    return bytes(changed)


def _insert(data: bytes, place: int, piece: bytes) -> bytes:
    place %= len(data) + 1
    return data[:place] + piece + data[place:]


def msgpack_body(data: bytes) -> None:
    content = unpack(data)
    assert elements(content) <= MAX_ELEMENTS
    for model in MODELS:
        validate(model, content)


def json_body(data: bytes) -> None:
    content = parse_json(data)
    assert elements(content) <= MAX_ELEMENTS + 1
    for model in MODELS:
        validate(model, content)


def form_body(data: bytes) -> None:
    validated(SpeechBody, form_fields(parse_form(data, "b")), lax=True)


def validate(model: type[Any], content: object) -> None:
    try:
        validated(model, content)
    except SchemaViolation as error:
        check_error(error)


def check_error(error: ShoalError) -> None:
    """Check that an error does not grow with the input."""
    assert len(str(error)) < MAX_ERROR_BYTES
    if isinstance(error, SchemaViolation):
        assert len(json.dumps(error.errors)) < MAX_ERROR_BYTES


def elements(value: object) -> int:
    """Count values and keys."""
    if isinstance(value, list):
        return 1 + sum(map(elements, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(elements, value.values()))
    return 1


def elevenlabs_message(data: bytes) -> object:
    return parse_elevenlabs(data.decode(errors="replace"))


def wyoming_events(data: bytes) -> None:
    """Read all events of a connection."""

    async def read() -> None:
        reader = asyncio.StreamReader(limit=MAX_HEADER_BYTES)
        reader.feed_data(data)
        reader.feed_eof()
        state: Any = SimpleNamespace(config=ServerConfig())
        contexts: Any = SimpleNamespace(idle=SimpleNamespace(limit=contextlib.nullcontext))
        connection = WyomingConnection(state, reader, cast(asyncio.StreamWriter, None))
        with contextlib.suppress(EOFError):
            while True:
                await connection._read(contexts)

    asyncio.run(read())


def recording(data: bytes) -> None:
    samples = read_audio(data, RATE, AUDIO_LIMITS).samples
    assert np.isfinite(samples).all()
    assert len(samples) <= (AUDIO_LIMITS.max_seconds + 0.5) * RATE


SPEECH: dict[str, Any] = {"text": "Hello.", "format": "mp3", "seed": 7, "references": [], "prosody": {"speed": 1.5}}
REFERENCE = {"audio": b"RIFF", "text": "What I say."}
CODES = {"tokens": [[[1, 2, 3], [4, 5, 6]]]}
JSON_PIECES = [b"[", b"{", b"[],", b'{"a":', b'"a":1,', b'"', b'\\"', b"\\u0041", b",", b"9", b" ", b"-", b"\xff", b"]"]
PACKED_PIECES = [
    b"\x90",
    b"\x91",
    b"\x80",
    b"\x81\xa1a",
    b"\xc0",
    b"\xdc\xff\xff",
    b"\xdf\0\0\xff\xff",
    b"\xc1",
    b"\xd4\0\0",
]
HEAD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FORM = HEAD % (b"text", b"Hello.") + HEAD % (b"seed", b"7") + HEAD % (b"references", b"[]") + b"--b--\r\n"
FORM_PIECES = [b"\r\n", b"--b", b"\r\n--b\r\n", b"A: b\r\n", HEAD % (b"x", b""), b"-", b"\r", b'name="', b"\0"]
LIVE = [{"event": "start", "request": SPEECH}, {"event": "text", "text": "Hello."}, {"event": "stop"}]
ELEVENLABS = [
    {"text": " ", "voice_settings": {"speed": 1.0}},
    {"text": "Hello. ", "flush": True},
    {"close_socket": True},
]
WYOMING = [
    b'{"type": "describe"}\n',
    b'{"type": "synthesize", "data_length": 18}\n{"text": "Hello."}',
    b'{"type": "audio-chunk", "payload_length": 4, "data": {"rate": 16000}}\n\0\0\0\0',
]


def packed(*values: object) -> list[bytes]:
    return [ormsgpack.packb(value) for value in values]


def dumped(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def bodies() -> dict[str, Target]:
    recorded = {**SPEECH, "references": [REFERENCE]}
    return {
        "msgpack": Target(msgpack_body, hostile(packed(SPEECH, recorded, CODES, {"audios": [b"a"]}), PACKED_PIECES)),
        "json": Target(json_body, hostile(dumped(SPEECH, CODES, {"input": "Hi.", "voice": "alloy"}), JSON_PIECES)),
        "form": Target(form_body, hostile([FORM], FORM_PIECES)),
        "live": Target(parse_live, hostile(packed(*LIVE), PACKED_PIECES)),
        "elevenlabs": Target(elevenlabs_message, hostile(dumped(*ELEVENLABS), JSON_PIECES)),
        "wyoming": Target(wyoming_events, hostile(WYOMING, [*JSON_PIECES, b"\n", *WYOMING])),
    }


def mp4_file() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", 44_100, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(44_100)[np.newaxis], "fltp", "mono")
        frame.sample_rate = 44_100
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def tone(rate: int) -> np.ndarray:
    return (0.3 * np.sin(np.arange(rate // 4) / 20)).astype(np.float32)


def recordings() -> dict[str, Target]:
    samples = (tone(RATE) * 30_000).astype("<i2").tobytes()
    header = wav_header(RATE, len(samples))
    adpcm = header.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 0x11, 1), 1)
    files = {
        "wav": [header + samples, adpcm + samples],
        "mp4": [mp4_file()],
        "ogg": [encode_file(tone(48_000), "opus", 48_000)],
        "mp3": [encode_file(tone(44_100), "mp3", 44_100)],
        "flac": [encode_file(tone(44_100), "flac", 44_100)],
        "webm": [encode_file(tone(48_000), "webm", 48_000)],
    }
    pieces = {
        "wav": [b"LIST\0\0\0\0", b"data\0\0\0\0", b"fmt \x10\0\0\0" + bytes(16), b"\xff", b"\0"],
        "mp4": [b"\0\0\0\x08free", b"\0\0\0\0moov", b"\0\0\0\x10stts" + bytes(8), b"\xff\xff\xff\xff", b"\0\0\0\1trak"],
        "ogg": [b"OggS", b"OggS\0\2" + bytes(20) + b"\1\0", b"\xff", b"OpusHead"],
        "mp3": [b"\xff\xfb\x90\0", b"ID3\4\0\0\0\0\0\0", b"\xff", b"TAG"],
        "flac": [b"fLaC", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xf8\xc9\x08"],
        "webm": [b"\x1a\x45\xdf\xa3", b"\x1f\x43\xb6\x75\x80", b"\xa3\x80", b"\xff", b"\xec\x80"],
    }
    return {name: Target(recording, hostile(seeds, pieces[name])) for name, seeds in files.items()}


def english(data: bytes) -> None:
    """Normalize twice: a reading reads as itself, and it has letters and punctuation only."""
    spoken = normalize(data.decode(errors="replace")[:MAX_TEXT])
    assert not set(spoken) - SPOKEN_CHARACTERS, spoken[:200]
    assert normalize(spoken) == spoken, spoken[:200]


def planned(rules: TextRules, data: bytes) -> None:
    """Plan as text with pauses and tags, and as SSML."""
    text = data.decode(errors="replace")[:MAX_TEXT]
    for ssml in (None, True):
        with contextlib.suppress(TextError):
            plan_text(SpeechRequest(text, ssml=ssml, lexicon=(pronunciation("tide", "water"),)), rules)


def texts() -> dict[str, Target]:
    tables = (SECOND_HELD_OUT, THIRD_HELD_OUT)
    written = [text.encode() for table in tables for texts in table.values() for text, *_ in texts]
    speech = TextRules(english_words=True, sentence_turns=True, chunk_bytes=90)
    multilingual = TextRules(phonemes=True, directions=True, splits_dialogue=True)
    return {
        "english": Target(english, hostile(written, TEXT_PIECES)),
        "english plan": Target(partial(planned, speech), hostile(MARKED_UP, MARKUP_PIECES)),
        "multilingual plan": Target(partial(planned, multilingual), hostile(MARKED_UP, MARKUP_PIECES)),
    }


GROUPS: dict[str, Callable[[], dict[str, Target]]] = {"bodies": bodies, "recordings": recordings, "texts": texts}
