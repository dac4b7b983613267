"""Texts and codes to the grid a model reads.

A grid is int32 [1 + C, T], one column per position: row 0 holds token ids, rows 1 to C the codes of an audio frame or
zeros under text. Every part is tokenised on its own, because a pair merged across a border would be another prompt than
the one the model was trained on.

A long text is spoken in batches that share one conversation: `opening` is the prompt of batch 0; after the frames of a
batch, `tail` is what leads to the next. So the prompt of batch k is opening, frames, tail, frames, tail ..., and an
engine that has all but the last tail in its KV memory feeds only that. The stop token the model sampled was never fed
back; it is the first column of the tail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequest
from shoal.text.tokenizer import SPEAKER_TAG, STOP, Tokenizer

Grid: TypeAlias = NDArray[np.int32]  # [1 + C, T]
Codes: TypeAlias = NDArray[np.int32]  # [C, n]

TASK = "convert the provided text to speech"
TASK_WITH_VOICES = "convert the provided text to speech reference to the following:\n\nText:\n"


@dataclass(frozen=True, eq=False)
class Reference:
    """How a voice sounds: what it says in `text` and the frames it says it with, [C, n]."""

    text: str
    codes: Codes


@dataclass(frozen=True)
class GridBuilder:
    """Makes grid columns for one vocabulary. User text with control spellings is refused unless `specials`."""

    tokenizer: Tokenizer
    num_codebooks: int
    specials: bool = False

    def control(self, name: str, text: str = "") -> Grid:
        """One control token and text of ours after it."""
        return self.ids([self.tokenizer.token_id(name), *self.tokenizer.encode(text)])

    def text(self, text: str) -> Grid:
        if not self.specials:
            self.tokenizer.check_text(text)
        return self.ids(self.tokenizer.encode(text, specials=self.specials))

    def ids(self, ids: Sequence[int]) -> Grid:
        grid = np.zeros((1 + self.num_codebooks, len(ids)), np.int32)
        grid[0] = ids
        return grid

    def frames(self, codes: Codes) -> Grid:
        """The columns of frames [C, n]: the first codebook stands in row 0 as a token and in row 1 as a code."""
        check_codes(codes, self.num_codebooks, 1 + self.tokenizer.semantic_end - self.tokenizer.semantic_begin)
        return np.concatenate((codes[:1] + self.tokenizer.semantic_begin, codes)).astype(np.int32)


class PromptBuilder(Protocol):
    """One of the two prompt formats."""

    @property
    def grid(self) -> GridBuilder: ...

    def prompt(self, text: str, references: Sequence[Reference] = ()) -> Grid:
        """The prompt of batch 0: its `beginning` and its `own`. Raises TextError for control spellings."""
        ...

    def prefix(self, references: Sequence[Reference] = ()) -> Grid:
        """What comes before any text. Raises TextError for control spellings, InvalidRequest for impossible codes."""
        ...

    def first_turn(self, text: str) -> Grid:
        """What a text adds to that."""
        ...

    def next_turn(self, text: str) -> Grid:
        """What to append after the frames of one batch so that the model speaks `text` next."""
        ...


@dataclass(frozen=True)
class InterleavePrompts:
    """S1: text and audio in turn. An earlier batch reads like one more reference."""

    grid: GridBuilder

    def prompt(self, text: str, references: Sequence[Reference] = ()) -> Grid:
        return join([self.prefix(references), self.first_turn(text)])

    def prefix(self, references: Sequence[Reference] = ()) -> Grid:
        parts = [self.grid.control("<|interleave|>")]
        for reference in references:
            parts += [*self.said(reference.text), self.grid.frames(reference.codes), self.grid.control(STOP)]
        return join(parts)

    def first_turn(self, text: str) -> Grid:
        return join(self.said(text))

    def next_turn(self, text: str) -> Grid:
        return join([self.grid.control(STOP), *self.said(text)])

    def said(self, text: str) -> list[Grid]:
        # One voice speaks: upstream numbers every reference and every text 0.
        return [self.grid.text("<|speaker:0|>"), self.grid.text(text)]


@dataclass(frozen=True)
class ChatPrompts:
    """S2: a conversation; the system message carries the voices, each user message a batch, each answer its frames."""

    grid: GridBuilder

    def prompt(self, text: str, references: Sequence[Reference] = ()) -> Grid:
        return join([self.prefix(references), self.first_turn(text)])

    def prefix(self, references: Sequence[Reference] = ()) -> Grid:
        return join([*self.role("system"), *self.system(references)])

    def first_turn(self, text: str) -> Grid:
        return self.next_turn(text)

    def next_turn(self, text: str) -> Grid:
        return join([*self.end_of_message(), *self.ask(text)])

    def system(self, references: Sequence[Reference]) -> list[Grid]:
        if not references:
            return [self.grid.text(TASK)]
        return [
            self.grid.text(TASK_WITH_VOICES),
            self.grid.text(tagged_transcripts(references)),
            self.grid.text("\n\nSpeech:\n"),
            *(self.grid.frames(reference.codes) for reference in references),
        ]

    def ask(self, text: str) -> list[Grid]:
        return [
            *self.role("user"),
            self.grid.text(text),
            *self.end_of_message(),
            *self.role("assistant"),
            self.grid.control("<|voice|>"),
        ]

    def role(self, name: str) -> list[Grid]:
        return [self.grid.control("<|im_start|>", f"{name}\n")]

    def end_of_message(self) -> list[Grid]:
        return [self.grid.control(STOP, "\n")]


# Prompt formats by name; a model family names the one it was trained with.
PROMPT_BUILDERS: dict[str, Callable[[GridBuilder], PromptBuilder]] = {
    "interleave": InterleavePrompts,
    "chat": ChatPrompts,
}


def build_prompt(
    builder: PromptBuilder,
    texts: Sequence[str],
    references: Sequence[Reference] = (),
    generated: Sequence[Codes] = (),
) -> Grid:
    """The whole prompt for the batch after those `generated`: `texts[len(generated)]` is what the model speaks next."""
    if len(texts) <= len(generated):
        raise InvalidRequest(f"{len(generated)} batches are spoken and there are only {len(texts)} texts")
    parts = [builder.prompt(texts[0], references)]
    for codes, text in zip(generated, texts[1:], strict=False):
        parts += [builder.grid.frames(codes), builder.next_turn(text)]
    return join(parts)


def tagged_transcripts(references: Sequence[Reference]) -> str:
    """One line per reference. Its place is its speaker number, unless the transcript names a speaker itself."""
    return "\n".join(
        reference.text if SPEAKER_TAG.search(reference.text) else f"<|speaker:{speaker}|>{reference.text}"
        for speaker, reference in enumerate(references)
    )


def check_codes(codes: Codes, num_codebooks: int, codebook_size: int) -> None:
    """Raises InvalidRequest: codes of another model would be read as other tokens, or past the embedding table."""
    if codes.ndim != 2 or codes.shape[0] != num_codebooks:
        raise InvalidRequest(f"codes have shape {list(codes.shape)}, this model needs [{num_codebooks}, frames]")
    if not np.issubdtype(codes.dtype, np.integer):
        raise InvalidRequest(f"codes are {codes.dtype}, this model needs integers")
    if codes.size and not (codes.min() >= 0 and codes.max() < codebook_size):
        raise InvalidRequest(f"codes run from {codes.min()} to {codes.max()}, this model has 0 to {codebook_size - 1}")


def join(parts: Sequence[Grid]) -> Grid:
    return np.concatenate(parts, axis=1)
