"""The page of the house and the house itself."""

import re
from pathlib import Path

from shoal import errors
from shoal.errors import ShoalError

ROOT = Path(__file__).parents[2]
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def test_the_table_of_exit_codes_is_the_tree_of_errors() -> None:
    written = dict(re.findall(r"^\| (\d+) \| `(\w+)`", STRUCTURE, re.MULTILINE))
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ShoalError)]
    assert written == {str(each.exit_code): each.__name__ for each in classes}
    assert len(written) == len(classes)


def test_every_room_of_the_page_is_there() -> None:
    rooms = re.findall(r"^      ([a-z_]+(?:/|\.py)) ", STRUCTURE, re.MULTILINE)
    assert len(rooms) > 10
    assert [room for room in rooms if not (ROOT / "shoal" / room).exists()] == []
