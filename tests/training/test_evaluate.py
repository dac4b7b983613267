import json
import struct
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("num2words")
pytest.importorskip("rapidfuzz")

from shoal.errors import AudioError, InvalidRequest
from training import evaluate
from training.evaluate import Verdict, VerdictStore, bootstrap, faults_of, main, parse_gates, read_wav
from training.judges import Judges, Samples

RATE = 16_000
TEXTS = ["one red fox", "two blue birds", "three green frogs"]
VOICES = {"ann": 200, "bob": 400}


def write_wav(path: Path, samples: Samples, rate: int = RATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())


def float_wav(samples: Samples, channels: int = 1) -> bytes:
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, channels, RATE, RATE * 4 * channels, 4 * channels, 32)
    body = b"WAVE" + b"LIST" + struct.pack("<I", 3) + b"odd\0" + b"fmt " + struct.pack("<I", 16) + form
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tone(hertz: float, seconds: float = 1.0, level: float = 0.3) -> Samples:
    return (level * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)


class FakeJudge:
    """Reads a clip by its loudest pitch: voice in the hundreds, sentence in the tens; level is the opinion."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.judged = 0
        self.stop_after = stop_after

    def pitch(self, samples: Samples) -> int:
        return round(int(np.abs(np.fft.rfft(samples)).argmax()) * RATE / len(samples))

    def transcribe(self, samples: Samples) -> str:
        if self.judged == self.stop_after:
            raise KeyboardInterrupt
        self.judged += 1
        return TEXTS[self.pitch(samples) % 100 // 10] if np.abs(samples).max() > 0.2 else "mumble mumble mumble"

    def score(self, samples: Samples) -> float:
        return 10 * float(np.abs(samples).max())

    def embed(self, samples: Samples) -> Samples:
        angle = self.pitch(samples) / 600
        return np.array([np.cos(angle), np.sin(angle)], np.float32)

    def judges(self, name: str = "fake") -> Judges:
        return Judges(self.transcribe, self.score, self.embed, name)


def manifest_of(folder: Path, rows: Sequence[tuple[str, str, str, Samples]]) -> Path:
    lines = []
    for n, (system, voice, text, samples) in enumerate(rows):
        write_wav(folder / system / f"{n}.wav", samples)
        lines.append(json.dumps({"path": f"{system}/{n}.wav", "text": text, "voice": voice, "system": system}))
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def spoken(system: str, level: float = 0.3, seconds: float = 1.0) -> list[tuple[str, str, str, Samples]]:
    return [
        (system, voice, text, tone(base + 10 * n, seconds, level))
        for voice, base in VOICES.items()
        for n, text in enumerate(TEXTS)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(folder: Path, manifest: Path, *options: str, judge: FakeJudge | None = None) -> tuple[int, dict[str, object]]:
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    code = main([str(manifest), "--json", str(out), *options], (judge or FakeJudge()).judges())
    return code, json.loads(out.read_text()) if out.exists() else {}


def summary(report: dict[str, object], system: str, voice: str = "all") -> dict[str, object]:
    rows = report["systems"]
    assert isinstance(rows, list)
    (found,) = [row for row in rows if (row["system"], row["voice"]) == (system, voice)]
    return {**found["metrics"], "clips": found["clips"], "fault_counts": found["faults"]}


def test_a_report_has_every_system_and_voice(folder: Path) -> None:
    code, report = run(folder, manifest_of(folder, spoken("teacher") + spoken("tts", level=0.25)))
    assert (code, report["schema"], report["reference"], report["complete"]) == (0, "shoal.quality/1", "teacher", True)
    teacher, tts = summary(report, "teacher"), summary(report, "tts", "bob")
    assert (teacher["clips"], teacher["wer"], teacher["cer"], teacher["nearest"], teacher["faults"]) == (
        6,
        0,
        0,
        100,
        0,
    )
    assert teacher["mos"] == pytest.approx(3, abs=0.01)
    assert teacher["similarity"] == pytest.approx(1, abs=0.01)
    assert (tts["clips"], tts["length"], tts["seconds"]) == (3, 1, 1)


def test_systems_are_compared_on_the_sentences_both_spoke(folder: Path) -> None:
    rows = spoken("teacher") + [row for row in spoken("tts", level=0.1) if row[2] != TEXTS[2]]
    _, report = run(folder, manifest_of(folder, rows))
    comparisons = report["comparisons"]
    assert isinstance(comparisons, list)
    by_metric = {row["metric"]: row for row in comparisons}
    assert set(by_metric) == {"wer", "cer", "mos", "similarity"}
    assert by_metric["wer"]["sentences"] == 2
    assert (by_metric["wer"]["before_value"], by_metric["wer"]["difference"]) == (0, 100)
    mos = by_metric["mos"]
    assert mos["low"] <= mos["difference"] <= mos["high"] < 0


def test_a_voice_that_sounds_like_another_is_counted(folder: Path) -> None:
    swapped = [("tts", "ann", text, tone(400 + 10 * n)) for n, text in enumerate(TEXTS)]
    _, report = run(folder, manifest_of(folder, spoken("teacher") + swapped))
    assert summary(report, "tts")["nearest"] == 0
    assert summary(report, "tts")["wer"] == 0


def test_faults_are_named_and_an_unspoken_clip_is_all_wrong(folder: Path) -> None:
    loud = np.clip(tone(210) * 10, -1, 1)
    rows = [
        ("tts", "ann", TEXTS[0], np.zeros(RATE, np.float32)),
        ("tts", "ann", TEXTS[1], loud),
        ("tts", "ann", TEXTS[2], tone(220, seconds=3.5)),
        ("tts", "bob", "a sentence the teacher never said", tone(400, seconds=30)),
    ]
    manifest = manifest_of(folder, spoken("teacher") + rows)
    with manifest.open("a") as file:
        file.write(json.dumps({"path": "gone.wav", "text": TEXTS[0], "voice": "bob", "system": "tts"}))
    _, report = run(folder, manifest)
    found = summary(report, "tts")
    assert found["fault_counts"] == {"empty": 1, "clipped": 1, "runaway": 2, "unreadable": 1}
    assert found["faults"] == 100
    clips = report["clips"]
    assert isinstance(clips, list)
    (silent,) = [row for row in clips if row["faults"] == ["empty"]]
    assert (silent["word_errors"], silent["words"], silent["mos"]) == (3, 3, None)


def test_verdicts_are_kept_by_content_and_by_judges(folder: Path) -> None:
    manifest = manifest_of(folder, spoken("teacher"))
    first, second, third = FakeJudge(), FakeJudge(), FakeJudge()
    _, before = run(folder, manifest, judge=first)
    (folder / "teacher").rename(folder / "moved")
    manifest.write_text(manifest.read_text().replace("teacher/", "moved/"))
    _, after = run(folder, manifest, judge=second)
    assert (first.judged, second.judged) == (6, 0)
    assert before["systems"] == after["systems"]
    main([str(manifest)], third.judges("other judges"))
    assert third.judged == 6


def test_a_damaged_line_of_kept_verdicts_is_judged_again(folder: Path) -> None:
    manifest, store = manifest_of(folder, spoken("teacher")), folder / "cache" / "shoal" / "verdicts.jsonl"
    run(folder, manifest)
    lines = store.read_text().splitlines()
    store.write_text("\n".join([lines[0][:20], '{"key": "x"}', "7", *lines[1:]]) + "\n")
    judge = FakeJudge()
    assert run(folder, manifest, judge=judge)[0] == 0
    assert judge.judged == 1


def test_ctrl_c_keeps_what_was_judged(folder: Path) -> None:
    manifest = manifest_of(folder, spoken("teacher"))
    code, report = run(folder, manifest, judge=FakeJudge(stop_after=4))
    assert (code, report["complete"], summary(report, "teacher")["clips"]) == (130, False, 4)
    again = FakeJudge()
    assert run(folder, manifest, judge=again)[0] == 0
    assert again.judged == 2


def test_a_limit_counts_sentences_and_keeps_pairs(folder: Path) -> None:
    _, report = run(folder, manifest_of(folder, spoken("teacher") + spoken("tts")), "--limit", "2")
    assert summary(report, "teacher")["clips"] == summary(report, "tts")["clips"] == 4


def test_the_markdown_has_the_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.md"
    manifest = manifest_of(folder, spoken("teacher") + spoken("tts"))
    run(folder, manifest, "--markdown", str(out), "--gate", "wer:tts<=20")
    text = out.read_text()
    assert "| teacher | all | 6 | 0.0 | 0.0 |" in text
    assert "| teacher -> tts | WER % | 3 |" in text
    assert "| wer:tts<=20 | passed |" in text
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("wer:tts<=20", 0),
        ("wer:tts<=0, mos:tts>=2.4", 0),
        ("mos:tts>=teacher-0.6", 0),
        ("mos:tts>=teacher-0.4", 1),
        ("mos:tts>=teacher*0.8,cer:tts<=teacher*1.05", 0),
        ("mos:tts>=teacher*0.9", 1),
        ("mos:tts>=teacher", 1),
        ("nearest:tts>=95,faults:tts<=0,length:tts<=1.1", 0),
        ("mos:tts>=5", 1),
        ("volume:tts<=1", 2),
        ("wer:nobody<=1", 2),
        ("wer:tts<=nobody+1", 2),
        ("wer tts 20", 2),
    ],
)
def test_gates_decide_the_exit_code(folder: Path, gate: str, code: int) -> None:
    manifest = manifest_of(folder, spoken("teacher") + spoken("tts", level=0.25))
    assert run(folder, manifest, "--gate", gate)[0] == code


def test_a_gate_that_cannot_be_measured_is_missed(folder: Path) -> None:
    silence = [("tts", "ann", TEXTS[0], np.zeros(RATE, np.float32))]
    assert run(folder, manifest_of(folder, spoken("teacher") + silence), "--gate", "mos:tts>=1")[0] == 1


def test_a_system_name_may_have_hyphens_in_a_gate() -> None:
    (gate,) = parse_gates("mos:nano-int8>=nano-bf16-0.5")
    assert (gate.system, gate.other, gate.change, gate.amount) == ("nano-int8", "nano-bf16", "-", 0.5)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"path": "a.wav", "text": "a", "voice": "v"}',
        '{"path": "a.wav", "text": "a", "voice": "v", "system": "s", "speed": 1}',
        '{"path": "a.wav", "text": "", "voice": "v", "system": "s"}',
        "",
    ],
)
def test_a_manifest_that_is_not_one_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(line + "\n")
    with pytest.raises(InvalidRequest, match=r"m\.jsonl"):
        evaluate.read_manifest(manifest)
    assert main([str(manifest)], FakeJudge().judges()) == 2
    assert main([str(tmp_path / "none.jsonl")], FakeJudge().judges()) == 2


def test_an_unknown_reference_is_refused(folder: Path) -> None:
    assert run(folder, manifest_of(folder, spoken("teacher")), "--reference", "tts")[0] == 2


@given(st.lists(st.integers(-32768, 32767), max_size=50))
def test_sixteen_bit_samples_are_read_exactly(values: list[int]) -> None:
    data = struct.pack(f"<{len(values)}h", *values)
    form = struct.pack("<HHIIHH", 1, 1, 8000, 16000, 2, 16)
    content = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<I", 16) + form + b"data\xff\xff\xff\xff" + data
    samples, rate = read_wav(content)
    assert rate == 8000
    assert (samples * 32768).astype(int).tolist() == values


def test_float_channels_are_mixed_and_nan_survives_to_be_named() -> None:
    samples, _ = read_wav(float_wav(np.array([0.5, -0.5, 1, 0], np.float32), channels=2))
    assert samples.tolist() == [0, 0.5]
    broken, rate = read_wav(float_wav(np.array([0.1, np.nan] * RATE, np.float32)))
    assert faults_of(broken, rate) == ["nan"]
    assert evaluate.judge(float_wav(broken), FakeJudge().judges()) == Verdict("", None, None, 2.0, ["nan"])


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda tail: b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + tail))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        samples, rate = read_wav(content)
    except AudioError:
        return
    assert samples.ndim == 1
    assert rate > 0


@pytest.mark.parametrize(
    ("samples", "faults"),
    [
        (tone(200), []),
        (tone(200, seconds=0.05), ["empty"]),
        (np.zeros(0, np.float32), ["empty"]),
        (tone(200, level=1e-4), ["empty"]),
        (np.concatenate([tone(200), np.ones(1, np.float32)]), []),
        (np.concatenate([tone(200), np.ones(3, np.float32)]), ["clipped"]),
        (np.array([np.inf] * RATE, np.float32), ["nan"]),
    ],
)
def test_what_is_wrong_with_samples(samples: Samples, faults: list[str]) -> None:
    assert faults_of(samples, RATE) == faults


def test_the_interval_covers_a_known_difference_and_narrows_with_more_sentences() -> None:
    rng = np.random.default_rng(1)

    def interval(count: int) -> tuple[float, float]:
        before = np.column_stack([rng.normal(3.0, 0.5, count), np.ones(count)])
        after = before - np.column_stack([rng.normal(0.5, 0.2, count), np.zeros(count)])
        low, high = bootstrap(before, after)
        assert low is not None
        assert high is not None
        return low, high

    few, many = interval(20), interval(500)
    assert few[0] < -0.5 < few[1]
    assert many[1] - many[0] < few[1] - few[0] < 0.3


def test_one_sentence_has_no_interval() -> None:
    assert bootstrap(np.ones((1, 2)), np.ones((1, 2))) == (None, None)


def test_the_store_is_written_clip_by_clip(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "deep" / "verdicts.jsonl")
    first = store.verdict(float_wav(tone(200)), FakeJudge().judges())
    assert VerdictStore(store.path).known == store.known
    assert list(store.known.values()) == [first]
