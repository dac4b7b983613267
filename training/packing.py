"""Pack utterances into training rows of tokens, several of one voice per row.

A row is what the engine would send for a long conversation in one voice: the opening token, then text, frames and stop
token of one utterance after another, cut where the row ends. Since every utterance's frames are to be predicted, one
row teaches speaking without a reference (its first utterance), with one, and with several or as a continuation. When a
voice has no more utterances, the row goes on with another opening token and another voice: an utterance that came twice
in a row would teach the model to copy codes.

Encoded shards hold these columns ready to be used (`training.encode` writes them), so reading one is a copy.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.model.family import NANO
from shoal.text.prompt import InterleavePrompts, join
from shoal.text.tokenizer import STOP
from training.data import write_whole

Columns = NDArray[np.int16]  # [positions, 1 + codebooks]

BYTES = 256  # text is bytes, and their ids come first
OPENING_ID = BYTES + NANO.control_tokens.index("interleave")
STOP_ID = BYTES + NANO.control_tokens.index("im_end")
SEMANTIC_BEGIN = BYTES + len(NANO.control_tokens)


def utterance_columns(prompts: InterleavePrompts, text: str, codes: NDArray[np.int32]) -> Columns:
    """Return the tokens of one utterance: its text, its frames [codebooks, n] and the stop token."""
    columns = prompts.grid
    return join([*prompts.speaker_text(text), columns.frames(codes), columns.control(STOP)]).T.astype(np.int16)


@dataclass(frozen=True)
class EncodedShard:
    """Utterances of one shard of speech, their tokens concatenated."""

    columns: Columns
    lengths: NDArray[np.int32]  # [utterances] positions of each
    voices: list[str]
    texts: list[str]
    offsets: NDArray[np.int64]  # [utterances] first sample of each in the shard of speech

    @classmethod
    def of(
        cls,
        utterances: Sequence[Columns],
        voices: list[str],
        texts: list[str],
        codebooks: int,
        offsets: Sequence[int] = (),
    ) -> EncodedShard:
        lengths = np.array([len(columns) for columns in utterances], np.int32)
        columns = np.concatenate((np.zeros((0, 1 + codebooks), np.int16), *utterances))
        return cls(columns, lengths, voices, texts, np.array(offsets, np.int64))

    def utterances(self) -> list[Columns]:
        return np.split(self.columns, np.cumsum(self.lengths)[:-1])

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        said = np.frombuffer(json.dumps({"voices": self.voices, "texts": self.texts}).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, columns=self.columns, lengths=self.lengths, said=said, offsets=self.offsets)
        write_whole(path, content.getvalue())

    @classmethod
    def read(cls, path: Path) -> EncodedShard:
        with np.load(path, allow_pickle=False) as stored:
            said = json.loads(stored["said"].tobytes())
            return cls(stored["columns"], stored["lengths"], said["voices"], said["texts"], stored["offsets"])


class Library:
    """All encoded utterances of a folder in device memory, concatenated; `refresh` adds new ones.

    Position 0 holds the opening token, so that any row is a list of positions. Utterances never move.
    """

    def __init__(self, folder: Path, codebooks: int, capacity: int, device: torch.device) -> None:
        self.folder = folder
        self.columns = torch.zeros(capacity, 1 + codebooks, dtype=torch.int16, device=device)
        self.columns[0, 0] = OPENING_ID
        self.filled = 1
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.by_voice: dict[str, list[int]] = {}
        self.voices: list[str] = []  # the voice of each utterance
        self.frames = 0
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self.starts)

    def refresh(self) -> int:
        """Copy new shards and return the number of new utterances. A full library takes no more."""
        before = len(self)
        for path in sorted(self.folder.glob("shard-*.npz")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                self._append(EncodedShard.read(path))
        return len(self) - before

    def _append(self, shard: EncodedShard) -> None:
        if self.filled + len(shard.columns) > len(self.columns):
            return
        self.columns[self.filled : self.filled + len(shard.columns)] = torch.from_numpy(shard.columns).to(
            self.columns.device
        )
        start = self.filled
        for length, voice in zip(shard.lengths.tolist(), shard.voices, strict=True):
            self.by_voice.setdefault(voice, []).append(len(self.starts))
            self.voices.append(voice)
            self.starts.append(start)
            self.lengths.append(length)
            start += length
        self.filled = start
        self.frames += int((shard.columns[:, 0] >= SEMANTIC_BEGIN).sum())


@dataclass(frozen=True)
class Rows:
    """Positions in a library [rows, length], and a mask of the positions whose text is lower-cased."""

    positions: NDArray[np.int64]
    lowered: NDArray[np.bool_]


class Packer:
    """Samples rows: voices in proportion to their utterances, whose order is random and without replacement.

    Utterances that arrive are mixed into those of their voice that have not been sampled yet.
    """

    def __init__(self, library: Library, rows: int, length: int, seed: int = 0, lowered: float = 0.0) -> None:
        self.library, self.rows, self.length, self.lowered = library, rows, length, lowered
        self.random = np.random.default_rng(seed)
        self.waiting: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}

    def draw(self) -> Rows:
        positions = np.zeros((self.rows, self.length), np.int64)
        lowered = np.zeros((self.rows, self.length), np.bool_)
        for row in range(self.rows):
            self._fill(positions[row], lowered[row])
        return Rows(positions, lowered)

    def _fill(self, positions: NDArray[np.int64], lowered: NDArray[np.bool_]) -> None:
        """Fill one row with voices: for each the opening token, which is position 0, then its utterances."""
        at = 0
        while at < self.length:
            voice = self.library.voices[self.random.integers(len(self.library))]
            at = self._fill_voice(voice, at + 1, positions, lowered)

    def _fill_voice(self, voice: str, at: int, positions: NDArray[np.int64], lowered: NDArray[np.bool_]) -> int:
        """Add utterances of a voice, none twice, until there is no room; return where they end."""
        used: set[int] = set()
        while at < self.length and (utterance := self._next(voice)) not in used:
            used.add(utterance)
            end = min(at + self.library.lengths[utterance], self.length)
            start = self.library.starts[utterance]
            positions[at:end] = np.arange(start, start + end - at)
            lowered[at:end] = self.random.random() < self.lowered
            at = end
        return at

    def _next(self, voice: str) -> int:
        waiting, everything = self.waiting.setdefault(voice, []), self.library.by_voice[voice]
        known = self.known.get(voice, 0)
        if known < len(everything) or not waiting:
            waiting += everything[known:] if known < len(everything) else everything
            self.known[voice] = len(everything)
            self.random.shuffle(waiting)
        return waiting.pop()

    def state(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "waiting": self.waiting, "known": self.known}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a packer over the same library."""
        self.random.bit_generator.state = state["random"]
        self.waiting = {voice: list(waiting) for voice, waiting in state["waiting"].items()}
        self.known = dict(state["known"])


def lower(columns: Tensor, where: Tensor) -> Tensor:
    """Return tokens [..., 1 + codebooks] with the capital letters at `where` [...] in lower case."""
    main = columns[..., :1]
    capital = where[..., None] & (main >= ord("A")) & (main <= ord("Z"))
    return torch.cat((main + 32 * capital, columns[..., 1:]), dim=-1)


def corrupt(columns: Tensor, codebook_size: int, frames: float, codes: float) -> Tensor:
    """Return tokens with a share of the frames, and of single residual codes, replaced by random ones.

    At inference a model reads what it sampled itself, so it has to be trained on a history with mistakes.
    """
    main, known = columns[..., 0], columns[..., 1:]
    audio = (main >= SEMANTIC_BEGIN)[..., None]
    whole = torch.rand(main.shape, device=main.device)[..., None] < frames
    single = torch.rand(known.shape, device=known.device) < codes
    residual = torch.arange(known.shape[-1], device=known.device) > 0
    made_up = torch.randint(codebook_size, known.shape, device=known.device)
    mixed = torch.where(audio & (whole | (single & residual)), made_up, known)
    token = torch.where(audio, mixed[..., :1] + SEMANTIC_BEGIN, main[..., None])
    return torch.cat((token, mixed), dim=-1)
