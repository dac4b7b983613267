"""Spell everything written with digits as English words: dates, times, money, units and plain numbers.

The rules run in order, and each leaves digits that belong to a later rule. Repetitions over digits are bounded or
cannot start inside a run of digits, so the time stays linear in any text.
"""

import re
from collections.abc import Callable
from functools import partial

from shoal.text.normalize.currencies import CURRENCIES, MULTIPLES, SIGN, SIGNS
from shoal.text.normalize.months import MONTHS
from shoal.text.normalize.numbers import MAX_DIGITS, cardinal, digits, number, ordinal, plural, year
from shoal.text.normalize.prefilter import DIGITS, Prefiltered
from shoal.text.normalize.units import LENGTHS, UNITS
from shoal.text.normalize.units import POWERS as LENGTH_POWERS

Speak = Callable[[re.Match[str]], str]
Rule = tuple[Prefiltered, Speak]

MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?" if month != "September" else "Sept?(?:ember)?" for month in MONTHS)

# One number, with or without comma groups and decimals. START excludes positions inside a number.
N = r"(?:\d{1,3}(?:,\d{3}){1,5}(?!\d)|\d{1,18})(?:\.\d{1,18})?|\.\d{1,18}"
START = r"(?<![\d.,])(?<![A-Za-z]\.)"
END = r"(?![\d])(?![.,]\d)"

# 1.2.3 and longer is a version or an address; 3.11 is a version only after "v" or "version", else a decimal.
DOTTED = r"\d{1,18}(?:\.\d{1,18}){2,9}"
VERSION = r"(?:(?<=\b[vV])|(?<=\b[vV]ersion\s)|(?<=\b[vV]ersions\s))"
PRERELEASES = {"alpha": "alpha", "beta": "beta", "rc": "R C", "dev": "dev", "pre": "pre", "post": "post"}
POWERS = {"2": "squared", "3": "cubed"}

MULTIPLE = r"(?:\s?(?P<multiple>thousand|million|billion|trillion|k|K|mn|M|m|bn|B|b|T)\b)?"

UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
# Units after a hyphen, as in "a 30-min call". Single letters are excluded: the K of "Form 8-K" is no unit.
UNIT_NAME = "|".join(
    sorted((re.escape(each) for each in UNITS if len(each) > 1 and each.isalpha()), key=len, reverse=True)
)
# Words after a measure that is no attribute: "a 5 km of", "a 2 L or".
AFTER_MEASURE = (
    "(?:and|but|for|from|long|wide|tall|high|deep|thick|away|per|the|into|with|was|were|are|has|had|that|which|when|before"
    r"|after)\b"
)
MAX_BASIS_POINTS = 500
WEEKDAY = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
ZONE = r"(?:\s(?P<zone>[ECMP][SD]?T|[CEW]ES?T|[BIJKH]ST|A[CEKW][SD]T|NZ[SD]T|UTC|GMT|MSK|SGT|HKT|BRT)\b)?"
FRACTION = r"(?<![\w./])(?:(\d{1,4})\s)?(\d{1,3})/(\d{1,3})"
LENGTH = "|".join(sorted(LENGTHS, key=len, reverse=True))
TEMPERATURES = {"C": " Celsius", "F": " Fahrenheit", "K": " Kelvin"}
NOUN = re.compile(r"[\s-]?[A-Za-z]")
COUNTED_IN_BILLIONS = r"(?:param(?:eter)?s|people|users|tokens|views|dollars|downloads|streams|requests)\b"
# Denominators of fractions: "five sixty-fourths". With others the numbers are quotients: "one hundred twenty over
# eighty".
DENOMINATORS = frozenset((*range(2, 21), 25, 30, 32, 40, 50, 60, 64, 100))
RATINGS = ("5", "10", "20", "100")
IDIOMS = {
    "24/7": "twenty-four seven",
    "9/11": "nine eleven",
    "50/50": "fifty fifty",
    "20/20": "twenty twenty",
    **{f"{part}/{100 - part}": f"{cardinal(part)} {cardinal(100 - part)}" for part in (60, 70, 75, 80, 90, 95, 99)},
    **{f"{top}/{top}": f"{cardinal(top)} out of {cardinal(top)}" for top in (5, 10, 100)},
}


