"""Serial numbers, telephone numbers and other codes, whose digits are read one by one."""

import re

from shoal.text.normalize.currencies import CURRENCIES
from shoal.text.normalize.numbers import MAX_DIGITS, digits
from shoal.text.normalize.prefilter import DIGITS, Prefiltered

# "Order #A-1029", "Your ticket # is 48".
NUMBER_SIGN = Prefiltered(r"(?<![\w#&/])#(?=[A-Z]{1,4}-?\d)|(?<=\w )#(?=:|\s(?:is|was)\b)", all_of="#")
UUID = Prefiltered(r"(?<![\w-])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![\w-])", all_of="-")
MAC_ADDRESS = Prefiltered(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])", all_of=":")
COLOR = Prefiltered(r"(?<![\w#&/])#(?=[A-Fa-f]{0,5}\d)([0-9A-Fa-f]{6})(?!\w)", all_of="#", any_of=DIGITS)

# A word of letters and digits in four or more runs is a code ("1Z999AA10123456784"), and so are two to four capitals
# between digits ("7ABC123"). "0x1F", "1e10" and "1080p60" are numbers.
RUNS = r"(?:\d+[A-Za-z]+){2,24}(?:\d+)?|[A-Za-z]+(?:\d+[A-Za-z]+){1,24}\d+"
CODE = Prefiltered(
    rf"(?<![\w./])(?!0[xXbo]|\d+[eExpi]\d+)(?=\w{{6,64}}(?!\w))(?:{RUNS}|\d+[A-Z]{{2,4}}\d+)(?![\w/])(?!\.\w)",
    any_of=DIGITS,
)
YEAR = re.compile(r"(?:19|20)\d\d")
CAPITALS = re.compile("[A-Z]{2,5}")
LONG_RUN = re.compile(r"\d{3,}")
# Letters before five or more digits: "AB123456", "A-10293-77". An amount of money has a code of three letters.
SERIAL = Prefiltered(
    r"(?<![\w.,/+-])(?!(?:[A-Z]{3}|US|Rs)\d)([A-Za-z]{1,12}-?)(\d{5,18}(?:-\d{1,18}){0,3})(?![\w.,%-]?\d)(?!\w)",
    any_of=DIGITS,
)

# With the number of digits that a telephone number has; a dot or a space alone may also separate other numbers.
INTERNATIONAL = Prefiltered(
    r"(?<![\w.+-])\+\d{1,15}(?:[ .-]{0,2}\(\d{1,4}\)[ .-]?\d{0,6}|[ .-]\d{1,6}){0,6}(?![\w-])(?!\.\d)",
    all_of="+",
    any_of=DIGITS,
)
NATIONAL = Prefiltered(
    r"(?<![\w.,:/+-])(?<!\d )(?:\(0\d{1,4}\)|0\d{1,4})(?:[ -]\d{2,6}){1,5}(?![\w-])(?![.,/:]\d)", all_of="0"
)
# Ids of video meetings: "812 3456 7890".
MEETING = Prefiltered(r"(?<![\w.,+-])(?<!\d )\d{3}([ -])\d{4}\1\d{4}(?![\w-])(?! \d)(?!\.\d)", any_of=DIGITS)
# Ten digits and more without a comma are hardly ever an amount, unless they are round.
LONG_NUMBER = Prefiltered(
    rf"(?<![\w.,{''.join(CURRENCIES)}-])(?!\d*000(?!\d))\d{{10,{MAX_DIGITS}}}(?!\w)(?![.,]\d)(?!\s?[%°])", any_of=DIGITS
)
GROUP = re.compile(r"\d+")


def speak_codes(text: str) -> str:
    """Return the text with the digits of codes as words, one by one."""
    text = UUID.sub(lambda match: ", ".join(map(_characters, match[0].split("-"))), text)
    text = MAC_ADDRESS.sub(lambda match: _characters(match[0].replace(":", "")), text)
    text = COLOR.sub(lambda match: f"hash {_characters(match[1])}", text)
    text = CODE.sub(_code, NUMBER_SIGN.sub("number ", text))
    text = SERIAL.sub(lambda match: f"{match[1].replace('-', ' ')} {_groups(match[2])}", text)
    return speak_telephone_numbers(text)


def speak_telephone_numbers(text: str) -> str:
    """Return the text with telephone numbers, ids of meetings and numbers of ten digits and more as digits."""
    text = INTERNATIONAL.sub(lambda match: _telephone(match, 9, 15), text)
    text = NATIONAL.sub(lambda match: _telephone(match, 9, 14), text)
    return LONG_NUMBER.sub(lambda match: digits(match[0]), MEETING.sub(lambda match: _groups(match[0]), text))


def _telephone(match: re.Match[str], min_digits: int, max_digits: int) -> str:
    if not min_digits <= sum(map(str.isdecimal, match[0])) <= max_digits:
        return match[0]
    return ("plus " if match[0].startswith("+") else "") + _groups(match[0])


def _groups(written: str) -> str:
    return ", ".join(map(digits, GROUP.findall(written)))


def _characters(written: str) -> str:
    return " ".join(digits(each) or each.upper() for each in written)


def _code(match: re.Match[str]) -> str:
    """Return a code with its long runs of digits as words; a year in it is read as one."""
    spoken = LONG_RUN.sub(lambda run: run[0] if YEAR.fullmatch(run[0]) else f" {digits(run[0])} ", match[0])
    return CAPITALS.sub(lambda letters: f" {' '.join(letters[0])} ", spoken)
