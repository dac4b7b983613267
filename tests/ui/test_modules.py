"""JavaScript modules that need neither a server nor a user, run in a browser."""

import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ASSETS = Path(__file__).parents[2] / "shoal" / "ui" / "assets"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(ASSETS))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(browser: "Browser", origin: str) -> Iterator[Run]:
    """`run("audio/pcm.js", "(module, given) => …", given)`."""
    page = browser.new_page()
    page.goto(f"{origin}/mark.svg")

    def call(module: str, work: str, given: object = None) -> Any:
        body = f"async ([url, given]) => ({work})(await import(url), given)"
        return page.evaluate(body, [f"{origin}/{module}", given])

    yield call
    page.close()


def test_samples_are_decoded_from_pieces_of_any_size(run: Run) -> None:
    work = """({ SampleReader }, cuts) => {
      const bytes = new Uint8Array(new Int16Array([1, -2, 32767, -32768, 300]).buffer);
      const reader = new SampleReader();
      return cuts.flatMap(([from, to]) => [...reader.feed(bytes.subarray(from, to))]);
    }"""
    for cuts in ([[0, 10]], [[0, 1], [1, 2], [2, 7], [7, 10]], [[0, 3], [3, 3], [3, 9], [9, 10]]):
        assert run("audio/pcm.js", work, cuts) == [1, -2, 32767, -32768, 300]


def test_a_wav_file_has_a_correct_header(run: Run) -> None:
    work = """async ({ wavFile }) => [...new Uint8Array(await wavFile(new Int16Array([1, -1]), 16000).arrayBuffer())]"""
    from shoal.audio.wav import wav_header

    assert bytes(run("audio/pcm.js", work)) == wav_header(16_000, 4) + b"\x01\x00\xff\xff"


def test_loud_samples_are_clipped_at_full_scale(run: Run) -> None:
    assert run("audio/pcm.js", "({ toInteger }) => [...toInteger([0, 1.5, -1.5, 0.5])]") == [0, 32767, -32768, 16384]


@pytest.mark.parametrize("most", [16, 40, 480])
def test_passages_cover_the_text_and_none_is_too_long(run: Run, most: int) -> None:
    text = (
        "First. Second one!\n\nA third, which is longer than the others are? "
        + "word " * 60
        + "x" * 90
        + " end 👩‍👩‍👧."
    )
    found = run("speech/lines.js", "({ passages }, [text, most]) => passages(text, most)", [text, most])
    assert max(len(passage.encode("utf-16-le")) // 2 for passage in found) <= most
    assert "".join("".join(found).split()) == "".join(text.split())


def test_passages_end_at_sentence_ends(run: Run) -> None:
    text = "One is here. Two is here. Three is here."
    found = run("speech/lines.js", "({ passages }, text) => passages(text, 30)", text)
    assert found == ["One is here. Two is here.", "Three is here."]


def test_the_first_line_is_short_and_the_others_are_long(run: Run) -> None:
    work = """({ monologue }) => monologue("One is here. ".repeat(60), null).map(({ text }) => text.length)"""
    assert run("speech/lines.js", work) == [168, 467, 142]


@pytest.mark.parametrize(("factor", "parts"), [(0.2, 1), (2.0, 2), (6.0, 5), (1000.0, 5)])
def test_a_slow_machine_gets_shorter_requests(run: Run, factor: float, parts: int) -> None:
    line = {"text": "One is here. " * 20, "voice": "me", "speaker": 1, "turn": 2}
    lines = run(
        "speech/lines.js", "({ splitToDuration }, [line, factor]) => splitToDuration(line, factor)", [line, factor]
    )
    assert len(lines) == parts
    assert {(line["voice"], line["speaker"], line["turn"]) for line in lines} == {("me", 1, 2)}


def test_text_without_words_has_no_lines(run: Run) -> None:
    assert run("speech/lines.js", "({ monologue }) => monologue('  \\n ', null)") == []


def test_a_growing_track_updates_its_outline(run: Run) -> None:
    work = """({ Track }) => {
      const track = new Track(100);
      track.beginPart({ speaker: 0, turn: 0, text: "One." });
      track.append(new Int16Array(100).fill(16384));
      track.beginPart({ speaker: 1, turn: 1, text: "Two." });
      track.append(new Int16Array(70000).fill(-32768));
      return [track.outline(701).slice(0, 12), track.seconds, track.partAt(99).speaker, track.partAt(100).speaker];
    }"""
    outline, seconds, first, second = run("audio/track.js", work)
    assert (seconds, first, second) == (701.0, 0, 1)
    assert outline[0] == pytest.approx(0.5)
    assert outline[10] == pytest.approx(1.0)


def test_timed_audio_is_read_from_pieces_of_any_size(run: Run) -> None:
    work = """async ({ timedAudio }, [text, stream, size]) => {
      const bytes = new TextEncoder().encode(stream);
      const body = new ReadableStream({ start(to) {
        for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.subarray(at, at + size));
        to.close();
      } });
      const found = [];
      for await (const { bytes, words } of timedAudio(body, text)) found.push([[...bytes], words]);
      return found;
    }"""
    text = "🐟 Zwölf now."
    segments = [{"text": "Zwölf", "start": 0.0, "end": 0.5, "first": 2, "last": 7}]
    timed = {"audio_base64": "AQID", "alignment": {"segments": segments}, "chunk_audio_offset_sec": 1.5}
    events = [timed, {"audio_base64": "", "alignment": None, "chunk_audio_offset_sec": 0.0}]
    stream = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    for size in (1, 7, 10_000):
        found = run("speech/timed-audio.js", work, [text, stream, size])
        # Positions of JavaScript strings: the fish takes two.
        assert found == [[[1, 2, 3], [{"first": 3, "last": 8, "start": 1.5, "end": 2.0}]], [[], []]]


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("It costs $12.50 now.", 8, "$12.50"),
        ("Wait. [pause:0.5s] … Then go.", 5, "Then"),
        ("<break/> go", 0, "go"),
        ("今天好", 1, "天"),
        ("nano说", 0, "nano"),
        ("The end. !", 8, None),
    ],
)
def test_the_word_that_is_spoken_next_is_found_in_the_text(run: Run, text: str, start: int, expected: str) -> None:
    work = """({ nextWord }, [text, start]) => {
      const found = nextWord(text, start);
      return found && text.slice(found.first, found.last);
    }"""
    assert run("speech/next-word.js", work, [text, start]) == expected


