"""Spell numbers as English words.

No library: the permissively licensed one takes over a second to import, half of the start-up budget of the command
line, and the fast one is under the LGPL.
"""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = (
    "ten",
    "eleven",
    "twelve",
    *(f"{stem}teen" for stem in ("thir", "four", "fif", "six", "seven", "eigh", "nine")),
)
ONES = (*DIGITS, *TEENS)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ("", " thousand", " million", " billion", " trillion", " quadrillion")
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}

# Longer runs of digits are account or serial numbers and are read digit by digit.
MAX_DIGITS = 3 * len(SCALES)


def cardinal(number: int) -> str:
    """Return `one thousand two hundred five`. The number must be in [0, 10**MAX_DIGITS)."""
    if number < 1000:
        return below_thousand(number)
    groups = []
    for scale in SCALES:
        number, group = divmod(number, 1000)
        if group:
            groups.append(below_thousand(group) + scale)
    return " ".join(reversed(groups))


def below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return below_hundred(rest)
    return f"{ONES[hundreds]} hundred" + (f" {below_hundred(rest)}" if rest else "")


def below_hundred(number: int) -> str:
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def ordinal(number: int) -> str:
    """Return an ordinal such as `twenty-first`."""
    words = cardinal(number)
    last = words.replace("-", " ").rpartition(" ")[2]
    return words.removesuffix(last) + ordinal_word(last)


def ordinal_word(word: str) -> str:
    if word in ORDINALS:
        return ORDINALS[word]
    return f"{word[:-1]}ieth" if word.endswith("y") else f"{word}th"


def plural(words: str) -> str:
    """Return a plural such as `nineties` or `quarters`."""
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


def year(number: int) -> str:
    """Read a four-digit year: `nineteen eighty-four`, `nineteen oh five`, `two thousand nine`."""
    century, rest = divmod(number, 100)
    if century % 10 == 0 and rest < 10:
        return cardinal(number)
    if rest == 0:
        return f"{below_hundred(century)} hundred"
    return f"{below_hundred(century)} {'oh ' if rest < 10 else ''}{below_hundred(rest)}"


def digits(written: str) -> str:
    """Read each digit by itself and skip other characters."""
    return " ".join(DIGITS[int(digit)] for digit in written if digit.isdecimal())


def number(written: str) -> str:
    """Read a number with optional commas and decimals: `1,234.05`, `.5`, `007`."""
    whole, point, decimals = written.replace(",", "").partition(".")
    if len(whole) > MAX_DIGITS or (len(whole) > 1 and whole[0] == "0"):
        words = digits(whole)
    else:
        words = cardinal(int(whole)) if whole else ""
    return f"{words} point {digits(decimals)}".lstrip() if point and decimals else words
