"""Prove that a prefilter never hides a match: every match of a pattern has the characters that its prefilter needs."""

import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from re import _constants as op
from re import _parser as parser
from typing import Any

import pytest

import shoal.text.normalize as package
from shoal.text.normalize.prefilter import DIGITS, Prefiltered
from shoal.text.normalize.quantities import RULES

CATEGORIES = {op.CATEGORY_DIGIT: set(DIGITS)}
REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)


def prefiltered() -> Iterator[tuple[str, Prefiltered]]:
    for module in iter_modules(package.__path__):
        members = vars(import_module(f"{package.__name__}.{module.name}")).items()
        yield from ((f"{module.name}.{name}", each) for name, each in members if isinstance(each, Prefiltered))
    yield from ((f"quantities.RULES[{place}]", pattern) for place, (pattern, _) in enumerate(RULES))


def needs(part: Any, characters: set[str], *, any_case: bool) -> bool:
    """Return whether every match of a parsed pattern, with its look-around, has one of the characters."""
    return any(item_needs(operator, value, characters, any_case=any_case) for operator, value in part)


def item_needs(operator: Any, value: Any, characters: set[str], *, any_case: bool) -> bool:
    if operator is op.LITERAL:
        return cases(chr(value), any_case=any_case) <= characters
    if operator is op.IN:
        return all(member_needs(*member, characters, any_case=any_case) for member in value)
    if operator is op.BRANCH:
        return all(needs(branch, characters, any_case=any_case) for branch in value[1])
    if operator in REPEATS:
        return value[0] > 0 and needs(value[2], characters, any_case=any_case)
    if operator is op.ASSERT:
        return needs(value[1], characters, any_case=any_case)
    if operator is op.SUBPATTERN:
        _, added, removed, part = value
        return needs(part, characters, any_case=(any_case or bool(added & re.I)) and not removed & re.I)
    return False


def member_needs(operator: Any, value: Any, characters: set[str], *, any_case: bool) -> bool:
    """Return whether a member of a character class is one of the characters."""
    if operator is op.LITERAL:
        return cases(chr(value), any_case=any_case) <= characters
    if operator is op.RANGE:
        return all(cases(chr(each), any_case=any_case) <= characters for each in range(value[0], value[1] + 1))
    return operator is op.CATEGORY and value in CATEGORIES and CATEGORIES[value] <= characters


def cases(character: str, *, any_case: bool) -> set[str]:
    return {character.lower(), character.upper()} if any_case else {character}


@pytest.mark.parametrize(("name", "prefilter"), list(prefiltered()))
def test_every_match_has_the_characters_of_its_prefilter(name: str, prefilter: Prefiltered) -> None:
    pattern = prefilter.pattern
    parsed, any_case = parser.parse(pattern.pattern, pattern.flags), bool(pattern.flags & re.I)
    for needed in (*prefilter.all_of, prefilter.any_of):
        assert not needed or needs(parsed, set(needed), any_case=any_case), f"{name} matches without {needed!r}"
    assert prefilter.all_of or prefilter.any_of, f"{name} needs no character: use re.compile"


def test_a_text_without_a_needed_character_is_returned_as_it_is() -> None:
    pattern = Prefiltered(r"(\d)/(\d)", all_of="/", any_of=DIGITS)
    assert [pattern.may_match(text) for text in ("3/4", "3 of 4", "and/or")] == [True, False, False]
    assert pattern.sub(r"\1 over \2", "3/4 and/or more") == "3 over 4 and/or more"
    assert pattern.sub("", "and/or") == "and/or"
