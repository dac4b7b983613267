"""Text preprocessing: clean, normalize, split and tokenize a text into turns. Runs off the engine thread."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.audio.guard import shortest_seconds
from shoal.checkpoint.load import Checkpoint
from shoal.engine.sequence import Tokens
from shoal.engine.utterance import Turn
from shoal.speech import SpokenTurn
from shoal.text.clean import check_spoken_length, check_text, clean_text
from shoal.text.normalize import normalize
from shoal.text.prompt import PROMPT_BUILDERS, Grid, GridBuilder, PromptBuilder, join
from shoal.text.split import split_dialogue, split_sentences, split_text
from shoal.text.tokenizer import SPEAKER_TAG
from shoal.voices.voice import Voice


def build_turns(
    text: str,
    voice: Voice | None,
    checkpoint: Checkpoint,
    chunk_bytes: int | None = None,
    *,
    prepared: bool = True,
) -> list[Turn]:
    """Return the turns of a text, normalized if `prepared`. Raises TextError if the text cannot be spoken."""
    profile = checkpoint.profile
    text = clean_text(text)
    check_text(text, max_characters=profile.max_characters, tokenizer=checkpoint.tokenizer)
    if profile.normalize and prepared:
        text = normalize(text)
        check_spoken_length(text, max_characters=profile.max_characters)
    prompts = prompt_builder(checkpoint)
    # Shared by all turns: a voice is a hundred times as long as a short sentence.
    prefix = _tokens(prompts.prefix(voice.references if voice is not None else ()))
    pace, frame_rate = 1.0 if voice is None else voice.pace, checkpoint.codec.config.frame_rate
    return [
        Turn(
            turn,
            _tokens(prompts.first_turn(turn)),
            _tokens(prompts.next_turn(turn)),
            prefix,
            min_frames=int(shortest_seconds(turn, profile.min_duration, pace) * frame_rate),
            hold_frames=int(profile.hold_seconds * frame_rate),
        )
        for turn in split(text, checkpoint, chunk_bytes or profile.chunk_bytes)
    ]


def continue_context(
    turns: list[Turn], context: Sequence[SpokenTurn], checkpoint: Checkpoint, limit: int, *, keep_first: bool
) -> tuple[SpokenTurn, ...]:
    """Put `context` before the first of `turns`, in place, and return the part of it that was kept.

    A prompt has at most `limit` tokens. When the context does not fit, the most recent turns that fill half of the
    space are kept, so that turns are dropped, and the prefix in the KV cache changes, only once in a while. With
    `keep_first` its first turn is kept too: without a voice it is what identifies the speaker.
    """
    prompts, first = prompt_builder(checkpoint), turns[0]
    assert first.prefix is not None, "build_turns sets the prefix"
    space = limit - len(first.prefix) - len(first.continuation)
    kept = _fitting(
        context,
        [len(_tokens(prompts.next_turn(each.text))) + each.codes.shape[1] for each in context],
        space,
        keep_first=keep_first,
    )
    if kept:
        tokens = [_tokens(_context_grid(prompts, kept)), first.continuation]
        turns[0] = replace(first, body=np.concatenate(tokens))
    return kept


def _fitting(
    context: Sequence[SpokenTurn], sizes: list[int], space: int, *, keep_first: bool
) -> tuple[SpokenTurn, ...]:
    """Return all of `context` if `sizes` fit into `space` tokens, else the most recent turns that fill half of it."""
    if sum(sizes) <= space:
        return tuple(context)
    anchor = 1 if keep_first and sizes[0] <= space // 2 else 0
    left = space // 2 - sum(sizes[:anchor])
    start = len(context)
    while start > anchor and sizes[start - 1] <= left:
        start -= 1
        left -= sizes[start]
    return (*context[:anchor], *context[start:])


def _context_grid(prompts: PromptBuilder, context: Sequence[SpokenTurn]) -> Grid:
    """Return the grid of turns that were spoken, as it follows the prefix."""
    parts = [prompts.first_turn(context[0].text), prompts.grid.frames(context[0].codes)]
    for turn in context[1:]:
        parts += [prompts.next_turn(turn.text), prompts.grid.frames(turn.codes)]
    return join(parts)


def prompt_builder(checkpoint: Checkpoint) -> PromptBuilder:
    config = checkpoint.model.config
    tokens = GridBuilder(checkpoint.tokenizer, config.num_codebooks)
    return PROMPT_BUILDERS[config.family.prompt_format](tokens)


def split(text: str, checkpoint: Checkpoint, chunk_bytes: int) -> list[str]:
    """Split dialogue by speaker turns, as S2 was trained, and other text by sentences, packed unless the model says."""
    if checkpoint.model.config.family.splits_dialogue and SPEAKER_TAG.search(text):
        return split_dialogue(text, chunk_bytes)
    return (split_sentences if checkpoint.profile.sentence_turns else split_text)(text, chunk_bytes)


def _tokens(grid: Grid) -> Tokens:
    return np.ascontiguousarray(grid.T)
