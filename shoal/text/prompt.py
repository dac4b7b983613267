"""Build prompt grids from texts and codes.

A grid is int32 [1 + C, T], one column per position: row 0 holds token ids, rows 1 to C the codes of an audio frame, or
zeros under text. Every part is tokenized on its own: merges across a boundary would differ from the training prompts.

A long text is spoken in turns that share one context. `prompt` is the prompt of turn 0; `next_turn` is what follows the
frames of a turn and leads to the next. The prompt of turn k is thus prompt, frames, next_turn, frames, next_turn ...,
and an engine with all but the last part in its KV cache only computes that part. The sampled stop token is never fed
back; it is the first position of `next_turn`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequest
from shoal.text import phonemes
from shoal.text.tokenizer import SPEAKER_TAG, STOP, Tokenizer

Grid: TypeAlias = NDArray[np.int32]  # [1 + C, T]
Codes: TypeAlias = NDArray[np.int32]  # [C, n]

TASK = "convert the provided text to speech"
TASK_WITH_VOICES = "convert the provided text to speech reference to the following:\n\nText:\n"


@dataclass(frozen=True, eq=False)
class Reference:
    """Voice reference: a transcript and its codes [C, n]. Without `speaker` it is a speaker of its own."""

    text: str
    codes: Codes
    speaker: int | None = None


@dataclass(frozen=True)
class GridBuilder:
    """Builds grids for one vocabulary. Rejects control tokens in user text unless `specials`."""

    tokenizer: Tokenizer
    num_codebooks: int
    specials: bool = False
    phonemes: bool = False  # phoneme tags in text become control tokens

    def control(self, name: str, text: str = "") -> Grid:
        """Return one control token followed by trusted text."""
        return self.ids(self.control_ids(name, text))

    def control_ids(self, name: str, text: str = "") -> list[int]:
        return [self.tokenizer.token_id(name), *self.tokenizer.encode(text)]

    def text(self, text: str) -> Grid:
        return self.ids(self.text_ids(text))

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of user text. Raises TextError for control tokens."""
        if self.phonemes and phonemes.START in text:
            return [each for part in phonemes.TAG.split(self._checked(text)) for each in self._part(part)]
        return self.tokenizer.encode(self._checked(text), specials=self.specials)

    def text_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the characters [begin, end) of `text` that each column of `text(text)` stands for."""
        if not (self.phonemes and phonemes.START in text):
            return self.tokenizer.spans(text, specials=self.specials)
        spans, start = list[tuple[int, int]](), 0
        for part in phonemes.TAG.split(text):
            tag = phonemes.TAG.fullmatch(part) is not None
            found = [(0, len(part))] if tag else self.tokenizer.spans(part, specials=self.specials)
            spans += [(start + begin, start + end) for begin, end in found]
            start += len(part)
        return spans

    def _checked(self, text: str) -> str:
        if not self.specials:
            self.tokenizer.check_text(phonemes.without_spans(text) if self.phonemes else text)
        return text

    def _part(self, text: str) -> Sequence[int]:
        if phonemes.TAG.fullmatch(text):
            return [self.tokenizer.token_id(text)]
        return self.tokenizer.encode(text, specials=self.specials)

    def ids(self, ids: Sequence[int]) -> Grid:
        grid = np.zeros((1 + self.num_codebooks, len(ids)), np.int32)
        grid[0] = ids
        return grid

    def frames(self, codes: Codes) -> Grid:
        """Return the grid of frames [C, n]: row 0 holds the semantic tokens, rows 1 to C the codes."""
        check_codes(codes, self.num_codebooks, 1 + self.tokenizer.semantic_end - self.tokenizer.semantic_begin)
        return np.concatenate((codes[:1] + self.tokenizer.semantic_begin, codes)).astype(np.int32)


class PromptBuilder(Protocol):
    """Prompt format of a model family."""

    def __hash__(self) -> int: ...

    @property
    def grid(self) -> GridBuilder: ...

    @property
    def tokens_after_text(self) -> int:
        """Columns between the text of a turn and its first frame."""
        ...

    @property
    def tokens_before_first_turn(self) -> int:
        """Columns at the beginning of `next_turn` that `first_turn` does not have; the others are the same."""
        ...

    def prompt(self, text: str, references: Sequence[Reference] = ()) -> Grid:
        """Return the prompt of turn 0: `prefix` and `first_turn`. Raises TextError for control tokens."""
        ...

    def prefix(self, references: Sequence[Reference] = ()) -> Grid:
        """Return the part before the text. Raises TextError for control tokens, InvalidRequest for invalid codes."""
        ...

    def first_turn(self, text: str) -> Grid:
        """Return the part of turn 0 after the prefix."""
        ...

    def next_turn(self, text: str) -> Grid:
        """Return the part to append after the frames of a turn so that the model speaks `text` next."""
        ...


@dataclass(frozen=True)
class InterleavePrompts:
    """S1 format: text and audio alternate. An earlier turn has the form of a further reference."""

    grid: GridBuilder
    tokens_after_text = 0
    tokens_before_first_turn = 1

    def prompt(self, text: str, references: Sequence[Reference] = ()) -> Grid:
        return join([self.prefix(references), self.first_turn(text)])

    def prefix(self, references: Sequence[Reference] = ()) -> Grid:
        parts = [self.grid.control("<|interleave|>")]
        for reference in references:
            parts += [*self.speaker_text(reference.text), self.grid.frames(reference.codes), self.grid.control(STOP)]
        return join(parts)

    def first_turn(self, text: str) -> Grid:
        return self.grid.ids([*self._speaker, *self.grid.text_ids(text)])

    def next_turn(self, text: str) -> Grid:
        return self.grid.ids([self.grid.tokenizer.stop_id, *self._speaker, *self.grid.text_ids(text)])

    def speaker_text(self, text: str) -> list[Grid]:
        return [self.grid.ids(self._speaker), self.grid.text(text)]

    @cached_property
    def _speaker(self) -> list[int]:
        # Single speaker: upstream numbers every reference and every text 0.
        return self.grid.text_ids("<|speaker:0|>")


@dataclass(frozen=True)
class ChatPrompts:
    """S2 format: the system message holds the voices, each user message a turn, each assistant message its frames."""

    grid: GridBuilder
    tokens_before_first_turn = 0

    def prompt(self, text: str, references: Sequence[Reference] = ()) -> Grid:
        return join([self.prefix(references), self.first_turn(text)])

    def prefix(self, references: Sequence[Reference] = ()) -> Grid:
        return join([self.grid.ids(self.role("system")), *self.system_message(references)])

    def first_turn(self, text: str) -> Grid:
        return self.next_turn(text)

    def next_turn(self, text: str) -> Grid:
        return self.grid.ids([*self._before_text, *self.grid.text_ids(text), *self._after_text])

    def system_message(self, references: Sequence[Reference]) -> list[Grid]:
        if not references:
            return [self.grid.text(TASK)]
        return [
            self.grid.text(TASK_WITH_VOICES),
            self.grid.text(tagged_transcripts(references)),
            self.grid.text("\n\nSpeech:\n"),
            *(self.grid.frames(reference.codes) for reference in references),
        ]

    @property
    def tokens_after_text(self) -> int:
        return len(self._after_text)

    @cached_property
    def _before_text(self) -> list[int]:
        return [*self.end_of_message(), *self.role("user")]

    @cached_property
    def _after_text(self) -> list[int]:
        return [*self.end_of_message(), *self.role("assistant"), *self.grid.control_ids("<|voice|>")]

    def role(self, name: str) -> list[int]:
        return self.grid.control_ids("<|im_start|>", f"{name}\n")

    def end_of_message(self) -> list[int]:
        return self.grid.control_ids(STOP, "\n")


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
    """Return the complete prompt of the turn after the `generated` ones, which speaks `texts[len(generated)]`."""
    if len(texts) <= len(generated):
        raise InvalidRequest(f"{len(generated)} turns are generated but there are only {len(texts)} texts")
    parts = [builder.prompt(texts[0], references)]
    for codes, text in zip(generated, texts[1:], strict=False):
        parts += [builder.grid.frames(codes), builder.next_turn(text)]
    return join(parts)


def tagged_transcripts(references: Sequence[Reference]) -> str:
    """Return one line per reference, tagged with its speaker, or its index, unless the transcript has its own tag."""
    return "\n".join(
        reference.text
        if SPEAKER_TAG.search(reference.text)
        else f"<|speaker:{index if reference.speaker is None else reference.speaker}|>{reference.text}"
        for index, reference in enumerate(references)
    )


def check_codes(codes: Codes, num_codebooks: int, codebook_size: int) -> None:
    """Raise InvalidRequest for codes of another model, which would index other tokens or past the table."""
    if codes.ndim != 2 or codes.shape[0] != num_codebooks:
        raise InvalidRequest(f"codes have shape {list(codes.shape)}, this model needs [{num_codebooks}, frames]")
    if not np.issubdtype(codes.dtype, np.integer):
        raise InvalidRequest(f"codes are {codes.dtype}, this model needs integers")
    if codes.size and not (codes.min() >= 0 and codes.max() < codebook_size):
        raise InvalidRequest(
            f"codes range from {codes.min()} to {codes.max()}, this model has 0 to {codebook_size - 1}"
        )


def join(parts: Sequence[Grid]) -> Grid:
    return np.concatenate(parts, axis=1)
