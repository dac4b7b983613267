import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.voices.store
from shoal.audio.decode import AudioLimits
from shoal.audio.encode import encode_file
from shoal.errors import AudioError, InvalidRequest, OutputError, ShoalError, TextError, VoiceNotFound
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore
from shoal.voices.voice import BrokenVoice, VoiceExists, VoiceLimits, voice_from_recordings

RATE = 16_000
HERE = Path(__file__).parent


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def workspaces(directory: Path) -> list[Path]:
    return list(directory.glob(".shoal-*"))


@pytest.fixture
def builtin(tmp_path: Path, wav) -> Path:
    VoiceStore(tmp_path / "builtin", sample_rate=RATE).add("narrator", wav(), "Once upon a time.")
    return tmp_path / "builtin"


@pytest.fixture
def both(directory: Path, builtin: Path) -> VoiceStore:
    return VoiceStore(directory, [builtin], sample_rate=RATE)


# Adding and getting


def test_the_directory_is_created_with_the_first_voice(tmp_path, builtin, wav):
    directory = tmp_path / "home" / "voices"
    store = VoiceStore(directory, [builtin], sample_rate=RATE)
    assert store.names() == ["narrator"]
    assert not (tmp_path / "home").exists()
    store.add("anna", wav(), "Hello there.")
    assert files(directory) == ["anna"]


def test_a_directory_that_cannot_be_created_leaves_the_built_in_voices(tmp_path, builtin, encoder, wav):
    (tmp_path / "home").write_text("a file: nothing can be created below it")
    store = VoiceStore(tmp_path / "home" / "voices", [builtin], sample_rate=RATE)
    assert store.names() == ["narrator"]
    assert store.get("narrator", encoder).name == "narrator"
    with pytest.raises(OutputError, match="anna") as raised:
        store.add("anna", wav(), "Hello there.")
    assert str(tmp_path) not in str(raised.value)


def test_a_voice_is_loaded_as_it_was_added(store, encoder, wav):
    store.add("anna", wav(), "Hello there.")
    voice = store.get("anna", encoder)
    assert voice.name == "anna"
    assert voice.key == voice_from_recordings([(wav(), "Hello there.")], encoder).key


def test_the_real_codec_gives_the_same_voice_from_disk_and_inline(store, tiny, wav):
    encoder = CodecEncoder(tiny.codec)
    store.add("anna", wav(), "Hello there.")
    inline = voice_from_recordings([(wav(), "Hello there.")], encoder)
    assert store.get("anna", encoder).key == store.get("anna", encoder).key == inline.key


def test_several_recordings_keep_their_order(store, encoder, wav):
    clips = [(wav(0.2 + number / 10), f"number {number}") for number in range(11)]
    store.add_recordings("anna", clips)
    assert store.get("anna", encoder).key == voice_from_recordings(clips, encoder).key


def test_a_voice_is_stored_in_the_layout_of_upstream(store, directory, wav):
    store.add("anna", wav(), "Grüße\n")
    assert files(directory / "anna") == ["sample.lab", "sample.wav", "voice.json"]
    assert (directory / "anna" / "sample.wav").read_bytes() == wav()
    assert (directory / "anna" / "sample.lab").read_text("utf-8") == "Grüße"


def test_a_recording_keeps_its_suffix(store, directory, encoder, wav, tmp_path):
    tone = np.sin(np.arange(RATE) / 20).astype(np.float32)
    flac = encode_file(tone, "flac", RATE)
    (tmp_path / "take.wav").write_bytes(wav())
    store.add_recordings("anna", [(flac, "flac"), (tmp_path / "take.wav", "wav")])
    assert {"sample-1.flac", "sample-2.wav"} <= set(files(directory / "anna"))
    assert store.get("anna", encoder).seconds == 2.0


def test_details_describe_what_was_added(store, wav):
    store.add("anna", wav(0.5, rate=44_100), "hi")
    details = store.details("anna")
    recording = details.recordings[0]
    assert details.created.endswith("+00:00")
    assert details.seconds == 0.5
    assert (recording.file, recording.sample_rate, recording.channels) == ("sample.wav", 44_100, 1)
    assert len(recording.sha256) == 64