def speak_quantities(text: str) -> str:
    """Return the text without digits. Symbols of a number are read with it; others are left."""
    for pattern, speak in RULES:
        text = pattern.sub(speak, text)
    return text


def read_apart(speak: Speak, match: re.Match[str]) -> str:
    """Return the reading of a match, separated by spaces from adjacent words: `US$5`, `Dec.25th`."""
    reading, (start, end) = speak(match), match.span()
    before = " " if reading[:1].isalpha() and match.string[max(start - 1, 0) : start].isalnum() else ""
    after = " " if reading[-1:].isalpha() and match.string[end : end + 1].isalnum() else ""
    return f"{before}{reading}{after}"


def prefixed(match: re.Match[str]) -> str:
    """Read `0x1F`, `0b101`, `0o17` character by character."""
    signs = (digits(sign) or sign.upper() for sign in match[2])
    return f"zero {match[1].lower()} {' '.join(signs)}"


def scientific(match: re.Match[str]) -> str:
    """Expand `1.5e6`; later rules read its numbers. `5E2` may be a room number and stays."""
    mantissa, letter, exponent = match.groups()
    if letter == "E" and "." not in mantissa and exponent[0] not in "+-":
        return match[0]
    return f"{mantissa} times 10 to the power of {int(exponent)}"


def phone(match: re.Match[str]) -> str:
    groups = re.findall(r"\d+", match[0])
    return ("plus " if match[0].startswith("+") else "") + ", ".join(map(digits, groups))


def grouped(match: re.Match[str]) -> str:
    """Join `15 000`; a later rule reads it with its unit."""
    return match[0].replace(" ", "")


def month_and_day(month: str, day: int, written_year: str | None) -> str:
    return f"{month_name(month)} {ordinal(day)}{after_comma(written_year)}"


def after_comma(written_year: str | None) -> str:
    return f", {plain_year(written_year)}" if written_year else ""


def month_name(month: str) -> str:
    return next(name for name in MONTHS if name.startswith(month[:3]))


def plain_year(written: str) -> str:
    """Read a year of four or two digits: `nineteen ninety-five`, `ninety-five`, `oh five`."""
    if len(written) == 4:
        return digits(written) if written[0] == "0" else year(int(written))
    return f"oh {digits(written[1])}" if written[0] == "0" else cardinal(int(written))


def iso_date(match: re.Match[str]) -> str:
    return date_or_text(match, month=int(match[3]), day=int(match[4]), written_year=match[1])


def slash_date(match: re.Match[str]) -> str:
    first, second = int(match[1]), int(match[2])
    month, day = (second, first) if first > 12 else (first, second)
    return date_or_text(match, month, day, match[3])


def short_date(match: re.Match[str]) -> str:
    """Read `on 11/18` and `Sat 11/21` as dates; elsewhere a number over another is a fraction."""
    return f"{match[1]}{month_and_day(MONTHS[int(match[2]) - 1], int(match[3]), None)}"


def date_or_text(match: re.Match[str], month: int, day: int, written_year: str) -> str:
    if 1 <= month <= 12 and 1 <= day <= 31:
        return month_and_day(MONTHS[month - 1], day, written_year)
    return match[0]


def named_date(match: re.Match[str]) -> str:
    if not 1 <= int(match["day"]) <= 31:
        return match[0]
    return month_and_day(match["month"], int(match["day"]), match["year"])


def day_first(match: re.Match[str]) -> str:
    day = int(match["day"])
    if not 1 <= day <= 31:
        return match[0]
    return f"the {ordinal(day)} of {month_name(match['month'])}{after_comma(match['year'])}"


