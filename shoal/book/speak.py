"""Speak the pieces of a book that are missing in its work folder."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.api.engine_client import load_engine
from shoal.batch.journal import JournalEntry
from shoal.batch.lines import InputFile, LineDefaults, LineTask
from shoal.batch.manifest import Manifest
from shoal.batch.run import BatchPlan, ProgressCallback, plan_batch, speak_all
from shoal.batch.speaker import LineSpeaker
from shoal.book.word_times import write_words
from shoal.book.work import PlannedChapter, pieces_of, write_lines
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest
from shoal.speech import FinishReason, Samples, SpeechRequest, Word

# Words of the piece that a task speaks at the moment.
_words: ContextVar[list[Word]] = ContextVar("words")


class PieceSpeaker(LineSpeaker):
    """Also stores the times of the words of a piece, before its entry in the journal is written."""

    async def speak(self, task: LineTask, raw: bytes) -> JournalEntry:
        heard = _words.set([])
        try:
            entry = await super().speak(task, raw)
            if entry.status == "done":
                await asyncio.to_thread(write_words, self.out, task.name, _words.get())
            return entry
        finally:
            _words.reset(heard)

    async def _samples(self, request: SpeechRequest) -> tuple[Samples, FinishReason]:
        pieces, finish = list[Samples](), FinishReason.STOP
        async with aclosing(self.loaded.service.speak(replace(request, timestamps=True))) as chunks:
            async for chunk in chunks:
                pieces.append(chunk.samples)
                _words.get().extend(chunk.words)
                finish = chunk.finish or finish
        return np.concatenate(pieces), finish


@dataclass(frozen=True)
class BookRun:
    """The pieces of a book as a batch: those done and those to speak."""

    chapters: list[PlannedChapter]
    lines: InputFile
    batch: BatchPlan


def plan_run(chapters: Iterable[PlannedChapter], manifest: Manifest, *, english: bool = False) -> BookRun:
    """Compare the pieces with those in the work folder. `english`: the model reads every text as English."""
    chosen = list(chapters)
    lines = write_lines(manifest.out, chosen, LineDefaults("book"), english=english)
    return BookRun(chosen, lines, plan_batch(lines, manifest))


def speak_missing(
    run_plan: BookRun,
    manifest: Manifest,
    source: EngineSource,
    voices: Path,
    watch: ProgressCallback,
    *,
    words: bool = False,
) -> None:
    """Load the model and speak what is missing. Each piece is on disk before `watch` is called with it.

    `words` also stores the times of the words, which the model must be calibrated for.

    Raises InvalidRequest for a model without a voice of its own, in which every sentence would have another one.
    """
    if not run_plan.batch.tasks:
        return
    loaded = load_engine(source, voices)
    try:
        narrated = all(piece.speaker.name for chapter in run_plan.chapters for piece in pieces_of(chapter))
        if not narrated and loaded.service.default_voice is None:
            raise InvalidRequest("this model has no voice of its own: choose a stored voice with --voice")
        kind = PieceSpeaker if words else LineSpeaker
        speaker = kind(loaded, manifest.out, run_plan.lines.defaults)
        tasks = ((task, run_plan.lines.raw(task)) for task in run_plan.batch.tasks)
        # Twice as many requests as slots: a finished sequence is replaced at the next step.
        asyncio.run(speak_all(tasks, speaker, manifest.add, 2 * source.config.slots, watch))
    finally:
        loaded.service.close()