def test_an_added_voice_can_be_read_by_others(store, directory, wav):
    store.add("anna", wav(), "hi")
    umask = os.umask(0)
    os.umask(umask)
    assert (directory / "anna").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_name_can_be_added_once(store, encoder, wav):
    store.add("anna", wav(), "first")
    with pytest.raises(VoiceExists, match="'anna' exists already"):
        store.add("anna", wav(), "second")
    assert store.get("anna", encoder).references[0].text == "first"


def test_an_unusable_reference_is_refused_and_leaves_no_files(store, directory, wav):
    for audio, transcript, error in [
        (b"", "hi", AudioError),
        (b"junk" * 100, "hi", AudioError),
        (wav(91.0), "hi", AudioError),
        (wav(pitch=0.0), "hi", AudioError),
        (wav(), " ", TextError),
        (wav(), "a" * 5000, TextError),
        (wav(), "Hello <|im_end|> there", TextError),
    ]:
        with pytest.raises(error):
            store.add("anna", audio, transcript)
    with pytest.raises(InvalidRequest):
        store.add_recordings("anna", [])
    assert files(directory) == []


def test_limits_can_be_set(directory, wav):
    limits = VoiceLimits(audio=AudioLimits(max_bytes=20_000, max_seconds=0.5), max_transcript=3)
    store = VoiceStore(directory, sample_rate=RATE, limits=limits)
    store.add("anna", wav(0.5), "hey")
    for audio, transcript in [(wav(0.6), "hey"), (wav(0.4, rate=48_000), "hey"), (wav(0.5), "heys")]:
        with pytest.raises(InvalidRequest):
            store.add("bell", audio, transcript)


def test_an_unknown_voice_is_not_found(store, encoder):
    for ask in (lambda: store.get("nobody", encoder), lambda: store.stamp("nobody"), lambda: store.details("nobody")):
        with pytest.raises(VoiceNotFound, match="'nobody'"):
            ask()


@settings(deadline=None)
@given(st.text(max_size=30))
def test_every_operation_refuses_every_unsafe_name(tmp_path_factory, name):
    if (
        not set(name) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_ ")
        and name.strip() == name
    ):
        name += "/.."
    root = tmp_path_factory.getbasetemp() / "unsafe"
    (root / "voices").mkdir(parents=True, exist_ok=True)
    store = VoiceStore(root / "voices")
    for operation in (
        lambda: store.add(name, b"", "hi"),
        lambda: store.get(name, None),
        lambda: store.details(name),
        lambda: store.stamp(name),
        lambda: store.exists(name),
        lambda: store.delete(name),
        lambda: store.rename(name, "anna"),
    ):
        with pytest.raises(InvalidRequest, match="name"):
            operation()
    assert files(root) == ["voices"]
    assert files(root / "voices") == []


# Codes


def test_codes_are_encoded_once_and_then_read(store, directory, encoder, wav):
    store.add("anna", wav(), "hi")
    first, second = store.get("anna", encoder), store.get("anna", encoder)
    assert encoder.encoded == 1
    assert np.array_equal(first.references[0].codes, second.references[0].codes)
    assert workspaces(directory) == []


def test_codes_of_another_codec_are_never_used(store, encoder, another_encoder, directory, wav):
    store.add("anna", wav(), "hi")
    store.get("anna", encoder)
    store.get("anna", another_encoder)
    assert another_encoder.encoded == 1
    assert len(list((directory / "anna").glob("codes-*.npy"))) == 2


def test_damaged_codes_are_encoded_again(store, directory, encoder, wav):
    store.add("anna", wav(), "hi")
    key = store.get("anna", encoder).key
    (codes,) = (directory / "anna").glob("codes-*.npy")
    for damage in (b"", codes.read_bytes()[:-1], b"junk" * 50):
        codes.write_bytes(damage)
        assert store.get("anna", encoder).key == key
    assert encoder.encoded == 4


