"""Output files of a book: loudness, times, containers, subtitles and the synchronised epub."""

import json
import re
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import av
import numpy as np
import pytest

from shoal.api.subtitles import to_json
from shoal.audio.encode import encode_file
from shoal.audio.loudness import LoudnessMeter, limit_peaks
from shoal.book.audio_file import ChapterMark, FileTags, write_audio_file
from shoal.book.document import Block, Book, Chapter, Cover
from shoal.book.output import BookTarget, parse_target, write_book
from shoal.book.overlay import write_overlay
from shoal.book.sentences import SENTENCE_PAUSE
from shoal.book.subtitles import Cue, as_written, chapter_cues, parse_subtitles, short_cues, write_subtitles
from shoal.book.timeline import MAX_PEAK, TARGET_LUFS, Take, Timeline, build_timeline, render, speech_span
from shoal.book.word_times import TimedWord
from shoal.book.work import Narration, PlannedChapter, PlannedPiece, Speaker, plan_book, unique_pieces
from shoal.errors import InvalidRequest, OutputError
from shoal.speech import Samples, Word

RATE = 16_000
COVER = Cover(b"\xff\xd8\xff\xe0" + bytes(range(250)), "image/jpeg")
BOOK = Book(
    "A & B",
    (
        Chapter("One: <1>", (Block("One", heading=True), Block("He said “go now,” twice. Then he left us here."))),
        Chapter("Two/2", (Block("“Is it over,” she asked. It was over."),)),
    ),
    author="Me",
    language="en",
    cover=COVER,
)
LEVELS = {"n": -12.0, "q": -36.0}  # dBFS of the voices


