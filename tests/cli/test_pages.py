"""Documentation of exit codes and packages against the code."""

import re
from pathlib import Path

from shoal import errors
from shoal.errors import ShoalError

ROOT = Path(__file__).parents[2]
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def test_the_table_of_exit_codes_matches_the_error_classes() -> None:
    written = dict(re.findall(r"^\| (\d+) \| `(\w+)`", STRUCTURE, re.MULTILINE))
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ShoalError)]
    classes = [each for each in classes if "exit_code" in vars(each)]  # others have the code of their base
    assert written == {str(each.exit_code): each.__name__ for each in classes}
    assert len(written) == len(classes)


def test_every_documented_package_exists() -> None:
    packages = re.findall(r"^      ([a-z_]+(?:/|\.py)) ", STRUCTURE, re.MULTILINE)
    assert len(packages) > 10
    assert [package for package in packages if not (ROOT / "shoal" / package).exists()] == []