def test_codes_that_cannot_be_stored_are_used_all_the_same(store, encoder, wav, monkeypatch, caplog):
    store.add("anna", wav(), "hi")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shoal.voices.store, "write_codes", full)
    assert store.get("anna", encoder).frames == 10
    assert "No space left" in caplog.text


def test_a_deleted_voice_stays_usable_for_running_requests(store, encoder, wav):
    store.add("anna", wav(), "hi")
    voice = store.get("anna", encoder)
    codes = voice.references[0].codes.copy()
    store.delete("anna")
    assert np.array_equal(voice.references[0].codes, codes)


# Directories that others made


def upstream_voice(path: Path, wav, *stems: str) -> None:
    path.mkdir(parents=True)
    for stem in stems:
        (path / f"{stem}.wav").write_bytes(wav())
        (path / f"{stem}.lab").write_text(f"this is {stem}")


def test_a_directory_of_upstream_loads_as_it_is(directory, encoder, wav):
    upstream_voice(directory / "anna", wav, "b", "a.2", "C")
    (directory / "anna" / "notes.txt").write_text("keep")
    (directory / "anna" / "._b.wav").write_bytes(b"\0")
    store = VoiceStore(directory)
    assert store.names() == ["anna"]
    texts = [reference.text for reference in store.get("anna", encoder).references]
    assert texts == ["this is C", "this is a.2", "this is b"]
    assert store.details("anna") is None


@pytest.mark.parametrize("suffix", [".mp3", ".flac", ".ogg", ".m4a", ".WAV", ".aiff", ".aifc", ".wma", ".aac"])
def test_every_suffix_of_upstream_is_a_recording(directory, encoder, wav, suffix):
    (directory / "anna").mkdir(parents=True)
    (directory / "anna" / f"x{suffix}").write_bytes(wav())
    (directory / "anna" / "x.lab").write_bytes(b"\xef\xbb\xbfhello\r\n")
    assert VoiceStore(directory).get("anna", encoder).references[0].text == "hello"


def test_a_recording_replaced_by_hand_is_encoded_again(directory, encoder, wav):
    upstream_voice(directory / "anna", wav, "a")
    store = VoiceStore(directory)
    before = store.get("anna", encoder)
    (directory / "anna" / "a.wav").write_bytes(wav(2.0))
    assert store.get("anna", encoder).frames == 2 * before.frames


def test_an_empty_directory_is_no_voice_and_may_become_one(directory, encoder, wav):
    (directory / "anna").mkdir(parents=True)
    store = VoiceStore(directory, sample_rate=RATE)
    assert store.names() == []
    with pytest.raises(VoiceNotFound):
        store.get("anna", encoder)
    store.add("anna", wav(), "hi")
    assert store.names() == ["anna"]


def test_a_directory_with_other_files_is_not_overwritten(directory, wav):
    (directory / "anna").mkdir(parents=True)
    (directory / "anna" / "notes.txt").write_text("keep")
    store = VoiceStore(directory, sample_rate=RATE)
    with pytest.raises(VoiceExists):
        store.add("anna", wav(), "hi")
    assert files(directory / "anna") == ["notes.txt"]
    assert workspaces(directory) == []


# Broken voices


def break_transcript(voice: Path) -> None:
    (voice / "sample.lab").unlink()


def break_encoding(voice: Path) -> None:
    (voice / "sample.lab").write_bytes(b"\xff\xfe\x00")


def break_emptiness(voice: Path) -> None:
    (voice / "sample.lab").write_text(" \n")


def break_audio(voice: Path) -> None:
    (voice / "sample.wav").write_bytes(b"RIFF junk")


def break_details(voice: Path) -> None:
    (voice / "voice.json").write_text("{")


def break_link(voice: Path) -> None:
    secret = voice.parent.parent / "secret.wav"
    (voice / "sample.wav").rename(secret)
    (voice / "sample.wav").symlink_to(secret)


def break_transcript_link(voice: Path) -> None:
    (voice / "sample.lab").unlink()
    (voice / "sample.lab").symlink_to("/etc/hostname")


