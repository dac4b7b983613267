"""Text preprocessing: plan a text and tokenize it into turns. Runs off the engine thread."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice

import numpy as np

from shoal.audio.guard import shortest_seconds
from shoal.audio.tempo import check_tempo
from shoal.checkpoint.format.directory import ModelDescription
from shoal.checkpoint.format.profile import Alignment
from shoal.checkpoint.format.text_rules import checkpoint_text_rules, reads_phonemes
from shoal.engine.output.turn_repair import divide_text
from shoal.engine.output.word_times import WordPlan, WordTimes
from shoal.engine.scheduling.sequence import Tokens
from shoal.engine.utterance import TextTokens, Turn, Utterance
from shoal.errors import InvalidRequest
from shoal.kernels.word_times.text_path_numpy import MAX_TOKENS
from shoal.speech import Sampling, SamplingParams, SpeechRequest, SpokenTurn
from shoal.text.lexicon import Lexicon
from shoal.text.markup.ssml import is_ssml
from shoal.text.plan import TextPlan, TurnText, plan_text, word_reading
from shoal.text.prompt import PROMPT_BUILDERS, Grid, GridBuilder, PromptBuilder, Reference, join
from shoal.text.tokenizer import Tokenizer
from shoal.text.words import match_words, spoken_words, written_words
from shoal.voices.voice import Voice

Voices = Mapping[str | None, Voice | None]  # by name; None is the voice of the request


def plan_request(request: SpeechRequest, checkpoint: ModelDescription, lexicon: Lexicon | None = None) -> TextPlan:
    """Return the normalised turns, voices and pauses of a request. Raises TextError if it cannot be spoken.

    Raises MissingExtra for a speech rate without the package that changes it: the engine thread could not report it.
    """
    plan = plan_text(request, checkpoint_text_rules(checkpoint), checkpoint.tokenizer.check_text, lexicon)
    if any(turn.delivery.rate != 1.0 for turn in plan.turns):
        check_tempo()
    return plan


def build_utterance(
    number: int,
    request: SpeechRequest,
    plan: TextPlan,
    voices: Voices,
    checkpoint: ModelDescription,
    *,
    context_limit: Callable[[SamplingParams], int],
    lexicon: Lexicon | None = None,
    deadline: float | None = None,
) -> Utterance:
    """Return the utterance of a planned request; `voices` has the voice of the request and all that the plan names.

    `context_limit` returns the longest prompt, in tokens, that may contain earlier turns. Raises InvalidRequest for
    timestamps with a model that has no alignment.
    """
    turns = plan_turns(plan, voices, checkpoint, words=request.timestamps)
    sampling = (request.sampling or Sampling()).resolve(checkpoint.profile.sampling)
    context = request.context
    if context and turns[0].delivery.voice is None:
        limit = context_limit(sampling)
        context = continue_context(turns, context, checkpoint, limit, keep_first=voices[None] is None)
    return Utterance(
        number,
        turns,
        sampling,
        whole=request.whole,
        deadline=deadline,
        client=request.client,
        context=context,
        carry_turns=request.carry_turns,
        first_frames=request.first_chunk_frames,
        silence_before=round(plan.pause_before * checkpoint.codec.config.sample_rate),
        words=_word_times(request, turns, checkpoint, lexicon) if request.timestamps else None,
    )


def _word_times(
    request: SpeechRequest, turns: list[Turn], checkpoint: ModelDescription, lexicon: Lexicon | None
) -> WordTimes:
    alignment = check_alignment(checkpoint)
    plan = plan_words(request, turns, checkpoint, lexicon)
    return WordTimes(plan, 1.0 / checkpoint.codec.config.frame_rate, alignment.lead_frames)


def build_turns(
    text: str,
    voice: Voice | None,
    checkpoint: ModelDescription,
    chunk_bytes: int | None = None,
    *,
    normalize: bool = True,
) -> list[Turn]:
    """Return the turns of a text with one voice. Raises TextError if the text cannot be spoken."""
    plan = plan_request(SpeechRequest(text, chunk_bytes=chunk_bytes, normalize=normalize), checkpoint)
    return plan_turns(plan, {None: voice}, checkpoint)


def plan_turns(plan: TextPlan, voices: Voices, checkpoint: ModelDescription, *, words: bool = False) -> list[Turn]:
    """Tokenize a plan; `voices` has the voice of the request and all that the plan names.

    With `words` each turn has the tokens of its words.
    """
    prompts = prompt_builder(checkpoint)
    references = {name: () if voice is None else tuple(voice.references) for name, voice in voices.items()}
    prefixes = {name: _prefix(prompts, each) for name, each in references.items()}
    return [_turn(each, voices, prefixes, prompts, checkpoint, words=words) for each in plan.turns]


def continue_context(
    turns: list[Turn], context: Sequence[SpokenTurn], checkpoint: ModelDescription, limit: int, *, keep_first: bool
) -> tuple[SpokenTurn, ...]:
    """Put `context` before the first of `turns`, in place, and return the part of it that was kept.

    A prompt has at most `limit` tokens. When the context does not fit, the most recent turns that fill half of the
    space are kept, so that turns are dropped, and the prefix in the KV cache changes, only occasionally. With
    `keep_first` its first turn is kept too: without a voice it is what identifies the speaker.
    """
    prompts, first = prompt_builder(checkpoint), turns[0]
    assert first.prefix is not None, "plan_turns sets the prefix"
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
    """Return the prompt grid of spoken turns, text and codes, as it follows the prefix."""
    parts = [prompts.first_turn(context[0].text), prompts.grid.frames(context[0].codes)]
    for turn in context[1:]:
        parts += [prompts.next_turn(turn.text), prompts.grid.frames(turn.codes)]
    return join(parts)


def prompt_builder(checkpoint: ModelDescription) -> PromptBuilder:
    config = checkpoint.model.config
    phonemes = reads_phonemes(checkpoint.tokenizer, phonemes=config.family.phonemes)
    return _prompt_builder(checkpoint.tokenizer, config.num_codebooks, config.family.prompt_format, phonemes=phonemes)


@lru_cache(maxsize=8)  # keeps the tokens of fixed parts of prompts
def _prompt_builder(tokenizer: Tokenizer, codebooks: int, prompt_format: str, *, phonemes: bool) -> PromptBuilder:
    return PROMPT_BUILDERS[prompt_format](GridBuilder(tokenizer, codebooks, phonemes=phonemes))


@lru_cache(maxsize=64)  # a voice has a hundred times as many tokens as a short sentence
def _prefix(prompts: PromptBuilder, references: tuple[Reference, ...]) -> Tokens:
    """Return the prefix of all turns of a voice; it is shared by requests, and so cannot be written."""
    tokens = _tokens(prompts.prefix(references))
    tokens.flags.writeable = False
    return tokens


def _turn(
    turn: TurnText,
    voices: Voices,
    prefixes: Mapping[str | None, Tokens],
    prompts: PromptBuilder,
    checkpoint: ModelDescription,
    *,
    words: bool,
) -> Turn:
    profile, codec = checkpoint.profile, checkpoint.codec.config
    voice = voices[turn.delivery.voice]
    pace = 1.0 if voice is None else voice.pace
    tokenize = partial(_turn, voices=voices, prefixes=prefixes, prompts=prompts, checkpoint=checkpoint, words=words)
    divide = partial(_divide, turn, pace, tokenize)
    continuation = _tokens(prompts.next_turn(turn.text))
    return Turn(
        turn.text,
        continuation[prompts.tokens_before_first_turn :],
        continuation,
        prefixes[turn.delivery.voice],
        min_frames=int(shortest_seconds(turn.text, profile.min_duration, pace) * codec.frame_rate),
        hold_frames=int(profile.hold_seconds * codec.frame_rate),
        delivery=turn.delivery,
        silence_after=round(turn.pause_after * codec.sample_rate),
        divide=divide,
        text_tokens=place_words(turn.text, prompts) if words else None,
    )


def plan_words(
    request: SpeechRequest, turns: Sequence[Turn], checkpoint: ModelDescription, lexicon: Lexicon | None
) -> WordPlan:
    """Return the words of a request and which of them its turns speak. Raises InvalidRequest for a turn too long."""
    longest = max(turn.text_tokens.count for turn in turns if turn.text_tokens is not None)
    if longest > MAX_TOKENS:
        raise InvalidRequest(f"timestamps: a turn has {longest} tokens, the limit is {MAX_TOKENS}; lower chunk_bytes")
    ssml = request.ssml or (request.ssml is None and request.normalize and is_ssml(request.text))
    written = written_words(request.text, ssml=bool(ssml))
    spoken = [[word.text for word in spoken_words(turn.text)] for turn in turns]
    reading = word_reading(request, checkpoint_text_rules(checkpoint), lexicon)
    owners = iter(match_words([word.text for word in written], [word for turn in spoken for word in turn], reading))
    return WordPlan(tuple(written), [list(islice(owners, len(turn))) for turn in spoken])


def check_alignment(checkpoint: ModelDescription) -> Alignment:
    """Return the alignment of a model. Raises InvalidRequest if it has no heads that follow the text."""
    alignment, name = checkpoint.profile.alignment, checkpoint.name
    if alignment is None:
        raise InvalidRequest(
            f"timestamps: the attention heads of {name} are not known yet; run `shoal align calibrate {name}` once, "
            "then send SIGUSR2 to a running server"
        )
    if not alignment.heads:
        raise InvalidRequest(
            f"timestamps: no attention head of {name} follows the text (quality {alignment.quality:.2f}); "
            "use another model, or send the request without timestamps"
        )
    return alignment


def place_words(text: str, prompts: PromptBuilder) -> TextTokens:
    """Return the tokens of a turn's text and of each of its words."""
    spans = prompts.grid.text_spans(text)
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    words = ((bisect_right(ends, word.first), bisect_left(begins, word.last)) for word in spoken_words(text))
    return TextTokens(len(spans), prompts.tokens_after_text, tuple(words))


def _divide(
    turn: TurnText, pace: float, tokenize: Callable[[TurnText], Turn], seconds: float
) -> tuple[Turn, Turn] | None:
    """Return the turn with the words that `seconds` of speech contain, and one with the rest; None if one is empty."""
    texts = divide_text(turn.text, seconds, pace)
    if texts is None:
        return None
    spoken, rest = texts
    return tokenize(replace(turn, text=spoken, pause_after=0.0)), tokenize(replace(turn, text=rest))


def _tokens(grid: Grid) -> Tokens:
    return np.ascontiguousarray(grid.T)
