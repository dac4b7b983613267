"""Tokenizers of both checkpoint layouts; control tokens are encoded separately from text.

A control token steers the model (`<|im_end|>` stops it), so user text must never encode to one. Ordinary encoding has
no control tokens: their spelling becomes plain text tokens. Prompts insert control tokens by id.
"""

import base64
import json
import re
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import CheckpointError, TextError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

STOP = "<|im_end|>"
SPEAKER_TAG = re.compile(r"<\|speaker:[0-9]+\|>")

# No brackets inside, so that a text of many `<|` is scanned in linear time.
CONTROL_SPELLING = re.compile(r"<\|[^<|>]*\|>")

# The seventh alternative escapes its question mark and so is not a look-ahead; S1 was trained with it.
SPLIT_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"\p{P}",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(\?!\S)",
        r"\s+",
    )
)

# Upstream encodes long text in slices of this many characters, without merges across slices.
SLICE_CHARACTERS = 400_000


class Tokenizer(Protocol):
    """Vocabulary interface of the prompt builders. All ids are below `vocab_size`."""

    def __hash__(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def spans(self, text: str, *, specials: bool = False) -> list[tuple[int, int]]:
        """Return the characters [begin, end) of `text` that each token of `encode(text)` stands for.

        Several tokens may share a character of more than one byte.
        """
        ...

    @property
    def semantic_begin(self) -> int:
        """Id of code 0 of the first codebook; code i is `semantic_begin + i`."""
        ...

    @property
    def semantic_end(self) -> int:
        """Id of the last code, inclusive."""
        ...

    @property
    def stop_id(self) -> int: ...

    def token_id(self, name: str) -> int:
        """Return the id of a control token such as `<|im_end|>`. Raises CheckpointError if the vocabulary has none."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Return the ids of `text`. With `specials`, control spellings become control tokens: for trusted text only."""
        ...

    def check_text(self, text: str) -> None:
        """Raise TextError naming the first control token in `text`. Speaker tags are allowed."""
        ...


def without_speaker_tags(text: str) -> str:
    return SPEAKER_TAG.sub("", text) if "<|" in text else text


def refuse_control_tokens(text: str, spellings: Container[str]) -> None:
    """Raise TextError naming the first of the control tokens in `text`. Speaker tags are allowed."""
    if "<|" not in text:
        return
    for spelling in CONTROL_SPELLING.findall(text):
        if spelling in spellings and not SPEAKER_TAG.fullmatch(spelling):
            raise TextError(f"the text contains the control token {spelling}, which cannot be spoken; remove it")


class ControlTokens:
    """Control tokens of a vocabulary: the part of `Tokenizer` that both layouts share."""

    def __init__(self, ids: Mapping[str, int], source: Path) -> None:
        self.ids = dict(ids)
        self.source = source
        self.stop_id = self.token_id(STOP)
        self.semantic_begin = self.token_id("<|semantic:0|>")
        self.semantic_end = self.semantic_begin + count_codes(self.ids, source) - 1

    def token_id(self, name: str) -> int:
        try:
            return self.ids[name]
        except KeyError:
            raise CheckpointError(f"{self.source}: the vocabulary has no token {name}") from None

    def check_text(self, text: str) -> None:
        refuse_control_tokens(text, self.ids)


class TiktokenTokenizer(ControlTokens):
    """S1's layout: `tokenizer.tiktoken` has byte sequences by rank, `special_tokens.json` the control tokens."""

    def __init__(self, directory: Path, default_specials: Sequence[str] = ()) -> None:
        import tiktoken

        ranks = read_ranks(directory / "tokenizer.tiktoken")
        source = directory / "special_tokens.json"
        if default_specials and not source.is_file():
            specials = dict(zip(default_specials, range(len(ranks), len(ranks) + len(default_specials)), strict=True))
        else:
            specials = read_specials(source, first=len(ranks))
        super().__init__(specials, source)
        self.vocab_size = len(ranks) + len(self.ids)
        self.encoding = tiktoken.Encoding(
            directory.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self.ids
        )

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        check_unicode(text)
        if len(text) <= SLICE_CHARACTERS:
            return self._encode_slice(text, specials=specials)
        starts = range(0, len(text), SLICE_CHARACTERS)
        slices = (self._encode_slice(text[start : start + SLICE_CHARACTERS], specials=specials) for start in starts)
        return [token for each in slices for token in each]

    def _encode_slice(self, text: str, *, specials: bool) -> list[int]:
        if not specials:
            return self.encoding.encode_ordinary(text)  # `encode` would search the text for every control token
        return self.encoding.encode(text, allowed_special=self.encoding.special_tokens_set, disallowed_special=())

    def spans(self, text: str, *, specials: bool = False) -> list[tuple[int, int]]:
        sizes = [len(each) for each in self.encoding.decode_tokens_bytes(self.encode(text, specials=specials))]
        # Index of the character that each byte belongs to.
        owners = [index for index, character in enumerate(text) for _ in character.encode()]
        ends = list(accumulate(sizes))
        return [(owners[end - size], owners[end - 1] + 1) for size, end in zip(sizes, ends, strict=True)]


class JsonTokenizer(ControlTokens):
    """S2's layout: a `tokenizer.json` of Hugging Face tokenizers."""

    def __init__(self, directory: Path) -> None:
        source = directory / "tokenizer.json"
        document = read_object(source)
        super().__init__(read_added_tokens(document, source), source)
        # The library matches added tokens in any text, so ordinary text is encoded with a vocabulary without them.
        self.ordinary = build_encoder({**document, "added_tokens": []}, source)
        self.vocab_size = 1 + max(*self.ordinary.get_vocab().values(), *self.ids.values())

    @cached_property
    def with_specials(self) -> "HFTokenizer":
        return build_encoder(read_object(self.source), self.source)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        check_unicode(text)
        encoder = self.with_specials if specials else self.ordinary
        return encoder.encode(text, add_special_tokens=False).ids

    def spans(self, text: str, *, specials: bool = False) -> list[tuple[int, int]]:
        check_unicode(text)
        encoder = self.with_specials if specials else self.ordinary
        return encoder.encode(text, add_special_tokens=False).offsets


def load_tokenizer(directory: Path, *, default_specials: Sequence[str] = ()) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory in either layout. Raises CheckpointError."""
    if (directory / "tokenizer.json").is_file():
        return JsonTokenizer(directory)
    if (directory / "tokenizer.tiktoken").is_file():
        return TiktokenTokenizer(directory, default_specials)
    raise CheckpointError(f"{directory}: no tokenizer found, neither tokenizer.json nor tokenizer.tiktoken")


def count_codes(ids: Mapping[str, int], source: Path) -> int:
    """Count the `<|semantic:i|>` tokens. Raises CheckpointError unless their ids are consecutive."""
    begin = ids["<|semantic:0|>"]
    count = sum(name.startswith("<|semantic:") for name in ids)
    for code in range(count):
        if ids.get(f"<|semantic:{code}|>") != begin + code:
            raise CheckpointError(
                f"{source}: <|semantic:{code}|> must be token {begin + code}: ids must be consecutive"
            )
    return count


def check_unicode(text: str) -> None:
    """Raise TextError for lone surrogates, which JSON escapes can produce and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of `base64 rank`. Raises CheckpointError unless all 256 single bytes are present."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line or line.startswith("= "):  # upstream skips both
            continue
        token, rank = parse_rank(path, number, line)
        ranks[token] = rank
    check_ranks(path, ranks)
    return ranks


def parse_rank(path: Path, number: int, line: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except ValueError:
        raise CheckpointError(f"{path}: line {number} is not a base64 token and its rank") from None


def check_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of the 256 single bytes have no rank, the first is {missing[0]}")
    if set(ranks.values()) != set(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")


def read_specials(path: Path, first: int) -> dict[str, int]:
    """Read the control tokens. Raises CheckpointError when a stored id differs from the position in the file."""
    document = read_json(path)
    if isinstance(document, list) and all(isinstance(name, str) for name in document):
        return {name: first + place for place, name in enumerate(document)}
    specials = require_object(document, path)
    for expected, (name, stored) in enumerate(specials.items(), start=first):
        if stored != expected or isinstance(stored, bool):
            raise CheckpointError(f"{path}: {name} has id {stored!r}, but its position in the file makes it {expected}")
    return specials


def read_added_tokens(document: Mapping[str, Any], source: Path) -> dict[str, int]:
    try:
        return {str(token["content"]): int(token["id"]) for token in document["added_tokens"]}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{source}: added_tokens is not a list of tokens with content and id") from None


def build_encoder(document: Mapping[str, Any], source: Path) -> "HFTokenizer":
    from tokenizers import Tokenizer as HFTokenizer

    try:
        return HFTokenizer.from_str(json.dumps(document))
    except Exception as error:  # edge to the tokenizers library, which raises bare Exception for invalid documents
        raise CheckpointError(f"{source}: not a usable tokenizer: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    return require_object(read_json(path), path)


def read_json(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None


def require_object(document: object, path: Path) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
