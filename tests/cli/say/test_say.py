import json
import os
import signal
import struct
import subprocess
import sys
import time
import wave
from pathlib import Path

import click
import numpy as np
import pytest
import torch
import typer

from shoal.checkpoint.random import SIZES
from shoal.cli.completion import MODELS, builtin_voices, complete_stored_voice, complete_voice
from tests.cli.conftest import Shoal

TINY = ("--model", "random:tiny", "--max-frames", "12", "--quiet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Output directory; failed requests must leave it empty."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "voice.wav"
    write_wav(path, 0.1 * np.sin(np.arange(32000) / 20)[:, None])
    return path


def write_wav(path: Path, samples: np.ndarray, rate: int = 16000) -> None:
    """32-bit float samples [n, channels]."""
    content, channels = samples.astype("<f4").tobytes(), samples.shape[1]
    layout = struct.pack("<HHIIHH", 3, channels, rate, rate * 4 * channels, 4 * channels, 32)
    chunks = b"WAVEfmt " + struct.pack("<I", len(layout)) + layout + b"data" + struct.pack("<I", len(content)) + content
    path.write_bytes(b"RIFF" + struct.pack("<I", len(chunks)) + chunks)


def samples_of(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)


def same(a: Path, b: Path) -> bool:
    """Return whether the samples differ by at most one 16-bit step: chunk boundaries depend on the load."""
    x, y = samples_of(a), samples_of(b)
    return len(x) == len(y) and bool(np.abs(x - y).max() <= 1)


def test_a_text_becomes_a_file(shoal: Shoal, folder: Path) -> None:
    ran = shoal("say", "Hello there.", "-o", folder / "a.wav", *TINY)
    assert (ran.code, ran.out, ran.err) == (0, b"", "")
    with wave.open(str(folder / "a.wav")) as file:
        assert (file.getframerate(), file.getnchannels()) == (16000, 1)
        assert 0 < file.getnframes() <= 12 * 640
    assert [path.name for path in folder.iterdir()] == ["a.wav"]


@pytest.mark.parametrize(("name", "format"), [("a.OGG", "opus"), ("a", "wav"), ("a.sound", "pcm")])
def test_a_format_may_agree_with_the_suffix_or_stand_for_one(
    shoal: Shoal, folder: Path, name: str, format: str
) -> None:
    assert shoal("say", "Hi.", "-o", folder / name, "--format", format, *TINY).code == 0
    assert (folder / name).stat().st_size > 0


def test_a_text_is_read_as_utf8_where_the_locale_is_ascii(shoal: Shoal) -> None:
    # Python represents bytes that the locale cannot decode as lone surrogates.
    undecoded = "Ça coûte 5 €.".encode().decode("ascii", "surrogateescape")
    shown = shoal("say", undecoded, "--show-text", "--as-written", "--model", "random:tiny")
    assert (shown.code, shown.text) == (0, "Ça coûte 5 €.\n")


def test_the_same_seed_gives_the_same_audio_and_another_gives_another(shoal: Shoal, folder: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert shoal("say", "Hello there.", "-o", folder / f"{name}.wav", "--seed", seed, *TINY).code == 0
    a, b, c = (folder / f"{name}.wav" for name in "abc")
    assert same(a, b)
    assert not same(a, c)


def test_the_text_may_come_from_a_file_or_a_pipe(shoal: Shoal, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Hello there.\n", encoding="utf-8")
    assert shoal("say", "Hello there.", "-o", folder / "a.wav", *TINY).code == 0
    assert shoal("say", "--file", tmp_path / "text.txt", "-o", folder / "b.wav", *TINY).code == 0
    assert shoal("say", "-", "-o", folder / "c.wav", *TINY, stdin=b"Hello there.\n").code == 0
    assert shoal("say", "-o", folder / "d.wav", *TINY, stdin=b"Hello there.\n").code == 0
    assert all(same(folder / "a.wav", path) for path in folder.iterdir())


def test_standard_output_gets_the_audio_and_nothing_else(shoal: Shoal) -> None:
    ran = shoal("say", "Hello there.", "-o", "-", *TINY[:-1])
    assert ran.code == 0
    assert ran.out[:4] == b"RIFF"
    assert "s of speech" in ran.err


def test_the_numbers_come_as_json(shoal: Shoal, folder: Path) -> None:
    ran = shoal("say", "Hello there.", "-o", folder / "a.mp3", "--json", *TINY)
    document = json.loads(ran.out)
    assert document["output"] == str(folder / "a.mp3")
    assert 0 < document["seconds"] <= 12 / 25
    assert document["rtf"] > 0
    assert document["finish"] in ("stop", "length")


def test_a_voice_changes_the_audio(shoal: Shoal, folder: Path, recording: Path) -> None:
    assert shoal("say", "Hello there.", "-o", folder / "a.wav", *TINY).code == 0
    ran = shoal("say", "Hello.", "-o", folder / "b.wav", "--voice", recording, "--transcript", "La la.", *TINY)
    assert (ran.code, ran.err) == (0, "")
    assert not same(folder / "a.wav", folder / "b.wav")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["Hi.", "--model", "./nowhere"], 8, "no such directory"),
        (["Hi.", "--model", "s1-mini"], 8, "shoal pull s1-mini"),
        (["Hi.", "--model", "random:huge"], 8, "random:s1-mini"),
        (["Hi.", "--codec", "./nowhere"], 6, "no codec, expected"),
        ([""], 3, "the text is empty"),
        ([" \n\t"], 3, "the text is empty"),
        (["?!…"], 3, "nothing to speak"),
        (["Hello <|im_end|> there."], 3, "control token <|im_end|>"),
        (["word " * 200_000], 3, "limit"),
        (["--file", "./nowhere.txt"], 3, "cannot read"),
        (["Hi.", "--file", "./nowhere.txt"], 2, "not both"),
        ([], 2, "give a text"),
        (["Hi.", "--format", "tape"], 2, "tape"),
        (["Hi.", "--format", "mp3"], 2, "a.wav would contain mp3, not wav: use another suffix, or no --format"),
        (["caf\udce9"], 3, "TEXT is not UTF-8 text: invalid byte at offset 3"),
        (["Hi.", "--voice", "me.wav", "--transcript", "\udce9"], 3, "--transcript is not UTF-8 text"),
        (["Hi.", "-o", "/"], 2, "is a directory"),
        (["Hi.", "--temperature", "9"], 2, "temperature"),
        (["Hi.", "--top-p", "0"], 2, "top_p"),
        (["Hi.", "--top-k", "-1"], 2, "top_k"),
        (["Hi.", "--repetition-penalty", "nan"], 2, "repetition_penalty"),
        (["Hi.", "--seed", "-1"], 2, "seed"),
        (["Hi.", "--max-frames", "-1"], 2, "max_frames"),
        (["Hi.", "--dtype", "int3"], 2, "unknown dtype"),
        (["Hi.", "--device", "abacus"], 2, "unknown device"),
        (["Hi.", "--transcript", "La."], 2, "--voice"),
        (["Hi.", "--voice", "nobody"], 5, "no voice 'nobody'; `shoal voices list`"),
        (["Hi.", "--voice", "../nobody"], 2, "cannot name a voice"),
    ],
)  # fmt: skip
def test_a_bad_request_is_rejected_and_leaves_nothing(
    shoal: Shoal, folder: Path, arguments: list[str], code: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder.parent / "cache"))
    monkeypatch.setenv("SHOAL_VOICES", str(folder.parent / "voices"))
    given = arguments if "--model" in arguments else [*TINY, *arguments]
    ran = shoal("say", "-o", folder / "a.wav", *given)
    assert (ran.code, list(folder.iterdir())) == (code, [])
    assert reason in ran.said
    assert "Traceback" not in ran.err