def clock(match: re.Match[str]) -> str:
    hour, minute, second, half = match.group("hour", "minute", "second", "half")
    words = cardinal(int(hour))
    if minute != "00":
        words += f" oh {digits(minute[1])}" if minute[0] == "0" else f" {cardinal(int(minute))}"
    elif not half and not second:
        words += " o'clock"
    if second:
        words += f" and {counted(second.lstrip('0') or '0', 'second', 'seconds')}"
    return words + (f" {half.upper()} M" if half else "") + zone_letters(match)


def hour_only(match: re.Match[str]) -> str:
    return f"{cardinal(int(match['hour']))} {match['half'].upper()} M{zone_letters(match)}"


def zone_letters(match: re.Match[str]) -> str:
    return f" {' '.join(match['zone'])}" if match["zone"] else ""


def counted(written: str, one: str, many: str) -> str:
    return f"{number(written)} {one if written == '1' else many}"


def money(match: re.Match[str]) -> str:
    return say_money(match["sign"], match["amount"], match["multiple"], before_noun=_is_attribute(match))


def _is_attribute(match: re.Match[str]) -> bool:
    """Return whether an amount stands between an article and a noun: `a $20 bill`."""
    article = match.string[max(match.start() - 3, 0) : match.start()].lower()
    return article in ("a ", " a ") and NOUN.match(match.string, match.end()) is not None


def say_money(sign: str, amount: str, multiple: str | None, *, before_noun: bool = False) -> str:
    one, many, small_one, small_many = CURRENCIES[sign]
    many = one if before_noun else many
    if multiple:
        return f"{number(amount)} {MULTIPLES.get(multiple.lower(), multiple)} {many}"
    whole, _, decimals = amount.partition(".")
    if not decimals or len(decimals) > 2 or not small_one:
        return counted(amount, one, many)
    small = counted(str(int(decimals.ljust(2, "0"))), small_one, small_many)
    if int(whole.replace(",", "") or 0) == 0:
        return small
    return counted(whole, one, many) + (f" and {small}" if int(decimals) else "")


def money_range(match: re.Match[str]) -> str:
    return f"{number(match['low'])} to {say_money(match['sign'], match['amount'], match['multiple'])}"


def temperature(match: re.Match[str]) -> str:
    return f"{counted(match[1], 'degree', 'degrees')}{TEMPERATURES.get(match[2] or '', '')} "


def with_unit(match: re.Match[str]) -> str:
    return counted(match[1], *UNITS[match[2]])


def before_noun(match: re.Match[str]) -> str:
    """Read `a 30-min call`: the unit before a noun is singular."""
    return f"{number(match[1])} {UNITS[match[2]][0]}"


def bits_or_basis_points(match: re.Match[str]) -> str:
    """Read `25 bps` as basis points: nothing has transmitted so few bits per second for decades."""
    few = float(match[1].replace(",", "")) <= MAX_BASIS_POINTS
    return counted(match[1], *(("basis point", "basis points") if few else ("bit per second", "bits per second")))


def area(match: re.Match[str]) -> str:
    """Read `20 sq ft` and `15 m^2`."""
    one, many = LENGTHS[match["length"] or match["base"]]
    power = LENGTH_POWERS[match["word"] or match["power"]]
    return counted(match["number"], f"{power} {one}", f"{power} {many}")


def fraction(match: re.Match[str]) -> str:
    whole, above, below = match[1], int(match[2]), int(match[3])
    if not whole and match[0] in IDIOMS:
        return IDIOMS[match[0]]
    if below not in DENOMINATORS or above == 0:
        return f"{whole or ''} {cardinal(above)} over {cardinal(below)}"
    part = {2: "half" if above == 1 else "halves", 4: "quarter"}.get(below, ordinal(below))
    if above > 1 and below != 2:
        part = plural(part)
    return (f"{number(whole)} and " if whole else "") + f"{cardinal(above)} {part}"


def billions(match: re.Match[str]) -> str:
    return f"{number(match[1])} billion"


