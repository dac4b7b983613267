"""Input file of a batch: validation, error messages and line digests."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.batch import lines
from shoal.batch.lines import InputFile, LineDefaults, LineError, LineTask, is_plain_text, parse_line
from shoal.errors import InvalidRequest

PLAIN = LineDefaults("nano")


def read(tmp_path: Path, content: str | bytes, defaults: LineDefaults = PLAIN) -> list[LineTask | LineError]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(InputFile(path, defaults).tasks())


def digest(tmp_path: Path, defaults: LineDefaults = PLAIN, **fields: Any) -> str:
    (task,) = read(tmp_path, json.dumps(fields), defaults)
    assert isinstance(task, LineTask), task
    return task.digest


def test_lines_are_numbered_named_and_found_again(tmp_path: Path) -> None:
    content = '{"text": "One."}\n\n  \n{"text": "Zwei, drei: übel.", "id": "zwei"}\n{"text": "No end of line."}'
    found = read(tmp_path, content)
    assert [(task.number, task.name) for task in found] == [(1, "000001"), (4, "zwei"), (5, "000005")]
    source = InputFile(tmp_path / "in.jsonl", PLAIN)
    texts = [json.loads(source.raw(task))["text"] for task in found if isinstance(task, LineTask)]
    assert texts == ["One.", "Zwei, drei: übel.", "No end of line."]


def test_the_mark_that_some_editors_begin_a_file_with_is_no_part_of_its_first_line(tmp_path: Path) -> None:
    found = read(tmp_path, '{"text": "One."}\n{"text": "Two."}\n'.encode("utf-8-sig"))
    source = InputFile(tmp_path / "in.jsonl", PLAIN)
    assert [json.loads(source.raw(task))["text"] for task in found if isinstance(task, LineTask)] == ["One.", "Two."]
    assert isinstance(found[0], LineTask)
    assert found[0].digest == digest(tmp_path, text="One.")


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("not json", "the line is not JSON"),
        ("[1]", "a line must be a JSON object"),
        ("{}", "text: Field required"),
        ('{"text": ""}', "text"),
        ('{"text": "a", "tone": "sad"}', "tone: unknown field; there are text, "),
        ('{"text": "a", "format": "doc"}', "format"),
        ('{"text": "a", "temperature": 9}', "temperature"),
        ('{"text": "a", "id": "../../etc/passwd"}', "id"),
        ('{"text": "a", "id": ".hidden"}', "id"),
        ('{"text": "a", "voice": "b", "reference_id": "c"}', "give only one"),
        ('{"text": "a", "format": "opus", "sample_rate": 44100}', "opus"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_an_invalid_line_is_reported_and_the_others_stay(tmp_path: Path, line: str | bytes, reported: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    before, fault, after = read(tmp_path, b'{"text": "a"}\n' + raw + b'\n{"text": "b"}\n')
    assert isinstance(fault, LineError)
    assert fault.number == 2
    assert reported in fault.message
    assert isinstance(before, LineTask)
    assert isinstance(after, LineTask)


def test_an_id_is_used_once(tmp_path: Path) -> None:
    _, fault = read(tmp_path, '{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}\n')
    assert isinstance(fault, LineError)
    assert "line 1" in fault.message


def test_a_line_without_end_costs_no_more_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    fault, task = read(tmp_path, '{"text": "' + "a" * 5000 + '"}\n{"text": "b"}\n')
    assert isinstance(fault, LineError)
    assert "longer than" in fault.message
    assert isinstance(task, LineTask)
    assert task.number == 2
    assert json.loads(InputFile(tmp_path / "in.jsonl", PLAIN).raw(task)) == {"text": "b"}


def test_whatever_changes_the_sound_changes_the_digest(tmp_path: Path) -> None:
    same = digest(tmp_path, text="a", seed=1)
    assert same == digest(tmp_path, seed=1, text="a")
    assert same != digest(tmp_path, text="b", seed=1)
    assert same != digest(tmp_path, text="a", seed=2)
    assert same != digest(tmp_path, LineDefaults("s1-mini"), text="a", seed=1)
    assert same != digest(tmp_path, LineDefaults("nano", {"voice": "me"}), text="a", seed=1)
    assert same != digest(tmp_path, LineDefaults("nano", lexicon="00"), text="a", seed=1)


def test_defaults_hold_for_lines_that_do_not_say_otherwise(tmp_path: Path) -> None:
    defaults = LineDefaults("nano", {"voice": "me", "format": "mp3"})
    body, _ = lines.parse_line(b'{"text": "a"}', defaults)
    assert (body.reference_id, body.format) == ("me", "mp3")
    body, _ = lines.parse_line(b'{"text": "a", "voice": "you", "format": "wav"}', defaults)
    assert (body.reference_id, body.format) == ("you", "wav")
    body, _ = lines.parse_line(b'{"text": "a", "reference_id": "you"}', defaults)
    assert body.reference_id == "you"


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        list(InputFile(tmp_path / "nowhere.jsonl", PLAIN).tasks())


def test_a_text_file_has_one_text_per_line(tmp_path: Path) -> None:
    defaults = LineDefaults("nano", {"format": "mp3"}, plain=True)
    content = 'The tide is coming in.\r\n\n  {"text": "read as it is"}\n'
    found = read(tmp_path, content, defaults)
    assert [(task.number, task.name) for task in found] == [(1, "000001"), (3, "000003")]
    bodies = [parse_line(raw, defaults)[0] for raw in content.encode().splitlines() if raw.strip()]
    assert [(body.text, body.format) for body in bodies] == [
        ("The tide is coming in.", "mp3"),
        ('{"text": "read as it is"}', "mp3"),
    ]
    assert [is_plain_text(Path(name)) for name in ("a.txt", "A.TXT", "a.jsonl", "txt")] == [True, True, False, False]


def test_an_invalid_line_keeps_its_id_unless_another_line_has_it(tmp_path: Path) -> None:
    invalid = '{"text": "", "id": "x"}\n'
    assert [fault.name for fault in read(tmp_path, invalid)] == ["x"]
    assert [each.name for each in read(tmp_path, '{"text": "a", "id": "x"}\n' + invalid)] == ["x", "000002"]
    assert [fault.name for fault in read(tmp_path, '{"text": "", "id": "../x"}\n')] == ["000001"]