def test_a_track_knows_the_word_at_a_sample_also_before_its_end_is_known(run: Run) -> None:
    work = """({ Track }) => {
      const track = new Track(100);
      const at = (...samples) => samples.map((sample) => track.wordAt(sample)?.index ?? null);
      track.beginPart({ speaker: 0, turn: 0, text: "It is late." });
      track.append(new Int16Array(100));
      const untimed = at(0);
      track.beginWords(true);
      track.addWords([{ first: 0, last: 2, start: 10, end: 30 }, { first: 3, last: 5, start: 40, end: 60 }]);
      const growing = at(5, 10, 29, 35, 40, 60, 99, 100);
      track.complete = true;
      return [untimed, growing, at(10, 60)];
    }"""
    untimed, growing, complete = run("audio/track.js", work)
    assert untimed == [None]
    assert growing == [None, 0, 0, None, 1, 2, 2, None]
    assert complete == [0, None]


METRICS = """# HELP shoal_engine_slots Slots there are.
shoal_engine_slots 8.0
shoal_engine_running 3.0
shoal_audio_seconds_total{key="a \\"quoted\\" one"} 10.0
shoal_audio_seconds_total{key="other"} 2.0
shoal_time_to_first_audio_seconds_bucket{api="fish",le="0.1"} 1.0
shoal_time_to_first_audio_seconds_bucket{api="fish",le="0.2"} 3.0
shoal_time_to_first_audio_seconds_bucket{api="fish",le="+Inf"} 4.0
"""


def test_metrics_are_converted_to_displayed_figures(run: Run) -> None:
    work = "({ readMetrics }, [text, before]) => readMetrics(text, 12, before)"
    seen = run("server/metrics.js", work, [METRICS, {"at": 10, "audioMade": 4, "frames": 0}])
    assert (seen["slots"], seen["running"], seen["audioMade"], seen["throughput"]) == (8, 3, 12, 4)
    assert seen["firstAudio"] == pytest.approx(0.15)
    assert seen["realTimeFactor"] is None
    restarted = run("server/metrics.js", work, [METRICS, {"at": 10, "audioMade": 400, "frames": 0}])
    assert restarted["throughput"] == 0


@pytest.mark.parametrize(
    ("status", "body", "retry", "expected"),
    [
        (429, {"message": "the queue is full"}, "7", ["The server is busy", "The queue is full.", 7]),
        (
            422,
            [{"loc": ["seed"], "msg": "too large"}],
            None,
            ["One of the settings is not possible", "Seed: too large.", None],
        ),
        (401, {"error": {"message": "Invalid token"}}, None, ["This server asks for a key", "Invalid token.", None]),
        (502, None, None, ["The server answered 502", "The server gave no reason; its log has more.", None]),
    ],
)
def test_errors_are_described_in_words(
    run: Run, status: int, body: object, retry: str | None, expected: list[object]
) -> None:
    work = """({ describe }, given) => {
      const problem = describe(...given);
      return [problem.title, problem.detail, problem.retryAfter];
    }"""
    assert run("server/problem.js", work, [status, body, retry]) == expected


def test_retry_after_may_be_a_date(run: Run) -> None:
    work = "({ secondsToWait }) => secondsToWait('Sun, 06 Nov 1994 08:49:37 GMT', Date.parse('1994-11-06T08:49:30Z'))"
    assert run("server/problem.js", work) == 7


def test_a_stream_that_ends_before_its_first_sound_keeps_nothing(run: Run) -> None:
    work = "({ streamAborted }) => streamAborted(0, 2).detail"
    assert run("server/problem.js", work) == "It ended before its first sound."