def text_file(path: Path) -> None:
    path.write_text("This is not a recording. " * 100)


def eight_channels(path: Path) -> None:
    write_wav(path, np.full((16000, 8), 0.1))


def not_numbers(path: Path) -> None:
    write_wav(path, np.full((16000, 1), np.nan))


def ten_hours(path: Path) -> None:
    write_wav(path, np.zeros((1, 1)))
    with path.open("r+b") as file:
        file.truncate(10 * 3600 * 16000 * 4)  # a sparse file


def silence(path: Path) -> None:
    write_wav(path, np.zeros((16000, 1)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (Path.touch, "0 bytes"),
        (text_file, "text file"),
        (eight_channels, "8 channels"),
        (not_numbers, "NaN or infinite"),
        (ten_hours, "larger than"),
        (silence, "silent"),
    ],
)
def test_a_bad_recording_is_rejected_and_leaves_nothing(
    shoal: Shoal, folder: Path, tmp_path: Path, make: object, reason: str
) -> None:
    make(tmp_path / "bad.wav")  # type: ignore[operator]
    flags = ("--voice", tmp_path / "bad.wav", "--transcript", "La la.")
    ran = shoal("say", "Hi.", "-o", folder / "a.wav", *flags, *TINY)
    assert (ran.code, list(folder.iterdir())) == (4, [])
    assert reason in ran.said


@pytest.mark.parametrize(("transcript", "code"), [(None, 2), ("", 3), ("la " * 5000, 3)])
def test_a_recording_needs_a_transcript(
    shoal: Shoal, folder: Path, recording: Path, transcript: str | None, code: int
) -> None:
    words = () if transcript is None else ("--transcript", transcript)
    ran = shoal("say", "Hi.", "-o", folder / "a.wav", "--voice", recording, *words, *TINY)
    assert (ran.code, list(folder.iterdir())) == (code, [])
    assert "transcript" in ran.said