def part_of_unit(match: re.Match[str]) -> str:
    """Read `1/2 tsp`, `3/4 mi` and `2 1/2 lb`."""
    one, many = UNITS[match[4]]
    if match[1]:
        return f"{fraction(match)} {many}"
    article = "an" if one[0] in "aeio" or one == "hour" else "a"
    return f"{fraction(match)} {one if match[2] == '1' else f'of {article} {one}'}"


def rating(match: re.Match[str]) -> str:
    """Read `4.5/5`; a decimal over another number is a quotient."""
    return f"{number(match[1])} {'out of' if match[2] in RATINGS else 'over'} {number(match[2])}"


def dotted_date(match: re.Match[str]) -> str:
    """Read `31.12.2026`: the day first, unless only the second number can be one."""
    day, month = int(match[1]), int(match[2])
    if month > 12 >= day:
        day, month = month, day
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return match[0]
    return f"the {ordinal(day)} of {MONTHS[month - 1]}, {plain_year(match[3])}"


def decade(match: re.Match[str]) -> str:
    value = int(match[1])
    return plural(year(value) if value > 99 else cardinal(value))


def several(match: re.Match[str]) -> str:
    """Read `100s of people` as `hundreds of people`."""
    zeros = match[1].count("0")
    tens = ("", "tens of ", "hundreds of ")[zeros % 3]
    return (tens + ("", "thousands of ", "millions of ")[zeros // 3]).removesuffix(" of ")


def military(match: re.Match[str]) -> str:
    """Read `0800 hours`; without a zero in front the hours may be a duration."""
    minutes = "hundred" if match[2] == "00" else plain_year(match[2])
    return f"oh {cardinal(int(match[1]))} {minutes}"


def dotted(match: re.Match[str]) -> str:
    return " point ".join(map(number, match[0].split(".")))


def plain_number(match: re.Match[str]) -> str:
    written = match[0]
    if len(written) == 4 and written.isdigit() and 1010 <= int(written) <= 2099:
        return f" {year(int(written))} "
    possessive = match.string.startswith("'s", match.end())
    return f" {number(written)}" + ("" if possessive else " ")


def team(match: re.Match[str]) -> str:
    """Read `49ers` and `76ers`."""
    return f"{number(match[1]).removesuffix('e')}ers"


def rule(pattern: str, speak: Speak, *, all_of: str = "", any_of: str = "") -> Rule:
    return Prefiltered(pattern, all_of=all_of, any_of=any_of, flags=re.ASCII), partial(read_apart, speak)


RULES: tuple[Rule, ...] = (
    rule(r"(?<!\w)0([xX](?=[\dA-Fa-f]+\b)|[bB](?=[01]+\b)|[oO](?=[0-7]+\b))(\w+)", prefixed, all_of="0"),
    rule(r"(?<=\d)\s?[xX]\s?(?=\d)", lambda _: " by ", any_of="xX"),
    rule(r"(?<![\w.,])(\d{1,18}(?:\.\d{1,18})?)([eE])([+-]?\d{1,3})(?!\w)(?!\.\d)", scientific, any_of="eE"),
    rule(
        rf"{START}(?P<number>{N})\s?(?:(?P<word>sq|square|cu|cubic)\.?\s?(?P<length>{LENGTH})"
        rf"|(?P<base>{LENGTH})\^(?P<power>[23]))(?![\w'/])",
        area,
        any_of=DIGITS,
    ),
    rule(r"(?<=[\w)])(?:\^| \^ )([23])(?!\d)(?!\.\d)", lambda match: f" {POWERS[match[1]]} ", all_of="^"),
    rule(r"(?<=[\w)])(?:\^| \^ )(?=[-+({]?\.?\w)|(?<=\d)\*\*(?=\d)", lambda _: " to the power of ", any_of="^*"),
    rule(rf"\d{{{MAX_DIGITS + 1},}}", lambda match: f" {digits(match[0])} ", any_of=DIGITS),
    rule(
        r"(?<![\w.+-])(?:\+\d{1,3}[ -]?|1[ -])?(?:\(\d{3}\) ?|\d{3}[-. ])\d{3}[-. ]\d{4}(?![\w-])", phone, any_of=DIGITS
    ),
    rule(r"(?<![\w.+-])\+\d{1,3}(?:[ -]\d{2,4}){2,5}(?![\w-])", phone, all_of="+", any_of=DIGITS),
    rule(r"(?<![\w.+-])\d{3}-\d{4}(?![\w-])", phone, all_of="-", any_of=DIGITS),
    rule(r"(?<![\w.,:/+-])(?<!\d )0\d{2,4}(?:[ -]\d{3,4}){1,3}(?![\w-])", phone, all_of="0"),
    # Social security numbers and bank cards, which do not begin as years do.
    rule(r"(?<![\w.+-])\d{3}-\d\d-\d{4}(?![\w-])", phone, all_of="-", any_of=DIGITS),
    rule(r"(?<![\w.,+-])(?<!\d )(?!1|20)\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?![\w-])(?! \d)", phone, any_of=DIGITS),
    rule(
        r"(?<![\d.,])\d{1,3}(?: 000| \d{3}(?= \d{3}(?!\d))){1,4}(?: \d{3})?(?![\d])", grouped, all_of=" ", any_of=DIGITS
    ),
    rule(r"(?<![\w.-])(\d{4})([-/])(\d{2})\2(\d{2})(?![\w/-])", iso_date, any_of="-/"),
    rule(r"(?<![\w./-])(\d{1,2})/(\d{1,2})/(\d{4}|\d{2})(?![\w/])", slash_date, all_of="/", any_of=DIGITS),
    rule(
        rf"\b((?i:on|due)\s|(?i:by|until|before|since|after|from)\s(?=\d{{1,2}}/(?:1[1-9]|[23]\d))|(?:{WEEKDAY}),?\s)"
        r"(1[0-2]|0?[1-9])/(3[01]|[12]\d|0?[1-9])(?![\w/%])(?!\.\d)(?!\sof\b)",
        short_date,
        all_of="/",
        any_of=DIGITS,
    ),
    # With a zero in front it is no fraction: "04/07", "12/05".
    rule(
        r"(?<![\w./-])()(0[1-9]|1[0-2](?=/0))/(0[1-9]|[12]\d|3[01])(?![\w/%])(?!\.\d)",
        short_date,
        all_of="0/",
    ),
    rule(
        rf"(?<![\w./-])(?P<day>\d{{1,2}})-(?P<month>{MONTH})-(?P<year>[12]\d{{3}})(?![\w-])",
        day_first,
        all_of="-",
        any_of=DIGITS,
    ),
    rule(
        r"(?<![\w./-])(?<!ersion )(\d{1,2})\.(\d{1,2})\.([12]\d{3})(?![\w/-])(?!\.\d)",
        dotted_date,
        all_of=".",
        any_of=DIGITS,
    ),
    rule(
        rf"\b(?P<month>{MONTH})\.?\s(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?![\w:%/])(?!\.\d)"
        r"(?:,?\s(?P<year>[12]\d{3})(?![\w:%/,-])(?!\.\d))?",
        named_date,
        any_of=DIGITS,
    ),
    rule(
        rf"(?<![\w.,:/$-])(?:the\s)?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s(?:of\s)?(?P<month>{MONTH})\b"
        r"(?:,?\s(?P<year>[12]\d{3})(?![\w:%/,-])(?!\.\d))?",
        day_first,
        any_of=DIGITS,
    ),
    rule(
        r"(?<![\d:.])(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?(?![\d:])"
        rf"(?:\s?(?P<half>[AaPp])\s?[Mm]\b)?{ZONE}",
        clock,
        all_of=":",
        any_of=DIGITS,
    ),
    rule(rf"(?<![\w:.,])(?P<hour>1[0-2]|0?[1-9])\s?(?P<half>[AaPp])\s?[Mm]\b{ZONE}", hour_only, any_of=DIGITS),
    rule(
        rf"(?P<sign>{SIGN})\s?(?P<low>{N})\s?-\s?{SIGN}?(?P<amount>{N}){END}{MULTIPLE}",
        money_range,
        all_of="-",
        any_of=SIGNS,
    ),
    rule(rf"(?P<sign>{SIGN})\s?(?P<amount>{N}){END}{MULTIPLE}", money, any_of=SIGNS),
    rule(rf"{START}(?P<amount>{N})\s?(?P<sign>[{SIGNS}¢])(?P<multiple>)", money, any_of=f"{SIGNS}¢"),
    rule(r"(?<=\d)-(?=\d{1,9}(?:\.\d{1,9})?\s?=)", lambda _: " minus ", all_of="-=", any_of=DIGITS),
    rule(rf"{START}(?<!-)({N})-({N})(?![\d-])", lambda match: f"{match[1]} to {match[2]}", all_of="-", any_of=DIGITS),
    rule(rf"(?:(?<=\d[%°])|(?<=\d°[CF]))(?:-| - )(?=(?:{N})\s?[%°])", lambda _: " to ", all_of="-", any_of="%°"),
    # Before percentages: a sign that is left over is taken for a hyphen.
    rule(rf"(?<![\w)%])-(?=(?:{N})\s?%)", lambda _: " minus ", all_of="-%", any_of=DIGITS),
    rule(rf"{START}({N})\s?%", lambda match: f"{number(match[1])} percent ", all_of="%", any_of=DIGITS),
    rule(r"(?<=[\d%)])\s-\s(?=[\d(])", lambda _: " minus ", all_of="-"),
    rule(r"(?<![\w)])-(?=\.?\d)", lambda _: " minus ", all_of="-", any_of=DIGITS),
    rule(rf"{START}({N})\s?°\s?(?:([CFK])\b)?", temperature, all_of="°", any_of=DIGITS),
    rule(r"(?<!\w)([12]\d\d0)'?s\b", decade, all_of="0s"),
    rule(r"(?<!\w)'([2-9]0)'?s\b", decade, all_of="'0s"),
    rule(r"(?<![\w.,])(\d{2})ers\b", team, all_of="ers", any_of=DIGITS),
    rule(r"(?<!\w)'0(?=\d\b)", lambda _: "oh ", all_of="'0"),
    rule(
        r"(?:(?<=\b(?i:the|his|her|our|mid|low)[ -])|(?<=\b(?i:late|high)\s)|(?<=\b(?i:early|upper|lower)\s))"
        r"([2-9]0)'?s\b",
        decade,
        all_of="0s",
    ),
    rule(r"(?<![\w.,])(10{1,5}|1,000,000|1,000|10,000|100,000)s(?= of\b)", several, all_of="0s of"),
    rule(r"\b0(\d)(00|[0-5]\d)(?=\s(?:hours|hrs)\b)", military, all_of="0"),
    rule(r"(?<=\d/\d)ths\b|(?<=\d/\d\d)ths\b", lambda _: "", all_of="/ths", any_of=DIGITS),
    rule(r"(?<=\d)!(?=\s?[=+*/)^-])", lambda _: " factorial", all_of="!", any_of=DIGITS),
    rule(r"(?<![\w-])([A-DFO]|AB)-(?=[,.;:)!?]|\s(?!and\b|or\b|to\b)|$)", lambda m: f"{m[1]} minus ", all_of="-"),
    rule(r"(?<![\w./])(\d{2,3})/(?=\d{2,3}\s?mmHg)", lambda match: f"{match[1]} over ", all_of="/Hg", any_of=DIGITS),
    rule(rf"{FRACTION}\s?({UNIT})(?![\w'/])(?:\.(?=\s+[a-z]))?", part_of_unit, all_of="/", any_of=DIGITS),
    rule(rf"{START}({N})\s?bps\b", bits_or_basis_points, all_of="bps", any_of=DIGITS),
    rule(rf"{START}({N})-({UNIT_NAME})(?![\w'/-])(?:\.(?=\)|,|\s+[a-z]))?", before_noun, all_of="-", any_of=DIGITS),
    rule(
        rf"(?<=\b[Aa] )({N})\s?(?!psi)({UNIT})(?![\w'/-])\.?(?= (?!{AFTER_MEASURE})[a-z]{{3}})",
        before_noun,
        any_of=DIGITS,
    ),
    # The dot belongs to the unit before a small letter or another measure: "15 min. later", "3 lb. 4 oz.".
    rule(
        rf"{START}({N})\s?({UNIT})(?![\w'/])(?:\.(?=\)|\s+[a-z]|\s+(?:{N})\s?(?:{UNIT})(?![\w'/])))?",
        with_unit,
        any_of=DIGITS,
    ),
    rule(rf"{START}({N})k(?!\w)", lambda match: f"{number(match[1])} thousand", all_of="k", any_of=DIGITS),
    rule(rf"{START}({N})M(?!\w)", lambda match: f"{number(match[1])} million", all_of="M", any_of=DIGITS),
    # "B" is billion after decimals or before a noun of COUNTED_IN_BILLIONS. The B of "Apartment 3B" is a letter.
    rule(
        rf"{START}(\d{{1,4}}\.\d{{1,3}}|\d{{1,4}}(?=B {COUNTED_IN_BILLIONS}))B(?!\w)",
        billions,
        all_of="B",
        any_of=DIGITS,
    ),
    rule(
        rf"{START}(\d{{1,4}}\.\d{{1,3}})T(?!\w)",
        lambda match: f"{number(match[1])} trillion",
        all_of="T.",
        any_of=DIGITS,
    ),
    rule(r"(?<![\w./])(\d{1,3}\.\d{1,2})/(\d{1,3})(?![\w/])(?!\.\d)", rating, all_of="/.", any_of=DIGITS),
    rule(r"(?<=\d) / (?=\d)", lambda _: " divided by ", all_of="/", any_of=DIGITS),
    rule(rf"{FRACTION}(?![\w/])(?!\.\d)", fraction, all_of="/", any_of=DIGITS),
    rule(
        rf"{START}(\d{{1,3}}(?:,\d{{3}}){{1,5}}|\d{{1,18}})(?i:st|nd|rd|th)\b",
        lambda m: ordinal(plain_int(m[1])),
        any_of=DIGITS,
    ),
    rule(r"(?<=\d)([A-Z])([A-Z])(?!\w)", lambda match: f" {match[1]} {match[2]}", any_of=DIGITS),
    rule(r"(?<!\w)#\s?(?=\d)", lambda _: "number ", all_of="#", any_of=DIGITS),
    rule(
        rf"(?<=\d)[-.]?({'|'.join(PRERELEASES)})[-.]?(?=\d)", lambda match: f" {PRERELEASES[match[1]]} ", any_of=DIGITS
    ),
    rule(rf"(?<!\d)(?<!\d\.)({DOTTED})-(?={DOTTED})", lambda match: f"{match[1]} to ", all_of="-.", any_of=DIGITS),
    rule(rf"(?<!\d)(?<!\d\.){DOTTED}(?!\d)(?!\.\d)", dotted, all_of=".", any_of=DIGITS),
    rule(rf"{VERSION}\d{{1,6}}\.\d{{1,6}}(?!\d)(?!\.\d)", dotted, all_of=".", any_of="vV"),
    rule(r"(?<=\d)\s?\*\s?(?=\d)", lambda _: " times ", all_of="*", any_of=DIGITS),
    rule(r"(?<=\d):(?=\d)", lambda _: " to ", all_of=":", any_of=DIGITS),
    rule(r"(?<=\w)-(?=\d)|(?<=\d)-(?=\w)", lambda _: " ", all_of="-", any_of=DIGITS),
    rule(rf"(?<!\d)(?:{N})", plain_number, any_of=DIGITS),
)


def plain_int(written: str) -> int:
    return int(written.replace(",", ""))
