"""`shoal book` as a person runs it: to the end, killed, and again; with nano, mostly in this process."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import av
import pytest

from shoal import load
from shoal.api.engine_client import EngineHandle
from shoal.batch.manifest import MANIFEST
from shoal.book import speak
from shoal.engine.engine import Engine
from shoal.voices.store import VoiceStore
from tests.book.prose import write_epub
from tests.cli.conftest import Run, Shoal
from tests.cli.conftest import shoal as shoal
from tests.server.conftest import ROOT, surroundings

CHAPTERS = {"One": ["“Come,” he said. It rains."], "Two": ["Stop! We stay here.", "It rains."]}
TEXTS = ["One", "“Come,” he said.", "It rains.", "Two", "Stop!", "We stay here.", "It rains."]
SENTENCES = 7  # of which "It rains." occurs twice, and "Stop!" is spoken with the next one
PIECES = 6
# Kills its own process when the third entry has reached the disk.
KILLED = """
import os, signal
from shoal.batch.manifest import Manifest
from shoal.cli import main
add, count = Manifest.add, 0
def killing(self, entries):
    global count
    add(self, entries)
    count += len(entries)
    if count >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
Manifest.add = killing
main()
"""


class OpenService:
    """The service of an engine that several runs share: closing it does nothing."""

    def __init__(self, engine: Engine) -> None:
        self._service = engine.service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("nano") as engine:
        yield engine


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Path:
    """A small epub in an empty working directory; models are not loaded again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_VOICES", str(tmp_path / "voices"))
    handle = EngineHandle(OpenService(engine), VoiceStore(tmp_path / "voices"), 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(speak, "load_engine", lambda source, voices: handle)
    return write_epub(tmp_path / "in.epub", CHAPTERS)


@pytest.fixture(scope="module")
def other_voice(engine: Engine) -> str:
    """A voice that is not the narrator's."""
    names = VoiceStore(Path("none"), engine.service.core.checkpoint.builtin_voices).names()
    return next(name for name in names if name != engine.service.default_voice)


def figures(run: Run) -> dict[str, Any]:
    assert run.code == 0, run.err
    return dict(json.loads(run.text))


def stamps(work: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in work.glob("*.wav")}


def journal(work: Path) -> list[str]:
    return [json.loads(line)["file"] for line in (work / MANIFEST).read_text().splitlines()]


def test_a_killed_book_resumes_without_losing_or_repeating_a_sentence(
    book: Path, shoal: Shoal, other_voice: str, tmp_path: Path
) -> None:
    flags = ("book", "in.epub", "-o", "out.m4b", "--quotes-voice", other_voice, "--slots", "1")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *flags],
        capture_output=True,
        text=True,
        env=surroundings(tmp_path) | {"PYTHONPATH": str(ROOT), "SHOAL_VOICES": str(tmp_path / "voices")},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    work = tmp_path / "out.m4b.work"
    kept = {name: stamp for name, stamp in stamps(work).items() if name in journal(work)}
    assert len(kept) >= 3
    assert not (tmp_path / "out.m4b").exists()

    first = figures(shoal(*flags, "--subtitles", "json", "--json"))
    assert (first["chapters"], first["sentences"], first["failed"]) == (2, SENTENCES, 0)
    assert 0 < first["done_before"] < SENTENCES
    made = stamps(work)
    assert len(made) == PIECES
    assert kept.items() <= made.items(), "what was spoken is not spoken again"
    cues = json.loads((tmp_path / "out.json").read_text())["sentences"]
    assert [cue["text"] for cue in cues] == TEXTS
    assert [" ".join(word["text"] for word in cue["words"]) for cue in cues] == TEXTS
    times = [time for cue in cues for word in cue["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    with av.open("out.m4b") as container:
        assert [mark["metadata"]["title"] for mark in container.chapters()] == ["One", "Two"]

    # The same book in one go has the same samples.
    whole = figures(shoal(*flags[:2], "-o", "whole.opus", *flags[4:], "--json"))
    assert whole["audio_seconds"] == first["audio_seconds"]
    for name in made:
        assert (tmp_path / "whole.opus.work" / name).read_bytes() == (work / name).read_bytes()

    again = figures(shoal(*flags, "--redo", "2:2", "--seed", "5", "--json"))
    assert (again["done_before"], len(stamps(work))) == (SENTENCES - 2, PIECES + 1)
    same = figures(shoal(*flags, "--json"))
    assert same["audio_seconds"] == again["audio_seconds"] != first["audio_seconds"], "the redone sentence stays"


def test_chapters_are_generated_separately_and_reused(book: Path, shoal: Shoal, tmp_path: Path) -> None:
    alone = figures(shoal("book", "in.epub", "-o", "out", "--only", "2", "--seed", "3", "--json"))
    assert alone["files"] == ["out/02 Two.mp3"]
    both = figures(shoal("book", "in.epub", "-o", "out", "--seed", "3", "--format", "opus", "--json"))
    assert (both["done_before"], both["sentences"]) == (5, SENTENCES)
    redone = figures(shoal("book", "in.epub", "-o", "out", "--redo", "1:1", "--json"))
    assert redone["done_before"] == SENTENCES - 1, "the seed of the book is remembered"


def test_a_sentence_that_fails_is_named_and_can_be_left_out(book: Path, shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("It rains.\n\nSo <|im_end|> it goes.\n\nJe ne suis pas avec vous.\n")
    failed = shoal("book", "bad.txt", "-o", "bad.m4b")
    assert failed.code == 1
    assert "1:2:" in failed.said
    assert "1 sentence could not be spoken: change the text" in failed.said
    assert not (tmp_path / "bad.m4b").exists()
    made = figures(shoal("book", "bad.txt", "-o", "bad.m4b", "--skip-failed", "--json"))
    assert (made["sentences"], made["failed"], made["done_before"]) == (3, 1, 2)
    assert (tmp_path / "bad.m4b").exists()


def test_an_interrupt_keeps_what_was_made(book: Path, shoal: Shoal) -> None:
    from shoal.cli.files.book_progress import BookProgress

    record = BookProgress.record

    def interrupting(self: BookProgress, task: Any, entry: Any) -> None:
        record(self, task, entry)
        if len(self.spoken) == 2:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does, also for asyncio

    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(BookProgress, "record", interrupting)
        interrupted = shoal("book", "in.epub", "-o", "out.m4b", "--slots", "1")
    assert interrupted.code == 130
    assert "sentences are done; run the same command again to resume" in interrupted.said
    assert figures(shoal("book", "in.epub", "-o", "out.m4b", "--json"))["done_before"] >= 2


def test_chapters_and_sentences_are_listed_without_a_model(book: Path, shoal: Shoal) -> None:
    assert (
        shoal("book", "in.epub", "--list", "--only", "2").text
        == "2:1\tTwo\n2:2\tStop!\n2:3\tWe stay here.\n2:4\tIt rains.\n"
    )
    listed = figures(shoal("book", "in.epub", "--list", "--json"))
    assert [(each["title"], each["sentences"]) for each in listed["chapters"]] == [("One", 3), ("Two", 4)]
    assert "The Harbour & the Key" in shoal("book", "in.epub", "--list").text


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ((), 2, "no output"),
        (("-o", "a.m4b", "--voice", "nobody"), 5, "there is no voice 'nobody'"),
        (("-o", "a.m4b", "--cover", "in.epub"), 2, "must be a JPEG or PNG"),
        (("-o", "a.m4b", "--epub", "in.epub"), 2, "would be overwritten"),
        (("-o", "a.m4b", "--only", "9"), 2, "chapters 1 to 2"),
        (("-o", "a.m4b", "--redo", "1:9"), 2, "sentences 1 to 3"),
        (("-o", "a.m4b", "--redo", "1:1", "--redo", "3"), 2, "--redo takes"),
    ],
)
def test_what_cannot_be_done_is_refused(
    book: Path, shoal: Shoal, flags: tuple[str, ...], code: int, message: str
) -> None:
    run = shoal("book", "in.epub", *flags)
    assert run.code == code, run.err
    assert message in run.said
    assert not list(Path().glob("a.m4b*"))  # no empty work folder either


def test_a_book_in_another_language_is_refused_before_anything_is_spoken(
    book: Path, shoal: Shoal, tmp_path: Path
) -> None:
    (tmp_path / "livre.txt").write_text("Je ne suis pas avec vous. Il est dans la maison, mais elle est très loin.\n")
    run = shoal("book", "livre.txt", "-o", "livre.m4b")
    assert run.code == 3
    assert "the book looks like French" in run.said
    assert not (tmp_path / "livre.m4b.work").exists()


def test_the_examples_of_the_page_run(book: Path, shoal: Shoal, tmp_path: Path) -> None:
    example = (ROOT / "docs" / "books.md").read_text(encoding="utf-8").partition("```sh\n")[2].partition("```")[0]
    (tmp_path / "tide.md").write_text(example.partition("'END'\n")[2].partition("END\n")[0])
    commands = [shlex.split(line, comments=True) for line in example.splitlines() if line.startswith("shoal")]
    assert len(commands) == 4
    for command in commands:
        run = shoal(*command[1:])
        assert run.code == 0, run.err
    assert {path.name for path in tmp_path.iterdir()} >= {"tide.m4b", "tide.srt", "tide.opus"}


def test_a_model_without_a_voice_needs_one(book: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenService, "default_voice", None, raising=False)
    run = shoal("book", "in.epub", "-o", "a.m4b")
    assert run.code == 2
    assert "choose a stored voice with --voice" in run.said


def test_a_work_folder_of_another_program_is_left_alone(book: Path, shoal: Shoal, tmp_path: Path) -> None:
    work = tmp_path / "out.m4b.work"
    work.mkdir()
    (work / "book.json").write_text("[]")
    run = shoal("book", "in.epub", "-o", "out.m4b")
    assert run.code == 2
    assert "was not written by `shoal book`" in run.said
    assert (work / "book.json").read_text() == "[]"
