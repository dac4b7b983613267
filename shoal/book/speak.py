"""Speak the pieces of a book that are missing in its work folder."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.api.engine_client import load_engine
from shoal.batch.lines import InputFile, LineDefaults
from shoal.batch.manifest import Manifest
from shoal.batch.run import BatchPlan, ProgressCallback, plan_batch, run
from shoal.book.work import Narration, PlannedChapter, pieces_of, write_lines
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest


@dataclass(frozen=True)
class BookRun:
    """The pieces of a book as a batch: those done and those to speak."""

    chapters: list[PlannedChapter]
    lines: InputFile
    batch: BatchPlan


def plan_run(chapters: Iterable[PlannedChapter], narration: Narration, manifest: Manifest) -> BookRun:
    """Compare the pieces with those in the work folder."""
    chosen = list(chapters)
    lines = write_lines(manifest.out, chosen, LineDefaults("book", narration.fields()))
    return BookRun(chosen, lines, plan_batch(lines, manifest))


def speak_missing(
    run_plan: BookRun, manifest: Manifest, source: EngineSource, voices: Path, watch: ProgressCallback
) -> None:
    """Load the model and speak the missing pieces. Each piece is on disk before `watch` is called for it.

    Raises InvalidRequest for a model without a voice of its own, in which every sentence would have another one.
    """
    if not run_plan.batch.tasks:
        return
    loaded = load_engine(source, voices)
    try:
        narrated = all(piece.speaker.name for chapter in run_plan.chapters for piece in pieces_of(chapter))
        if not narrated and loaded.service.default_voice is None:
            raise InvalidRequest("this model has no voice of its own: choose a stored voice with --voice")
        # Twice as many requests as slots: a finished sequence is replaced at the next step.
        run(run_plan.batch, run_plan.lines, loaded, manifest, 2 * source.config.slots, watch)
    finally:
        loaded.service.close()
