"""What the pages say is run, so that it stays true."""

import re
import shlex
from pathlib import Path

import pytest

from shoal import errors
from shoal.errors import ShoalError
from tests.cli.conftest import Shoal

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def test_the_first_command_of_the_readme_speaks(shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.search(r"^ +\.venv/bin/shoal (say .*random:tiny.*)$", README, re.MULTILINE)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    assert shoal(*shlex.split(command[1])).code == 0
    assert (tmp_path / "out.wav").stat().st_size > 44


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), {})
    assert "s of audio" in capsys.readouterr().out


def test_the_table_of_exit_codes_is_the_tree_of_errors() -> None:
    written = dict(re.findall(r"^\| (\d+) \| `(\w+)`", STRUCTURE, re.MULTILINE))
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ShoalError)]
    assert written == {str(each.exit_code): each.__name__ for each in classes}
    assert len(written) == len(classes)


def test_every_room_of_the_page_is_there() -> None:
    rooms = re.findall(r"^      ([a-z_]+(?:/|\.py)) ", STRUCTURE, re.MULTILINE)
    assert len(rooms) > 10
    assert [room for room in rooms if not (ROOT / "shoal" / room).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/structure.md"])
def test_links_between_the_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
