"""`shoal book`: make an audiobook."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import complete_voice
from shoal.cli.flag_groups import with_groups
from shoal.cli.flags import Json, Quiet, utf8_text
from shoal.cli.overwriting import refuse_overwriting
from shoal.cli.serving.serve import EngineFlags, server_extra
from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    from shoal.batch.manifest import Manifest
    from shoal.book.document import Book
    from shoal.book.output import BookTarget
    from shoal.book.speak import BookRun
    from shoal.book.subtitles import SubtitleTarget
    from shoal.book.work import Narration, PlannedChapter
    from shoal.cli.files.book_progress import BookProgress
    from shoal.settings import Settings

PANEL = "Speak"

Source = Annotated[Path, typer.Argument(metavar="BOOK", help="Book to read: an .epub, .txt or .md file.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write (.m4b, .m4a, .mp3, .opus), or a folder for a file per chapter."),
]
NarratorVoice = Annotated[
    str | None,
    typer.Option("--voice", help="Stored voice of the narrator. Default: the model's.", autocompletion=complete_voice),
]
QuotesVoice = Annotated[
    str | None,
    typer.Option(
        "--quotes-voice", help="Stored voice for quoted speech. Default: the narrator's.", autocompletion=complete_voice
    ),
]
Only = Annotated[
    str | None, typer.Option("--only", metavar="CHAPTERS", help="Speak and write these chapters only: 3, or 2-5,7.")
]
Redo = Annotated[
    list[str] | None,
    typer.Option(
        "--redo", metavar="CHAPTER:SENTENCE", help="Speak a sentence again with --seed, or the next seed; repeatable."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, max=2**63 - 1, help="Random seed of the book; with --redo, of that sentence. Default: 0."),
]
ListChapters = Annotated[
    bool, typer.Option("--list", help="List the chapters, or with --only their sentences, without speaking.")
]
Format = Annotated[
    str | None, typer.Option("--format", help="Format of the files in a folder: mp3, opus, m4a or m4b. Default: mp3.")
]
Bitrate = Annotated[
    int | None,
    typer.Option("--bitrate", metavar="KBIT", help="Bitrate in kbit/s. Default: m4b and m4a 64, mp3 96, opus 32."),
]
Subtitles = Annotated[
    str | None,
    typer.Option("--subtitles", help="Also write subtitles, a cue per sentence: srt, vtt, json, or a file so named."),
]
Epub = Annotated[
    Path | None, typer.Option("--epub", help="Also write an epub 3 that highlights each sentence while it is spoken.")
]
Work = Annotated[
    Path | None,
    typer.Option("--work", help="Folder for the spoken sentences. Default: OUTPUT.work."),
]
SkipFailed = Annotated[
    bool, typer.Option("--skip-failed", help="Write the book without the sentences that could not be spoken.")
]


Title = Annotated[str | None, typer.Option(help="Title. Default: the book's.", callback=utf8_text)]
Author = Annotated[str | None, typer.Option(help="Author. Default: the book's.", callback=utf8_text)]
Cover = Annotated[Path | None, typer.Option(help="JPEG or PNG image. Default: the book's cover.")]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(with_groups(book))


def book(
    source: Source,
    output: Output = None,
    voice: NarratorVoice = None,
    quotes_voice: QuotesVoice = None,
    only: Only = None,
    redo: Redo = None,
    seed: Seed = None,
    list_chapters: ListChapters = False,
    format: Format = None,
    bitrate: Bitrate = None,
    subtitles: Subtitles = None,
    epub: Epub = None,
    title: Title = None,
    author: Author = None,
    cover: Cover = None,
    work: Work = None,
    skip_failed: SkipFailed = False,
    *,
    engine: EngineFlags,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make an audiobook with chapters, cover and even loudness. Run the same command again to resume.

    Example: shoal book novel.epub -o novel.m4b --voice narrator --quotes-voice actor

    Example: shoal book notes.md -o notes/ --format opus

    Example: shoal book novel.epub -o novel.m4b --redo 3:17 --seed 5
    """
    settings = engine.settings()
    with server_extra():
        from shoal.book.output import parse_target
        from shoal.book.subtitles import parse_subtitles

    from shoal.cli.files.book_progress import BookProgress, print_list

    content = _read_source(source, title, author, cover)
    if list_chapters:
        print_list(content, only, quotes=quotes_voice is not None, json=json)
        return
    if output is None:
        raise InvalidRequest("no output: give a file or folder with -o, or list the chapters with --list")
    target = parse_target(output, format, bitrate)
    extras = Extras(None if subtitles is None else parse_subtitles(subtitles, target), epub)
    refuse_overwriting((output, epub, extras.subtitles.path if extras.subtitles else None), source, cover)
    job = BookJob(content, target, work or target.work, settings, BookProgress(shown=not quiet), extras)
    job.make(_narration(settings, voice, quotes_voice), only, redo or [], seed, skip_failed=skip_failed)
    job.progress.report(job.written, json=json)


