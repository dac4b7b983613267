"""The manifest of a batch after interruptions, damage and changed input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.batch.journal import JournalEntry
from shoal.batch.lines import InputFile, LineDefaults, LineTask
from shoal.batch.manifest import MANIFEST, Manifest, worker_journal
from shoal.batch.run import plan_batch
from shoal.errors import InvalidRequest, OutputError
from shoal.paths import atomic_write


def task(number: int, *, name: str | None = None, digest: str = "d") -> LineTask:
    return LineTask(number, name or f"{number:06d}", digest, 0, 10)


def done(out: Path, number: int, *, digest: str = "d") -> JournalEntry:
    """An entry and its audio file."""
    atomic_write(out / f"{number:06d}.wav", b"sound")
    return JournalEntry(number, f"{number:06d}", "done", digest, file=f"{number:06d}.wav", size=5, audio_seconds=1.0)


def entries(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / MANIFEST).read_text().splitlines()]


def test_the_next_run_reuses_finished_lines(tmp_path: Path) -> None:
    with Manifest.opened(tmp_path) as manifest:
        assert not manifest.has(task(1))
        manifest.add([done(tmp_path, 1), JournalEntry(2, "000002", "failed", "d", error="why")])
        assert manifest.has(task(1))
    with Manifest.opened(tmp_path) as manifest:
        assert manifest.has(task(1))
        assert not manifest.has(task(2)), "what failed is tried again"
        assert not manifest.has(task(1, digest="other")), "the line says something else now"
    assert [entry["status"] for entry in entries(tmp_path)] == ["done", "failed"]


def test_a_missing_or_truncated_file_is_generated_again(tmp_path: Path) -> None:
    with Manifest.opened(tmp_path) as manifest:
        manifest.add([done(tmp_path, 1), done(tmp_path, 2)])
    (tmp_path / "000001.wav").unlink()
    (tmp_path / "000002.wav").write_bytes(b"so")
    with Manifest.opened(tmp_path) as manifest:
        assert not manifest.has(task(1))
        assert not manifest.has(task(2))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(torn=st.integers(0, 400))
def test_a_manifest_truncated_anywhere_keeps_its_complete_entries(tmp_path: Path, torn: int) -> None:
    (tmp_path / MANIFEST).unlink(missing_ok=True)
    with Manifest.opened(tmp_path) as manifest:
        manifest.add([done(tmp_path, number) for number in (1, 2, 3)])
    content = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(content[:torn])
    whole = content[:torn].count(b"\n")
    with Manifest.opened(tmp_path) as manifest:
        assert [manifest.has(task(number)) for number in (1, 2, 3)] == [number <= whole for number in (1, 2, 3)]
        manifest.add([done(tmp_path, 9)])
    assert [entry["line"] for entry in entries(tmp_path)] == [*range(1, whole + 1), 9]


def test_the_manifest_ends_in_the_order_of_the_input_with_one_entry_each(tmp_path: Path) -> None:
    with Manifest.opened(tmp_path) as manifest:
        manifest.add([done(tmp_path, 3), JournalEntry(2, "000002", "failed", "d", error="why"), done(tmp_path, 1)])
        manifest.add([done(tmp_path, 2)])
    assert [(entry["line"], entry["status"]) for entry in entries(tmp_path)] == [(1, "done"), (2, "done"), (3, "done")]


def test_a_line_that_has_moved_keeps_its_file_and_gets_its_new_number(tmp_path: Path) -> None:
    with Manifest.opened(tmp_path) as manifest:
        manifest.add([done(tmp_path, 1)])
    with Manifest.opened(tmp_path) as manifest:
        assert manifest.has(task(7, name="000001"))
    assert [entry["line"] for entry in entries(tmp_path)] == [7]


def test_partial_files_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    (tmp_path / ".shoal-123-000001.wav.part").write_bytes(b"half")
    with Manifest.opened(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".shoal-batch.lock", MANIFEST]


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        Manifest.opened(tmp_path),
        pytest.raises(InvalidRequest, match="another batch"),
        Manifest.opened(tmp_path),
    ):
        pass


def test_journals_of_workers_are_taken_in_at_the_end_and_after_a_crash(tmp_path: Path) -> None:
    with Manifest.opened(tmp_path) as manifest:
        journal = worker_journal(tmp_path)
        journal.add([done(tmp_path, 2)])
        manifest.add([done(tmp_path, 1)])
        assert manifest.count([task(1), task(2), task(3)]) == 2
    journal.close()
    assert [entry["line"] for entry in entries(tmp_path)] == [1, 2]
    crashed = worker_journal(tmp_path)
    crashed.add([done(tmp_path, 3)])
    crashed.close()
    with Manifest.opened(tmp_path) as manifest:
        assert manifest.has(task(3))
    assert not list(tmp_path.glob("*.journal"))


def test_a_manifest_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"name": "theirs"}\n')
    with pytest.raises(InvalidRequest, match="choose another -o"), Manifest.opened(tmp_path):
        pass
    assert (tmp_path / MANIFEST).read_text() == '{"name": "theirs"}\n'


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("before", ["", '{"name": "theirs"}\n'])
def test_a_manifest_of_another_program_keeps_its_last_line(tmp_path: Path, before: str, end: str) -> None:
    content = before + '{"name": "the last"}' + end
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(InvalidRequest, match="choose another -o"), Manifest.opened(tmp_path):
        pass
    assert (tmp_path / MANIFEST).read_text() == content


def test_zeros_that_a_power_cut_left_are_a_torn_end(tmp_path: Path) -> None:
    with Manifest.opened(tmp_path) as manifest:
        manifest.add([done(tmp_path, 1)])
    with (tmp_path / MANIFEST).open("ab") as file:
        file.write(b'{"li' + bytes(100))
    with Manifest.opened(tmp_path) as manifest:
        assert manifest.has(task(1))
    assert [entry["line"] for entry in entries(tmp_path)] == [1]


def test_an_invalid_line_does_not_take_the_entry_of_another(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "Hello.", "id": "000002"}\n{"text": ""}\n')
    source = InputFile(tmp_path / "in.jsonl", LineDefaults("nano"))
    out = tmp_path / "out"
    with Manifest.opened(out) as manifest:
        (spoken,) = plan_batch(source, manifest).tasks
        manifest.add([replace(done(out, 2, digest=spoken.digest), line=spoken.number)])
    for _ in range(2):
        with Manifest.opened(out) as manifest:
            assert plan_batch(source, manifest).done == [spoken]
        assert [(entry["line"], entry["status"]) for entry in entries(out)] == [(1, "done"), (2, "failed")]


def test_a_corrected_line_is_no_longer_an_error(tmp_path: Path) -> None:
    source = InputFile(tmp_path / "in.jsonl", LineDefaults("nano"))
    out = tmp_path / "out"
    for text, found in (("", [(1, "failed")]), ("Hello.", [])):
        (tmp_path / "in.jsonl").write_text(json.dumps({"text": text, "id": "greeting"}) + "\n")
        with Manifest.opened(out) as manifest:
            plan_batch(source, manifest)
        assert [(entry["line"], entry["status"]) for entry in entries(out)] == found


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file"), Manifest.opened(tmp_path / "file"):
        pass