def test_a_transcript_of_a_stored_voice_is_named_as_the_mistake(shoal: Shoal, folder: Path) -> None:
    ran = shoal("say", "Hi.", "-o", folder / "a.wav", "--voice", "anna", "--transcript", "Hi.", *TINY)
    assert (ran.code, list(folder.iterdir())) == (2, [])
    assert "there is no file 'anna': leave it out" in ran.said


def test_a_directory_named_like_a_voice_is_not_a_recording(
    shoal: Shoal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_VOICES", str(folder / "voices"))
    (folder / "nobody").mkdir()
    monkeypatch.chdir(folder)
    ran = shoal("say", "Hi.", "-o", folder / "a.wav", "--voice", "nobody", *TINY)
    assert (ran.code, "no voice 'nobody'" in ran.said) == (5, True)


@pytest.mark.parametrize(
    ("place", "code"), [("nowhere/a.wav", 10), (".", 2), ("a.tape", 2), ("noname", 2), ("/proc/a.wav", 10)]
)
def test_an_output_that_cannot_be_written_is_rejected(shoal: Shoal, folder: Path, place: str, code: int) -> None:
    ran = shoal("say", "Hi.", "-o", folder / place, *TINY)
    assert (ran.code, list(folder.iterdir())) == (code, [])
    assert ran.err.startswith("error: ")


def test_an_existing_file_survives_a_failed_request(shoal: Shoal, folder: Path) -> None:
    (folder / "a.wav").write_bytes(b"precious")
    assert shoal("say", "Hello <|im_end|>", "-o", folder / "a.wav", *TINY).code == 3
    assert (folder / "a.wav").read_bytes() == b"precious"


@pytest.mark.parametrize("link", [False, True])
def test_the_recording_that_is_cloned_is_not_overwritten(
    shoal: Shoal, folder: Path, recording: Path, link: bool
) -> None:
    before, output = recording.read_bytes(), folder / "linked.wav" if link else recording
    if link:
        output.hardlink_to(recording)
    ran = shoal("say", "Hi.", "-o", output, "--voice", recording, "--transcript", "Hi.", *TINY)
    assert (ran.code, "would be overwritten" in ran.said) == (2, True)
    assert recording.read_bytes() == before


def test_the_text_file_is_not_overwritten_by_subtitles(shoal: Shoal, folder: Path) -> None:
    text = folder / "text.json"
    text.write_text("Hi.")
    ran = shoal("say", "--file", text, "-o", folder / "a.wav", "--subtitles", text)
    assert (ran.code, "would be overwritten" in ran.said, text.read_text()) == (2, True, "Hi.")


def test_json_and_audio_cannot_share_standard_output(shoal: Shoal) -> None:
    ran = shoal("say", "Hi.", "-o", "-", "--json", *TINY)
    assert (ran.code, ran.out) == (2, b"")


LONG = ("--model", "random:tiny", "--max-frames", "0", "--quiet")


def start(*arguments: object, stdout: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "shoal.cli", "say", "A long story. " * 500, *map(str, arguments)]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)


def said(process: subprocess.Popen[bytes]) -> str:
    _, err = process.communicate(timeout=240)
    return err.decode()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_no_files(folder: Path, signum: signal.Signals, code: int) -> None:
    process = start("-o", folder / "a.wav", *LONG)
    while not list(folder.iterdir()) and process.poll() is None:  # the temporary file appears with the first audio
        time.sleep(0.05)
    process.send_signal(signum)
    err = said(process)
    assert (process.returncode, list(folder.iterdir())) == (code, [])
    assert "Traceback" not in err