def break_directory(voice: Path) -> None:
    (voice / "sample.wav").unlink()
    (voice / "sample.wav").mkdir()


BROKEN = {
    break_transcript: r"sample\.wav.*transcript 'sample\.lab' is missing",
    break_encoding: r"sample\.lab",
    break_emptiness: r"sample\.lab.*empty",
    break_audio: r"sample\.wav.*SHA-256",
    break_details: r"voice\.json",
    break_link: r"sample\.wav.*not followed",
    break_transcript_link: r"sample\.lab.*not followed",
    break_directory: r"sample\.wav.*not a regular file",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_voice_names_its_fault_and_breaks_no_other(store, directory, encoder, wav, damage):
    store.add("anna", wav(), "hi")
    store.add("bell", wav(), "hi")
    damage(directory / "anna")
    with pytest.raises(BrokenVoice, match=f"'anna'.*{BROKEN[damage]}"):
        store.get("anna", encoder)
    assert "bell" in store.names()
    assert store.get("bell", encoder).frames == 10
    store.delete("anna")
    assert files(directory) == ["bell"]


def test_a_recording_that_cannot_be_read_is_named(directory, encoder, wav):
    upstream_voice(directory / "anna", wav, "good", "worse")
    (directory / "anna" / "worse.wav").write_bytes(b"\0junk" * 9)
    with pytest.raises(BrokenVoice, match=r"'anna', file 'worse\.wav'"):
        VoiceStore(directory).get("anna", encoder)


def test_a_link_to_a_voice_elsewhere_is_not_followed(store, directory, encoder, wav, tmp_path):
    upstream_voice(tmp_path / "elsewhere", wav, "a")
    (directory / "anna").symlink_to(tmp_path / "elsewhere")
    (directory / "file").write_text("no directory")
    assert store.names() == []
    for name in ("anna", "file"):
        with pytest.raises(BrokenVoice, match="not followed"):
            store.get(name, encoder)
        with pytest.raises(VoiceExists):
            store.add(name, wav(), "hi")
        with pytest.raises(VoiceNotFound):
            store.delete(name)
        with pytest.raises(VoiceNotFound):
            store.rename(name, "bell")
    assert files(tmp_path / "elsewhere") == ["a.lab", "a.wav"]


def test_deleting_removes_links_and_not_what_they_point_to(store, directory, wav, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("keep")
    store.add("anna", wav(), "hi")
    (directory / "anna" / "extra").symlink_to(tmp_path / "outside")
    store.delete("anna")
    assert files(tmp_path / "outside") == ["precious"]


def test_names_that_are_not_safe_are_not_listed(store, directory, wav):
    store.add("anna", wav(), "hi")
    for name in ("a.b", "ünsafe", " spaces "):
        shutil.copytree(directory / "anna", directory / name)
    assert store.names() == ["anna"]


def test_a_root_may_be_a_link_itself(directory, encoder, wav, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    store = VoiceStore(tmp_path / "link", sample_rate=RATE)
    store.add("anna", wav(), "hi")
    assert store.get("anna", encoder).frames == 10


# Renaming and deleting


def test_voices_are_listed_in_order(store, wav):
    for name in ("bell", "Anna", "anna 2", "anna"):
        store.add(name, wav(0.2), "hi")
    assert store.names() == ["Anna", "anna", "anna 2", "bell"]


def test_a_renamed_voice_is_the_same_voice(store, encoder, wav):
    store.add("anna", wav(), "hi")
    before = store.get("anna", encoder)
    store.rename("anna", "bell")
    after = store.get("bell", encoder)
    assert (after.key, after.name, encoder.encoded) == (before.key, "bell", 1)
    assert store.names() == ["bell"]


def test_renaming_never_replaces_a_voice(store, encoder, wav):
    store.add("anna", wav(), "hi")
    store.add("bell", wav(), "bye")
    for name in ("bell", "anna"):
        with pytest.raises(VoiceExists):
            store.rename("anna", name)
    assert store.get("bell", encoder).references[0].text == "bye"


def test_an_unknown_voice_can_be_neither_renamed_nor_deleted(store):
    with pytest.raises(VoiceNotFound):
        store.rename("nobody", "anna")
    with pytest.raises(VoiceNotFound):
        store.delete("nobody")


def photograph(folder: Path) -> None:
    (folder / "a.jpg").write_bytes(b"precious")


def album(folder: Path) -> None:
    (folder / "2019").mkdir()


def repository(folder: Path) -> None:
    (folder / ".git").mkdir()


@pytest.mark.parametrize("keep", [photograph, album, repository])
@pytest.mark.parametrize("voice", [False, True])
def test_a_directory_with_other_files_can_be_neither_renamed_nor_deleted(store, directory, wav, keep, voice):
    (directory / "Photos").mkdir()
    if voice:
        store.add("Photos", wav(), "hi")
    keep(directory / "Photos")
    before = files(directory / "Photos")
    for touch in (lambda: store.delete("Photos"), lambda: store.rename("Photos", "Other")):
        with pytest.raises(InvalidRequest, match=r"'Photos' contains .* not part of a voice.*move"):
            touch()
    assert files(directory) == ["Photos"]
    assert files(directory / "Photos") == before


def test_deleting_a_voice_removes_its_codes_and_hidden_files(directory, encoder, wav):
    upstream_voice(directory / "anna", wav, "a")
    (directory / "anna" / "b.FLAC").write_bytes(b"no transcript")
    (directory / "anna" / ".DS_Store").write_bytes(b"\0")
    store = VoiceStore(directory, sample_rate=RATE)
    with pytest.raises(BrokenVoice):
        store.get("anna", encoder)
    (directory / "anna" / "b.lab").write_text("hi")
    (directory / "anna" / "b.FLAC").write_bytes(wav())
    store.get("anna", encoder)
    store.rename("anna", "bell")
    store.delete("bell")
    assert files(directory) == []


def test_a_deleted_name_is_free(store, directory, wav):
    store.add("anna", wav(), "hi")
    store.delete("anna")
    assert files(directory) == []
    store.add("anna", wav(), "hi again")
    assert store.exists("anna")


def test_a_stamp_changes_with_the_voice_and_not_with_its_codes(store, directory, encoder, wav):
    store.add("anna", wav(), "hi")
    first = store.stamp("anna")
    store.get("anna", encoder)
    assert store.stamp("anna") == first
    (directory / "anna" / "sample.lab").write_text("hi!")
    second = store.stamp("anna")
    store.delete("anna")
    store.add("anna", wav(), "hi")
    assert len({first, second, store.stamp("anna")}) == 3


# Built-in voices


def test_built_in_voices_are_listed_with_stored_ones(both, encoder, wav):
    both.add("anna", wav(), "hi")
    assert both.names() == ["anna", "narrator"]
    assert both.get("narrator", encoder).references[0].text == "Once upon a time."


def test_built_in_voices_cannot_be_changed(both, builtin, encoder, wav):
    before = files(builtin / "narrator")
    both.get("narrator", encoder)
    for touch in (lambda: both.delete("narrator"), lambda: both.rename("narrator", "anna")):
        with pytest.raises(InvalidRequest, match="built in"):
            touch()
    both.add("anna", wav(), "hi")
    for shadow in (lambda: both.add("narrator", wav(), "me"), lambda: both.rename("anna", "narrator")):
        with pytest.raises(VoiceExists, match="built into the model: choose another name"):
            shadow()
    assert files(builtin / "narrator") == before


def test_codes_of_built_in_voices_are_used_in_place(both, builtin, encoder):
    VoiceStore(builtin).get("narrator", encoder)
    both.get("narrator", encoder)
    assert encoder.encoded == 1


def test_a_broken_directory_does_not_hide_a_built_in_voice(both, directory, encoder):
    (directory / "narrator").mkdir()
    assert both.get("narrator", encoder).frames == 10
    (directory / "narrator" / "sample.wav").write_bytes(b"no transcript")
    assert both.get("narrator", encoder).frames == 10
    both.delete("narrator")
    assert both.names() == ["narrator"]


def test_a_missing_built_in_directory_costs_only_its_voices(directory, wav, tmp_path, caplog):
    store = VoiceStore(directory, [tmp_path / "gone"], sample_rate=RATE)
    store.add("anna", wav(), "hi")
    assert store.names() == ["anna"]
    assert "gone" in caplog.text


# Crashes and races


def run_script(script: str, *arguments: object) -> list[list[str]]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    # A script finds the package beside the tests even where nothing is installed.
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=240, env=environment)
    return [line.split() for line in done.stdout.splitlines()]


STATES = {
    "add": ({"old": ["old one"]}, {"old": ["old one"], "new": ["new one", "new two"]}),
    "rename": ({"old": ["old one"]}, {"new": ["old one"]}),
    "delete": ({"old": ["old one"]}, {}),
    "get": ({"old": ["old one"]}, {"old": ["old one"]}),
}


def transcripts(store: VoiceStore, encoder) -> dict[str, list[str]]:
    return {name: [reference.text for reference in store.get(name, encoder).references] for name in store.names()}


@pytest.mark.parametrize("fault", ["kill", "error"])
@pytest.mark.parametrize("operation", STATES)
def test_a_fault_at_any_step_leaves_the_old_or_the_new(tmp_path, encoder, operation, fault):
    old, new = STATES[operation]
    rounds = run_script("faults.py", operation, fault, tmp_path)
    states = []
    for number, ended in rounds:
        states.append(transcripts(VoiceStore(tmp_path / number), encoder))
        assert states[-1] in ([new] if ended in ("survived", "unharmed") else [old, new])
        assert ended in ("killed", "survived", "unharmed", "OutputError", "BrokenVoice", "VoiceNotFound")
        assert files(tmp_path / number) == sorted(states[-1]), "nothing is left over"
    assert len(rounds) > 3
    assert states[-1] == new
    if fault == "kill":
        # The old until the one step that changes it, the new from there on.
        assert states == sorted(states, key=[old, new].index)
        assert states[0] == old


def test_of_many_processes_that_add_one_name_one_succeeds(tmp_path, encoder):
    for number, results in enumerate(run_script("race.py", 6, tmp_path)):
        counted = Counter(result.rstrip("01234567") for result in results)
        assert counted == {"won": 1, "VoiceExists": 7}
        voice = VoiceStore(tmp_path).get(f"round {number}", encoder)
        assert voice.references[0].text == f"I am {results[-1].removeprefix('won')}"
    assert workspaces(tmp_path) == []


def test_opening_a_store_keeps_the_workspaces_of_a_writer(store, directory, encoder, wav, monkeypatch):
    write = shoal.voices.store.write_folder

    def interrupted(path: Path, *rest: object) -> None:
        write(path, *rest)
        VoiceStore(directory)

    monkeypatch.setattr(shoal.voices.store, "write_folder", interrupted)
    store.add("anna", wav(), "hi")
    assert store.get("anna", encoder).frames == 10


def test_readers_see_a_complete_voice_or_none_during_writes(store, encoder, wav):
    stop, problems, met = threading.Event(), [], Counter()

    def read() -> None:
        while not stop.is_set():
            try:
                met[store.get("anna", encoder).references[0].text] += 1
            except VoiceNotFound:
                met["nobody"] += 1
            except ShoalError as problem:
                problems.append(problem)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(30):
        store.add("anna", wav(0.2), f"turn {number % 2}")
        store.rename("anna", "bell")
        store.rename("bell", "anna")
        store.delete("anna")
    stop.set()
    for reader in readers:
        reader.join()
    assert problems == []
    assert sum(met.values()) > 0


def test_details_are_plain_json(store, directory, wav):
    store.add("anna", wav(), "hi")
    stored = json.loads((directory / "anna" / "voice.json").read_text())
    assert stored["recordings"][0]["seconds"] == 1.0