def speech(text: str, level: float) -> Samples:
    """Noise that lasts a tenth of a second per letter, with silence around it, as models produce."""
    noise = np.random.default_rng(len(text)).standard_normal(len(text) * RATE // 10).astype(np.float32)
    return np.pad(noise * np.float32(10 ** (level / 20)), (RATE // 2, RATE // 4))


@pytest.fixture(scope="module")
def chapters() -> list[PlannedChapter]:
    return plan_book(BOOK, Narration("m", "", Speaker("n"), Speaker("q")), {})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, chapters: list[PlannedChapter]) -> Path:
    folder = tmp_path_factory.mktemp("work")
    for piece in unique_pieces(chapters).values():
        samples = speech(piece.text, LEVELS[piece.speaker.name or ""])
        (folder / f"{piece.id}.wav").write_bytes(encode_file(samples, "wav", RATE))
    return folder


@pytest.fixture(scope="module")
def timeline(chapters: list[PlannedChapter], work: Path) -> Timeline:
    return build_timeline(chapters, lambda id: work / f"{id}.wav")


def rendered(timeline: Timeline) -> Samples:
    return np.concatenate([block for chapter in timeline.chapters for block in render(chapter, timeline.rate)])


def decoded(path: Path) -> Samples:
    with av.open(str(path)) as container:
        rate = container.streams.audio[0].rate
        blocks = [frame.to_ndarray().reshape(-1) for frame in container.decode(container.streams.audio[0])]
    samples = np.concatenate(blocks)
    return samples[:: rate // RATE] if rate != RATE else samples


def lufs(samples: Samples) -> float:
    meter = LoudnessMeter(RATE)
    meter.feed(samples)
    assert meter.lufs is not None
    return meter.lufs


def test_every_sentence_is_as_loud_as_the_others_and_lasts_as_long_as_stated(timeline: Timeline) -> None:
    samples = rendered(timeline)
    assert len(samples) == sum(chapter.samples for chapter in timeline.chapters)
    assert np.abs(samples).max() <= MAX_PEAK
    at = 0
    for chapter in timeline.chapters:
        for each in chapter.sentences:
            spoken = samples[at + each.start : at + each.end]
            assert lufs(spoken) == pytest.approx(TARGET_LUFS, abs=1.5), each.planned.sentence.text
            assert not samples[at + each.end : at + each.end + RATE // 10].any()
        at += chapter.samples


def test_silence_around_speech_is_cut_but_for_a_moment() -> None:
    samples = speech("ten chars.", -20)
    start, end = speech_span(samples, RATE)
    assert (start / RATE, end / RATE) == pytest.approx((0.44, 1.56), abs=0.011)
    assert speech_span(np.zeros(RATE, dtype=np.float32), RATE) == (0, RATE)
    assert speech_span(np.zeros(3, dtype=np.float32), RATE) == (0, 3)


def test_the_limiter_keeps_the_length_and_leaves_quiet_speech_alone() -> None:
    loud, quiet = speech("some words", -6), speech("some words", -30)
    assert limit_peaks(quiet, RATE, 0.5) is quiet
    limited = limit_peaks(loud, RATE, 0.5)
    assert limited.shape == loud.shape
    assert np.abs(limited).max() <= 0.5
    assert np.argmax(np.correlate(limited, loud[100:-100], "valid")) == 100


@pytest.mark.parametrize("timed", [True, False])
def test_sentences_that_were_spoken_together_are_cut_between_their_words(tmp_path: Path, timed: bool) -> None:
    """The times of the words are 0.05 s late; without them the cut is near the share of the letters."""
    content = Book("B", (Chapter("One", (Block("Stop! Come in."),)),))
    chapters = plan_book(content, Narration("m", "", Speaker("n"), joins_short=True), {})
    (piece,) = unique_pieces(chapters).values()
    first, second = speech("abcde", -20)[RATE // 2 : -RATE // 4], speech("abcdefgh", -20)[RATE // 2 : -RATE // 4]
    gap = np.zeros(RATE // 5, dtype=np.float32)
    (tmp_path / f"{piece.id}.wav").write_bytes(encode_file(np.concatenate((first, gap, second)), "wav", RATE))
    words = (Word("Stop!", 0.0, 0.55, 0, 5), Word("Come", 0.75, 1.2, 6, 10), Word("in.", 1.2, 1.55, 11, 14))
    if timed:
        (tmp_path / f"{piece.id}.json").write_text(to_json(words))
    timeline = build_timeline(chapters, lambda id: tmp_path / f"{id}.wav")
    short, following = timeline.chapters[0].sentences
    assert [(each.end - each.start) / RATE for each in (short, following)] == pytest.approx([0.56, 0.86], abs=0.02)
    assert (following.start - short.end) / RATE == pytest.approx(SENTENCE_PAUSE)
    named = [[word.text for word in each.words(RATE)] for each in (short, following)]
    assert named == ([["Stop!"], ["Come", "in."]] if timed else [[], []])
    if timed:
        assert following.words(RATE)[0].start == pytest.approx(following.start / RATE + 0.11, abs=0.02)


def test_speech_that_goes_on_between_two_sentences_is_not_interrupted(tmp_path: Path) -> None:
    content = Book("B", (Chapter("One", (Block("Stop! Come in."),)),))
    chapters = plan_book(content, Narration("m", "", Speaker("n"), joins_short=True), {})
    (piece,) = unique_pieces(chapters).values()
    spoken = speech("abcdefghijklm", -20)
    (tmp_path / f"{piece.id}.wav").write_bytes(encode_file(spoken, "wav", RATE))
    words = (Word("Stop!", 0.5, 1.0, 0, 5), Word("Come", 1.0, 1.3, 6, 10), Word("in.", 1.3, 1.8, 11, 14))
    (tmp_path / f"{piece.id}.json").write_text(to_json(words))
    timeline = build_timeline(chapters, lambda id: tmp_path / f"{id}.wav")
    short, following = timeline.chapters[0].sentences
    assert short.end == following.start
    assert following.start / RATE == pytest.approx(short.start / RATE + 0.06 + 0.5, abs=0.12)
    samples, (take, rest) = rendered(timeline)[short.start : following.end], (short.takes[0], following.takes[0])
    expected = encoded(spoken)[take.start : rest.end] * take.gain
    assert np.abs(samples - expected)[200:-200].max() < 1e-3, "as it was spoken"


def test_the_limiter_does_not_change_the_volume_where_speech_goes_on(tmp_path: Path) -> None:
    """A peak just before the cut lowers the volume of what follows it as well."""
    path, piece, cut = tmp_path / "a.wav", PlannedPiece("a", "Stop! Come in.", Speaker("n"), 0), RATE
    tone = (0.1 * np.sin(2 * np.pi * 200 * np.arange(2 * RATE) / RATE)).astype(np.float32)
    tone[cut - RATE // 100 : cut] *= 9
    path.write_bytes(encode_file(tone, "wav", RATE))
    parts = (Take(path, piece, 0, cut, continued=True), Take(path, piece, cut, 2 * RATE, continues=True))
    samples = np.concatenate([take.samples(RATE) for take in parts])
    assert np.abs(samples - limit_peaks(encoded(tone), RATE, MAX_PEAK))[200:-200].max() < 1e-4


def test_speech_ends_before_a_sentence_that_failed(tmp_path: Path) -> None:
    """The file of the short sentence goes on with the next one, another piece of which could not be spoken."""
    content = Book("B", (Chapter("One", (Block("“Oh. Is it?” he said. It was over."),)),))
    chapters = plan_book(content, Narration("m", "", Speaker("n"), Speaker("q"), joins_short=True), {})
    joined, failed, last = unique_pieces(chapters).values()
    for piece in (joined, last):
        (tmp_path / f"{piece.id}.wav").write_bytes(encode_file(speech("abcdefghij", -20), "wav", RATE))
    timeline = build_timeline(chapters, lambda id: None if id == failed.id else tmp_path / f"{id}.wav")
    short, following = timeline.chapters[0].sentences
    assert (following.start - short.end) / RATE == pytest.approx(SENTENCE_PAUSE)
    assert rendered(timeline)[short.end - 1] == 0.0, "faded out"


def encoded(samples: Samples) -> Samples:
    return np.round(samples * 32767).clip(-32768, 32767).astype(np.float32) / np.float32(32768)


def test_a_sentence_that_failed_is_left_out(chapters: list[PlannedChapter], work: Path) -> None:
    failed = chapters[0].sentences[1].pieces[1].id
    made = build_timeline(chapters, lambda id: None if id == failed else work / f"{id}.wav")
    assert [each.planned.sentence.number for each in made.chapters[0].sentences] == [1, 3]
    with pytest.raises(OutputError, match="or none"):
        build_timeline(chapters, lambda id: None)


@pytest.mark.parametrize("suffix", ["m4b", "m4a", "mp3", "opus"])
def test_a_file_has_chapters_tags_and_cover(suffix: str, timeline: Timeline, work: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"book.{suffix}"
    assert write_book(parse_target(path, None, None), BOOK, timeline, work) == [path]
    with av.open(str(path)) as container:
        metadata = container.metadata | container.streams.audio[0].metadata
        marks = [(each["start"] / 1000, each["metadata"]["title"]) for each in container.chapters()]
        assert container.duration / 1e6 == pytest.approx(timeline.seconds, abs=0.1)
    assert (metadata["title"], metadata["artist"], metadata["genre"]) == ("A & B", "Me", "Audiobook")
    assert marks == [(pytest.approx(start, abs=0.002), each.planned.title) for start, each in timeline.starts()]
    content = path.read_bytes()
    if suffix == "opus":
        assert b"METADATA_BLOCK_PICTURE" in content
    else:
        assert COVER.content in content
    assert (b"image/jpeg\0\x03" in content) == (suffix == "mp3"), "picture type 3: front cover"
    actual, expected = decoded(path), rendered(timeline)
    envelope = [np.abs(each[: len(expected) // 800 * 800].reshape(-1, 800)).mean(axis=1) for each in (actual, expected)]
    size = min(map(len, envelope))
    assert np.corrcoef(envelope[0][:size], envelope[1][:size])[0, 1] > 0.97, "sentences are where they are said to be"
    assert not list(work.glob(".*")), "no partial file is left"


@pytest.mark.parametrize("suffix", ["m4b", "mp3", "opus"])
def test_marks_are_exact_to_the_millisecond(suffix: str, tmp_path: Path) -> None:
    marks = tuple(ChapterMark(start, start + 1.0, f"{start}=é") for start in (0.0, 1.499, 22.63, 59.999, 3599.5))
    tags, path = FileTags({"title": "T"}, marks), tmp_path / f"a.{suffix}"
    write_audio_file(path, tmp_path / "part", suffix, 32_000, RATE, tags, [np.zeros(RATE, np.float32)])
    with av.open(str(path)) as container:
        found = [(each["start"] / 1000, each["metadata"]["title"]) for each in container.chapters()]
    assert found == [(mark.start, mark.title) for mark in marks]


def test_a_format_that_cannot_hold_the_marks_of_all_chapters_is_refused(tmp_path: Path) -> None:
    def target(name: str) -> BookTarget:
        return parse_target(tmp_path / name, None, None)

    target("a.mp3").check_chapters(255)
    for name in ("a.m4b", "folder"):
        target(name).check_chapters(5000)
    for name, count in (("a.mp3", 256), ("a.opus", 1001)):
        with pytest.raises(InvalidRequest, match=r"255 chapter marks|1,000 chapter marks"):
            target(name).check_chapters(count)


def test_a_folder_has_a_file_per_chapter_and_a_playlist(timeline: Timeline, work: Path, tmp_path: Path) -> None:
    target = parse_target(tmp_path / "out", None, 48)
    paths = write_book(target, BOOK, timeline, work)
    assert [path.name for path in paths] == ["01 One 1.mp3", "02 Two 2.mp3"]
    with av.open(str(paths[1])) as container:
        metadata = container.metadata
    assert (metadata["title"], metadata["album"], metadata["track"]) == ("Two/2", "A & B", "2/2")
    playlist = (tmp_path / "out" / "book.m3u8").read_text().splitlines()
    assert playlist[2:] == [
        f"#EXTINF:{timeline.chapters[0].samples / RATE:.3f},One: <1>",
        "01 One 1.mp3",
        f"#EXTINF:{timeline.chapters[1].samples / RATE:.3f},Two/2",
        "02 Two 2.mp3",
    ]
    assert (tmp_path / "out" / "cover.jpg").read_bytes() == COVER.content
    subtitles = write_subtitles(parse_subtitles("srt", target), target, BOOK, timeline)
    assert [path.name for path in subtitles] == ["01 One 1.srt", "02 Two 2.srt"]
    assert subtitles[1].read_text().startswith("1\n00:00:00,500 --> ")


def test_subtitles_have_a_cue_per_sentence(timeline: Timeline, tmp_path: Path) -> None:
    target = parse_target(tmp_path / "book.m4b", None, None)
    [srt, vtt, stated] = [
        write_subtitles(parse_subtitles(value, target), target, BOOK, timeline)[0].read_text()
        for value in ("srt", str(tmp_path / "x.vtt"), "json")
    ]
    cues = json.loads(stated)["sentences"]
    assert [(cue["chapter"], cue["sentence"]) for cue in cues] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
    assert all(before["end"] < after["start"] for before, after in pairwise(cues))
    offset = timeline.chapters[0].samples / RATE
    assert cues[3]["start"] == pytest.approx(offset + 0.5, abs=0.001)
    assert len(re.findall(r"^\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}$", srt, re.MULTILINE)) == 5
    assert vtt.startswith("WEBVTT\n\n1:1\n00:00:00.500 --> ")
    assert "“Is it over,” she asked." in vtt


def test_a_long_sentence_is_shown_in_parts_of_two_lines() -> None:
    text = "Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly November, I go."
    parts = list(short_cues(Cue(1, 4, 10.0, 16.0, text)))
    assert " ".join(part.text for part in parts) == text
    assert [len(part.text) <= 84 for part in parts] == [True, True]
    assert parts[0].text.endswith("mouth;")
    assert (parts[0].start, parts[-1].end) == (10.0, 16.0)
    assert parts[0].end == parts[1].start == pytest.approx(13.3, abs=0.4)
    assert list(short_cues(parts[0])) == [parts[0]]
    even = [part.text for part in short_cues(Cue(1, 1, 0.0, 5.0, " ".join(["word"] * 18)))]
    assert [len(part.split()) for part in even] == [11, 7], "no single word is left for the last part"


def test_words_have_the_times_of_the_whole_file(work: Path, chapters: list[PlannedChapter], tmp_path: Path) -> None:
    """Three pieces of one second each, with half a second of silence before them that is cut but for 60 ms."""
    planned = replace(chapters[0], sentences=chapters[0].sentences[1:2])
    for piece in planned.sentences[0].pieces:
        spoken = np.pad(np.full(RATE, 0.1, dtype=np.float32), (RATE // 2, 0))
        (tmp_path / f"{piece.id}.wav").write_bytes(encode_file(spoken, "wav", RATE))
        words = piece.text.split()
        timed_words = [Word(word, 0.5 + n / len(words), 0.6, 0, 0) for n, word in enumerate(words)]
        (tmp_path / f"{piece.id}.json").write_text(to_json(timed_words))
    [timed] = build_timeline([planned], lambda id: tmp_path / f"{id}.wav").chapters
    [cue] = chapter_cues(timed, RATE, 100.0)
    assert [(word.text, word.start) for word in cue.words] == [
        ("He", pytest.approx(100.56, abs=0.002)),
        ("said", pytest.approx(101.06, abs=0.002)),
        ("“go", pytest.approx(100.56 + 1.16, abs=0.002)),
        ("now,”", pytest.approx(100.56 + 1.66, abs=0.002)),
        ("twice.", pytest.approx(100.56 + 2.32, abs=0.002)),
    ]
    long = replace(
        cue,
        text=" ".join(["longest"] * 20),
        words=tuple(replace(cue.words[0], start=n, first=n * 8) for n in range(20)),
    )
    assert [part.start for part in short_cues(long)] == [cue.start, 10]
    (tmp_path / f"{planned.sentences[0].pieces[0].id}.json").write_text("{")
    assert next(chapter_cues(timed, RATE)).words == (), "times that are not known for one piece are left out"


def test_words_have_their_characters_in_the_sentence() -> None:
    """Three pieces, spoken without quotes; the first in one file with the sentence before it."""
    spoken = [("Tide,", 6), ("C++", 12), ("said", 0), ("1", 5), ("go", 0), ("now", 3)]
    words = [TimedWord(word, number, number + 0.5, first, first) for number, (word, first) in enumerate(spoken)]
    text = "Tide, [I 1] C++ — said £1: “go—now”"
    found = as_written(text, words)
    assert [word.text for word in found] == ["Tide,", "C++", "said", "£1:", "“go—", "now”"]
    assert all(text[word.first : word.last] == word.text for word in found)
    assert as_written("Other.", words[:1]) == [replace(words[0], first=0, last=0)]


def test_a_part_begins_with_its_first_word_after_a_dash_that_is_not_spoken() -> None:
    text = "The first clause of this sentence is not short at all — and the second clause is as long, or longer."
    words = as_written(text, [TimedWord(word, n, n + 0.5) for n, word in enumerate(text.replace(" —", "").split())])
    parts = list(short_cues(Cue(1, 1, 0.0, 30.0, text, tuple(words))))
    assert len(parts) == 2
    assert parts[1].start == len(parts[0].text.replace(" —", "").split())


def test_the_epub_refers_to_every_sentence_and_its_time(timeline: Timeline, work: Path, tmp_path: Path) -> None:
    path = tmp_path / "sync.epub"
    hostile = replace(BOOK, title="<&\x01", description="]]>", language="x y", date="5 May 1899")
    write_overlay(path, hostile, timeline, 32_000, work)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist()[0] == "mimetype"
        assert archive.infolist()[0].compress_type == zipfile.ZIP_STORED
        contents = {name: archive.read(name) for name in archive.namelist()}
    pages = {n: ElementTree.fromstring(b) for n, b in contents.items() if n.endswith(("ml", ".opf", ".smil"))}
    opf = pages["EPUB/package.opf"].iter("{http://www.idpf.org/2007/opf}item")
    assert {f"EPUB/{item.get('href')}" for item in opf} == {n for n in contents if n.startswith("EPUB/")} - {
        "EPUB/package.opf"
    }
    for number, chapter in enumerate(timeline.chapters, 1):
        ids = {each.get("id") for each in pages[f"EPUB/c{number}.xhtml"].iter()}
        smil = "{http://www.w3.org/ns/SMIL}"
        pars = list(pages[f"EPUB/c{number}.smil"].iter(f"{smil}par"))
        assert len(pars) == len(chapter.sentences)
        for par, each in zip(pars, chapter.sentences, strict=True):
            text, audio = par.find(f"{smil}text"), par.find(f"{smil}audio")
            assert text is not None
            assert audio is not None
            assert text.get("src", "").removeprefix(f"c{number}.xhtml#") in ids
            begin, end = (float(audio.get(name, "").rstrip("s")) for name in ("clipBegin", "clipEnd"))
            assert begin - 0.001 <= each.start / RATE < each.end / RATE <= end + 0.001
    assert contents["EPUB/cover.jpg"] == COVER.content


@pytest.mark.parametrize(
    ("path", "format", "kilobits"),
    [("a.wav", None, None), ("a.m4b", "mp3", None), ("folder", "wav", None), ("a.m4b", None, 5000)],
)
def test_outputs_that_cannot_be_written_are_refused(path: str, format: str | None, kilobits: int | None) -> None:
    with pytest.raises(InvalidRequest):
        parse_target(Path(path), format, kilobits)
    with pytest.raises(InvalidRequest, match="unknown subtitles"):
        parse_subtitles("ass", BookTarget(Path("a.m4b"), "m4b", 64_000, folder=False))


def test_an_output_that_cannot_be_written_leaves_nothing(timeline: Timeline, work: Path, tmp_path: Path) -> None:
    (tmp_path / "book.m4b").mkdir()
    target = BookTarget(tmp_path / "book.m4b", "m4b", 64_000, folder=False)
    with pytest.raises(OutputError, match="cannot write"):
        write_book(target, BOOK, timeline, work)
    assert not list(work.glob(".*"))