def test_a_closed_pipe_ends_the_command() -> None:
    process = start("-o", "-", *LONG, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"RIFF"
    process.stdout.close()
    process.stdout = None
    err = said(process)
    assert process.returncode == 10
    assert err == "error: cannot write standard output: Broken pipe\n"


def test_neither_the_compiler_of_torch_nor_triton_is_imported_without_need(tmp_path: Path) -> None:
    """Importing it takes longer than everything else before the first audio; Triton is of no use without a GPU."""
    heavy = "[name for name in ('torch._dynamo', 'sympy', 'triton') if name in sys.modules]"
    code = f"import sys, shoal.cli\ntry: shoal.cli.main()\nfinally: print({heavy})"
    flags = ["-o", str(tmp_path / "a.wav"), "--max-frames", "2", "--quiet", "--model", "random:tiny"]
    command = [sys.executable, "-c", code, "say", "Hello.", *flags]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, env=plain)
    found = "['triton']" if torch.cuda.is_available() else "[]"
    assert (ran.stdout, ran.stderr) == (f"{found}\n", "")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--model", "nonsense"), 8, "nonsense: no such directory and not a known name"),
        (("--model", "random:huge"), 8, "random:huge: unknown size, expected one of random:tiny,"),
        (("--model", "nano", "--voice", "nobody"), 5, "there is no voice 'nobody'; nano has "),
        (("--model", "random:tiny", "--voice", "nobody"), 5, "there is no voice 'nobody'; `shoal voices list`"),
        (("--speed", "3"), 2, "--speed must be between 0.5 and 2, not 3"),
        (("--volume", "-30"), 2, "--volume must be between -20 and 20 decibels, not -30"),
    ],
)
def test_a_wrong_flag_is_reported_before_a_model_is_loaded(
    shoal: Shoal, folder: Path, flags: tuple[str, ...], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("load", "load_native"):
        monkeypatch.setattr(f"shoal.cli.say.speak.EngineOptions.{name}", lambda *_: pytest.fail("the model was loaded"))
    ran = shoal("say", "Hello.", "-o", folder / "a.wav", *flags)
    assert ran.code == code
    assert message in ran.said
    assert not list(folder.iterdir())


def test_the_help_lists_the_voice_before_the_options_of_the_engine(shoal: Shoal) -> None:
    options = shoal("say", "--help").text.partition(" Options ")[2]
    flags = ("--output", "--voice", "--transcript", "--codec", "--device", "--seed")
    places = [options.index(f" {flag} ") for flag in flags]
    assert places == sorted(places)


@pytest.mark.parametrize("model", ["nano", "random:tiny"])
def test_an_unknown_instruction_set_is_refused(
    shoal: Shoal, folder: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("SHOAL_CPU_ISA", "mmx")
    ran = shoal("say", "Hello.", "-o", folder / "a.wav", "--no-server", "--model", model)
    assert ran.code == 2
    assert "SHOAL_CPU_ISA must be one of auto, amx, " in ran.said
    assert not list(folder.iterdir())


def test_volume_and_speed_change_the_audio(shoal: Shoal, folder: Path) -> None:
    variants = {"plain": (), "quiet": ("--volume", "-6"), "fast": ("--speed", "2")}
    seconds = {}
    for name, flags in variants.items():
        ran = shoal("say", "Hello there.", "-o", folder / f"{name}.wav", "--json", *TINY, *flags)
        seconds[name] = json.loads(ran.text)["seconds"]
    plain, quiet, fast = (samples_of(folder / f"{name}.wav") for name in variants)
    assert np.abs(quiet - plain * 10 ** (-6 / 20)).max() <= 1
    assert len(fast) == pytest.approx(len(plain) / 2, abs=1)
    assert seconds["fast"] == pytest.approx(seconds["plain"] / 2, abs=0.002)


def test_completion_knows_the_voices_of_the_model_and_the_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "narrator").mkdir()
    monkeypatch.setenv("SHOAL_VOICES", str(tmp_path))
    builtin = builtin_voices("nano")
    assert builtin
    assert completed("") == sorted([*builtin, "narrator"])
    assert completed("", model="random:tiny") == ["narrator"]
    assert completed("narr") == complete_stored_voice("narr") == ["narrator"]
    assert builtin_voices("not-installed") == []


def completed(typed: str, **params: str) -> list[str]:
    context = typer.Context(click.Command("say"))
    context.params |= params
    return complete_voice(context, typed)


def test_the_help_names_the_voices_of_the_bundled_model(shoal: Shoal) -> None:
    shown = shoal("say", "--help").text
    assert all(name in shown for name in builtin_voices("nano"))


def test_the_random_models_that_completion_knows_exist() -> None:
    assert [name for name in MODELS if name.startswith("random:")] == [f"random:{size}" for size in SIZES]


def test_subtitles_have_the_words_as_they_were_written(shoal: Shoal, folder: Path) -> None:
    ran = shoal(
        "say", "It costs $5.", "-o", folder / "a.wav", "--subtitles", folder / "a.json", "--speed", 2, "--quiet"
    )
    assert (ran.code, ran.err) == (0, "")
    words = json.loads((folder / "a.json").read_text())["words"]
    assert [word["text"] for word in words] == ["It", "costs", "$5."]
    with wave.open(str(folder / "a.wav")) as file:
        seconds = file.getnframes() / file.getframerate()
    assert seconds - 0.6 < words[-1]["end"] <= seconds + 0.1  # at twice the speed
    refused = shoal("say", "Hello.", "-o", folder / "b.wav", "--subtitles", folder / "b.ass", *TINY)
    assert (refused.code, refused.said) == (2, f"error: {folder}/b.ass: subtitles are .srt, .vtt, .json, not .ass")
