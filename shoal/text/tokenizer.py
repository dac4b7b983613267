"""Text to ids and control tokens to ids, kept apart.

A control token steers the model (`<|im_end|>` stops it), so what a user types must never become one. Ordinary encoding
therefore does not know control tokens at all: their spelling comes out as plain text ids. Prompts put control tokens in
by id.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import CheckpointError, TextError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

STOP = "<|im_end|>"
SPEAKER_TAG = re.compile(r"<\|speaker:[0-9]+\|>")

# A bracket inside ends the attempt, so that a text of nothing but `<|` is still read in one pass.
CONTROL_SPELLING = re.compile(r"<\|[^<|>]*\|>")

# The seventh alternative escapes its question mark, so it is no look-ahead. S1 was trained with it as it stands.
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

# Upstream cuts long text into slices of this many characters before encoding, and no pair merges across a cut.
SLICE_CHARACTERS = 400_000


class Tokenizer(Protocol):
    """What prompts need to know about a vocabulary. All ids are below `vocab_size`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def semantic_begin(self) -> int:
        """Id of code 0 of the first codebook; code i is `semantic_begin + i`."""
        ...

    @property
    def semantic_end(self) -> int:
        """Id of the last code, itself included."""
        ...

    @property
    def stop_id(self) -> int: ...

    def token_id(self, name: str) -> int:
        """Id of a control token such as `<|im_end|>`. Raises CheckpointError when the vocabulary has none."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of `text`. With `specials`, control spellings become control tokens: only for text we wrote ourselves."""
        ...

    def check_text(self, text: str) -> None:
        """Raises TextError naming the first control token spelled in `text`. Speaker tags are no control tokens."""
        ...


class ControlTokens:
    """The named tokens of a vocabulary: the half of `Tokenizer` that is the same for every file format."""

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
        for spelling in CONTROL_SPELLING.findall(text):
            if spelling in self.ids and not SPEAKER_TAG.fullmatch(spelling):
                raise TextError(f"the text contains the control token {spelling}, which cannot be spoken; remove it")


class TiktokenTokenizer(ControlTokens):
    """S1's layout: `tokenizer.tiktoken` holds byte sequences by rank, `special_tokens.json` the names that follow."""

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
        allowed = self.encoding.special_tokens_set if specials else set()
        ids: list[int] = []
        for start in range(0, len(text), SLICE_CHARACTERS):
            piece = text[start : start + SLICE_CHARACTERS]
            ids += self.encoding.encode(piece, allowed_special=allowed, disallowed_special=())
        return ids


class JsonTokenizer(ControlTokens):
    """S2's layout: one `tokenizer.json` as the Hugging Face libraries write it."""

    def __init__(self, directory: Path) -> None:
        source = directory / "tokenizer.json"
        document = read_object(source)
        super().__init__(read_added_tokens(document, source), source)
        # The library finds added tokens in any text it encodes, so ordinary text gets a vocabulary without them.
        self.ordinary = build_encoder({**document, "added_tokens": []}, source)
        self.vocab_size = 1 + max(*self.ordinary.get_vocab().values(), *self.ids.values())

    @cached_property
    def with_specials(self) -> "Encoder":
        return build_encoder(read_object(self.source), self.source)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        check_unicode(text)
        encoder = self.with_specials if specials else self.ordinary
        return encoder.encode(text, add_special_tokens=False).ids


def load_tokenizer(directory: Path, *, default_specials: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of a checkpoint directory, whichever of the two layouts it has. Raises CheckpointError."""
    if (directory / "tokenizer.json").is_file():
        return JsonTokenizer(directory)
    if (directory / "tokenizer.tiktoken").is_file():
        return TiktokenTokenizer(directory, default_specials)
    raise CheckpointError(f"{directory}: no tokenizer here, neither tokenizer.json nor tokenizer.tiktoken")


def count_codes(ids: Mapping[str, int], source: Path) -> int:
    """How many `<|semantic:i|>` tokens there are. Codes are found by offset, so their ids must follow one another."""
    begin = ids["<|semantic:0|>"]
    count = sum(name.startswith("<|semantic:") for name in ids)
    for code in range(count):
        if ids.get(f"<|semantic:{code}|>") != begin + code:
            raise CheckpointError(f"{source}: <|semantic:{code}|> is not token {begin + code}, where the codes put it")
    return count


def check_unicode(text: str) -> None:
    """Lone surrogates come in through JSON escapes and have no bytes to encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of `base64 rank`; every single byte must be there, or some text would have no ids."""
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
    """Names in order. Their place in the file is what counts; a stored id that says otherwise is a broken file."""
    document = read_json(path)
    if isinstance(document, list) and all(isinstance(name, str) for name in document):
        return {name: first + place for place, name in enumerate(document)}
    specials = require_object(document, path)
    for expected, (name, stored) in enumerate(specials.items(), start=first):
        if stored != expected or isinstance(stored, bool):
            raise CheckpointError(f"{path}: {name} has id {stored!r}, its place in the file makes it {expected}")
    return specials


def read_added_tokens(document: Mapping[str, Any], source: Path) -> dict[str, int]:
    try:
        return {str(token["content"]): int(token["id"]) for token in document["added_tokens"]}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{source}: added_tokens is not a list of tokens with content and id") from None


def build_encoder(document: Mapping[str, Any], source: Path) -> "Encoder":
    from tokenizers import Tokenizer as Encoder

    try:
        return Encoder.from_str(json.dumps(document))
    except Exception as error:  # the library raises bare Exception for every broken document
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
