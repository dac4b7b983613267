"""Input file of a batch: one JSON object per line, with the fields of `/v1/tts`, or one text per line in a .txt file.

The file is validated before the model is loaded, so that an error in line 9,000 is reported within seconds. Lines are
then read again by offset when they are needed: a batch may be larger than memory.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

from pydantic import Field, model_validator

from shoal.api.bodies.parsing import parse_json, validated
from shoal.api.bodies.schemas import SpeechBody, VoiceName
from shoal.api.exceptions import SchemaViolation
from shoal.api.requests import request_lexicon
from shoal.errors import InvalidRequest, ShoalError

MAX_LINE_BYTES = 32 << 20  # maximum size of one line, recordings included
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$"


class LineBody(SpeechBody):
    """Body of `/v1/tts` with an `id` that names the output files, and `voice` as an alias of `reference_id`."""

    id: Annotated[str | None, Field(pattern=NAME)] = None
    voice: VoiceName | None = None
    subtitles: Annotated[
        Literal["srt", "vtt", "json"] | None, Field(description="Also write the times of all words beside the audio.")
    ] = None

    @model_validator(mode="after")
    def _one_voice(self) -> Self:
        if self.voice is not None and self.reference_id is not None:
            raise ValueError("voice and reference_id are the same field: give only one")
        self.reference_id = self.reference_id or self.voice
        return self


@dataclass(frozen=True, slots=True)
class LineTask:
    """Valid input line and its location in the file."""

    number: int  # line number, from 1
    name: str  # output file name without suffix
    digest: str  # hash of the model and all fields that affect the audio
    start: int  # byte offset
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class LineError:
    """Invalid input line and what is wrong with it."""

    number: int
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class LineDefaults:
    """Model of the batch, and default values for fields that a line leaves out."""

    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    lexicon: str = ""  # hash of the lexicon file of the batch
    plain: bool = False  # lines are texts, not JSON objects


@dataclass(frozen=True, slots=True)
class InputFile:
    path: Path
    defaults: LineDefaults

    def tasks(self) -> Iterator[LineTask | LineError]:
        """Validate every line that is not blank, in order. Raises InvalidRequest when the file cannot be read."""
        names: dict[str, int] = {}
        for number, start, raw in _raw_lines(self.path):
            try:
                body, digest = parse_line(raw, self.defaults)
                name = body.id or default_name(number)
                if names.setdefault(name, number) != number:
                    raise InvalidRequest(f"id {name!r} is already used by line {names[name]}")
            except ShoalError as problem:
                id = _given_id(raw, self.defaults)
                known = id is not None and names.setdefault(id, number) == number
                yield LineError(number, id if id is not None and known else default_name(number), str(problem))
            else:
                yield LineTask(number, name, digest, start, len(raw))

    def raw(self, task: LineTask) -> bytes:
        with self.path.open("rb") as file:
            file.seek(task.start)
            return file.read(task.size)


def parse_line(raw: bytes, defaults: LineDefaults) -> tuple[LineBody, str]:
    """Validate a line and return its body and digest. Raises InvalidRequest."""
    if len(raw) > MAX_LINE_BYTES:
        raise InvalidRequest(f"the line is longer than {MAX_LINE_BYTES >> 20} MB")
    content = _with_defaults(_content(raw, plain=defaults.plain), defaults.fields)
    body = validated(LineBody, content)
    body.output()  # raises for settings that the audio format does not support
    request_lexicon(body)  # raises for an invalid entry
    fields = json.dumps(content, ensure_ascii=False, sort_keys=True)
    hashed = "\0".join(filter(None, (defaults.model, fields, defaults.lexicon)))
    return body, blake2b(hashed.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _content(raw: bytes, *, plain: bool) -> dict[str, Any]:
    try:
        text = raw.decode()
        content = {"text": text.strip()} if plain else parse_json(text)
    except UnicodeDecodeError:
        raise InvalidRequest("the line is not UTF-8 text") from None
    except SchemaViolation as problem:
        message = problem.errors[0]["msg"].replace("the body", "the line")
        raise InvalidRequest(f"{message}; put plain texts, one per line, into a .txt file") from None
    if not isinstance(content, dict):
        raise InvalidRequest('a line must be a JSON object, such as {"text": "Hello."}, or a text in a .txt file')
    return content


def _given_id(raw: bytes, defaults: LineDefaults) -> str | None:
    """Return the id of an invalid line if the id itself is valid: errors are reported under it."""
    if len(raw) > MAX_LINE_BYTES:
        return None
    try:
        id = _content(raw, plain=defaults.plain).get("id")
    except ShoalError:
        return None
    return id if isinstance(id, str) and re.match(NAME, id) else None


def is_plain_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def default_name(number: int) -> str:
    return f"{number:06d}"


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset, content) of every line; an oversized line is cut just above the limit."""
    try:
        with path.open("rb") as file:
            number, start = 0, _skip_bom(file)
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if raw.strip():
                    yield number, start, raw
                start += len(raw) + _skip_rest(file, raw)
    except OSError as problem:
        raise InvalidRequest(f"cannot read {path}: {problem.strerror or problem}") from None


def _skip_bom(file: BinaryIO) -> int:
    """Skip a UTF-8 byte order mark and return the offset of the first line."""
    start = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
    return file.seek(start)


def _skip_rest(file: BinaryIO, raw: bytes) -> int:
    skipped = 0
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(1 << 20)
        skipped += len(raw)
    return skipped


def _with_defaults(content: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Merge default fields into a line. A line with any kind of voice does not get the default voice."""
    if "reference_id" in content or "references" in content:
        fields = {name: value for name, value in fields.items() if name != "voice"}
    return fields | content