def _read_source(source: Path, title: str | None, author: str | None, cover: Path | None) -> "Book":
    """Read the book; metadata of the flags replaces its own. Raises InvalidRequest."""
    from shoal.book.document import MAX_COVER_BYTES, parse_cover
    from shoal.book.readers import read_book

    content = read_book(source)
    if cover is not None:
        try:
            with cover.open("rb") as image:
                content = replace(content, cover=parse_cover(image.read(MAX_COVER_BYTES + 1)))
        except OSError as problem:
            raise InvalidRequest(f"cannot read {cover}: {problem.strerror or problem}") from None
    return replace(content, title=title or content.title, author=author or content.author)


def _narration(settings: "Settings", voice: str | None, quotes_voice: str | None) -> "Narration":
    """Return the voices, and hashes of everything that affects the audio. Raises VoiceNotFound, ModelNotFound."""
    from shoal.book.fingerprint import (
        has_word_times,
        joins_short_sentences,
        model_fingerprint,
        speaker,
        speaks_english_only,
    )
    from shoal.book.work import Narration
    from shoal.text.lexicon import lexicon_hash

    model, voices = settings.model, settings.voice_directory()
    quotes = None if quotes_voice is None else speaker(quotes_voice, model, voices)
    return Narration(
        model_fingerprint(model, settings.codec),
        lexicon_hash(settings.lexicon),
        speaker(voice, model, voices),
        quotes,
        english=speaks_english_only(model),
        words=has_word_times(model),
        joins_short=joins_short_sentences(model),
    )


@dataclass(frozen=True)
class Extras:
    """Files written in addition to the audio."""

    subtitles: "SubtitleTarget | None"
    epub: Path | None


@dataclass
class BookJob:
    """One run of `shoal book`."""

    content: "Book"
    target: "BookTarget"
    work: Path
    settings: "Settings"
    progress: "BookProgress"
    extras: Extras

    def __post_init__(self) -> None:
        self.written: list[Path] = []

    def make(
        self, narration: "Narration", only: str | None, places: list[str], seed: int | None, *, skip_failed: bool
    ) -> None:
        """Speak what is missing and write the outputs. Raises typer.Exit if sentences failed."""
        from shoal.batch.manifest import Manifest
        from shoal.book.selection import find_sentence, select_chapters
        from shoal.book.speak import plan_run
        from shoal.book.work import check_language, plan_book

        check_language(self.content, narration)
        # Refuse before Manifest creates the work folder.
        plan = plan_book(self.content, narration, {})
        self.target.check_chapters(len(select_chapters(plan, only)))
        for place in places:
            find_sentence(plan, place)
        with Manifest.opened(self.work) as manifest:
            run = plan_run(select_chapters(self._seeded(plan, narration, places, seed), only), narration, manifest)
            self.progress.begin(run)
            with self.progress.shown():
                self._speak(run, manifest)
                if self.progress.failures and not skip_failed:
                    self.progress.print_failures()
                    raise typer.Exit(1)
                self._write(run.chapters)

    def _seeded(
        self, plan: "list[PlannedChapter]", narration: "Narration", places: list[str], seed: int | None
    ) -> "list[PlannedChapter]":
        """Return the plan with the seeds of the work folder, in which those of `places` and of the book are updated."""
        from shoal.book.selection import redo
        from shoal.book.work import WorkState, plan_book

        state = WorkState.read(self.work)
        if places:
            redo(state, plan, places, seed)
        else:
            state.seed = seed or 0
        state.write(self.work)
        if state == WorkState(narration.seed):
            return plan
        return plan_book(self.content, replace(narration, seed=state.seed), state.redone)

    def _speak(self, run: "BookRun", manifest: "Manifest") -> None:
        from shoal.book.speak import speak_missing

        voices = self.settings.voice_directory()
        speak_missing(run, manifest, self.settings.source(), voices, self.progress.record)

    def _write(self, chapters: "list[PlannedChapter]") -> None:
        from shoal.book.audio_file import FORMATS
        from shoal.book.output import write_book
        from shoal.book.overlay import AUDIO_FORMAT, write_overlay
        from shoal.book.subtitles import write_subtitles
        from shoal.book.timeline import build_timeline

        self.progress.show("measuring loudness")
        spoken = self.progress.spoken
        timeline = build_timeline(chapters, lambda id: self.work / f"{id}.wav" if id in spoken else None)
        self.progress.show(f"encoding {self.target.format}")
        self.written += write_book(self.target, self.content, timeline, self.work)
        self.progress.audio_seconds = timeline.seconds
        if self.extras.subtitles is not None:
            self.written += write_subtitles(self.extras.subtitles, self.target, self.content, timeline)
        if self.extras.epub is not None:
            self.progress.show("writing the epub")
            bitrate = FORMATS[AUDIO_FORMAT].bitrate
            write_overlay(self.extras.epub, self.content, timeline, bitrate, self.work)
            self.written.append(self.extras.epub)
