"""Rates, measures and ranges, brought into a form that the rules for quantities read: "5/hr" to "5 per hour"."""

import re
from collections.abc import Iterable

from shoal.text.normalize.currencies import MULTIPLES, SIGN, SIGNS
from shoal.text.normalize.months import MONTH_OF
from shoal.text.normalize.numbers import ordinal
from shoal.text.normalize.prefilter import DIGITS, Prefiltered


def any_of(names: Iterable[str]) -> str:
    """Return a pattern for any of the names, the longest first."""
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


NUMBER = r"(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,18})?"
MONEY = rf"{SIGN}\s?{NUMBER}(?:\s?(?:thousand|million|billion|trillion|k|K|mn|M|m|bn|B|b|T)\b)?"
PER = {
    "h": "hour", "hr": "hour", "hrs": "hour", "hour": "hour", "min": "minute", "minute": "minute", "s": "second",
    "sec": "second", "second": "second", "d": "day", "day": "day", "wk": "week", "week": "week", "mo": "month",
    "mth": "month", "month": "month", "qtr": "quarter", "quarter": "quarter", "yr": "year", "y": "year", "year": "year",
    "night": "night", "GB": "gigabyte", "MB": "megabyte", "TB": "terabyte", "KB": "kilobyte", "kg": "kilogram",
    "g": "gram", "mg": "milligram", "lb": "pound", "oz": "ounce", "L": "liter", "l": "liter", "mL": "milliliter",
    "ml": "milliliter", "dL": "deciliter", "gal": "gallon", "km": "kilometer", "m": "meter", "cm": "centimeter",
    "mi": "mile", "mile": "mile", "ft": "foot", "kWh": "kilowatt hour", "person": "person", "user": "user",
    "seat": "seat", "head": "head", "unit": "unit", "item": "item", "piece": "piece", "page": "page", "word": "word",
    "request": "request", "token": "token", "share": "share", "serving": "serving", "sqft": "square foot",
    "sq ft": "square foot", "sq m": "square meter", "m^2": "square meter", "m^3": "cubic meter",
    "cm^3": "cubic centimeter", "km^2": "square kilometer", "ft^2": "square foot", "pp": "person", "ea": "each",
    "each": "each", "game": "game", "class": "class", "visit": "visit", "call": "call",
}  # fmt: skip
RATE = Prefiltered(
    rf"(?<![\w.,/])({MONEY}|{NUMBER}\s?[A-Za-zµ%°]{{1,20}})\s?/\s?({any_of(PER)})\b(?:/({any_of(PER)})\b)?(?!/)"
    r"(?:(?<=mo|hr|yr|wk|lb|oz|ea)\.(?=,|\s+[a-z]))?",
    all_of="/",
    any_of=DIGITS,
)

CUPS = Prefiltered(r"(?<![\w./])(?:(\d{1,2}\s)?(\d/\d|\d{1,2})) c\.(?=\s+[a-z])", all_of=" c.", any_of=DIGITS)

FEET_AND_INCHES = Prefiltered(r"(?<![\w.'])(\d{1,2})'\s?(\d{1,2}(?:\.5)?)(?:\"|'')", all_of="'", any_of=DIGITS)
FEET_BY_FEET = Prefiltered(r"(?<![\w.'])(\d{1,5})' ?x ?(\d{1,5})'(?!\w)", all_of="'x", any_of=DIGITS)
FEET = Prefiltered(r"(?<![\w.'])(\d{1,5})'(?![\w'])(?=[\s,.;:)!?x]|$)", all_of="'", any_of=DIGITS)
INCHES = Prefiltered(r"(?<![\w.\"])(\d{1,4}(?:\.\d{1,2})?(?: \d/\d{1,2})?)\"", all_of='"', any_of=DIGITS)
INCHES_BY = Prefiltered(r"(?<=\d inches) ?x (?=\d)", all_of="x", any_of=DIGITS)
ATTACHED_INCHES = Prefiltered(
    r"(?<![\w.,])(\d{1,4}(?:\.\d{1,2})?)-?in\b(?!-)|(?<=\bft )(\d{1,2}) in\b", all_of="in", any_of=DIGITS
)

# What is so many inches wide; "of", "long" and verbs are no nouns.
NOUN_AFTER = re.compile(
    r"\s(?!(?:of|in|and|or|to|by|x|long|wide|tall|thick|deep|high|across|from|above|below|on|at|apart|away|is|are|was|were"
    r"|expected|per|for|with|than|so|but|if|as)\b)(?:[a-z]|\d\w* [a-z])"
)

TIME = r"\d{1,2}(?::[0-5]\d)?"
# Hours and minutes with a dot: "7.30pm" and "7.30-9.15pm".
DOTTED_TIME = Prefiltered(
    rf"(?<![\w:.,/{SIGNS}-])(1[0-2]|0?[1-9])\.([0-5]\d)(?=(?:\s?-\s?[\d.:]{{1,5}})?\s?(?:[ap]\.?m|[AP]\.?M)\b)"
    r"|(?<=\d-)(1[0-2]|0?[1-9])\.([0-5]\d)(?=\s?(?:[ap]\.?m|[AP]\.?M)\b)",
    all_of=".",
    any_of=DIGITS,
)
HALF = r"\s?[AaPp]\.?\s?[Mm]\b\.?"
TIME_RANGE = Prefiltered(
    rf"(?<![\w:.,-])({TIME}{HALF}|noon|midnight)\s?-\s?(?={TIME}{HALF}|{TIME}\b|noon|midnight)", all_of="-"
)
HOURS_RANGE = Prefiltered(rf"(?<![\w:.,-])({TIME})\s?-\s?(?={TIME}{HALF})", all_of="-", any_of=DIGITS)
CLOCK_RANGE = Prefiltered(r"(?<![\w:.,-])(\d{1,2}:[0-5]\d)\s?-\s?(?=\d{1,2}:[0-5]\d(?!\d))", all_of="-:", any_of=DIGITS)

DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Weds": "Wednesday", "Thu": "Thursday",
    "Thur": "Thursday", "Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday",
}  # fmt: skip
CALENDAR = {**DAYS, **MONTH_OF}
CALENDAR_NAME = any_of({*CALENDAR, *CALENDAR.values(), "May"})
CALENDAR_RANGE = Prefiltered(rf"(?<![\w-])({CALENDAR_NAME})\.?\s?-\s?({CALENDAR_NAME})(?![\w-])", all_of="-")
# Some abbreviations of days are also words or names ("Sat", "Sun"), so a month or a number must follow.
DAY_BEFORE_TIME = Prefiltered(rf"(?<![\w-])({any_of(DAYS)})(?:\.,?|,)?(?=\s(?:{any_of(MONTH_OF)}|\d))", any_of="FMSTW")
DAY_BEFORE_DASH = Prefiltered(r"(?<![\w-])(Mon|Tues?|Weds?|Thu(?:rs?)?|Fri)(?=\s?(?:-\s|--|:\s))", any_of=":-")
DOTTED_DAY = Prefiltered(
    r"(?<![\w-])(Mon|Tues?|Weds?|Thurs?|Fri)(?:(\.)(?=\s*$|\s+[A-Z])|\.(?!\w))", all_of=".", any_of="FMTW"
)

MONTH_DAYS = Prefiltered(
    rf"(?<![\w-])({any_of({*MONTH_OF, *MONTH_OF.values(), 'May'})})\.?\s(\d{{1,2}})(?:st|nd|rd|th)?"
    r"\s?-\s?(\d{1,2})(?:st|nd|rd|th)?(?![\w:%/-])",
    all_of="-",
    any_of=DIGITS,
)
DECADES = Prefiltered(r"(?<!\w)([12]\d\d0)'?s\s?-\s?'?(?=[2-9]0s\b)", all_of="-0s")
AGES = Prefiltered(
    r"(?<![\w.,-])(\d{1,3})-(?=\d{1,3}-(?:year|month|week|day|hour|minute|mile|foot|page)\b)", all_of="-", any_of=DIGITS
)
MONTH_TO_MONTH = Prefiltered(
    rf"(?<![\w-])((?:{any_of({*MONTH_OF, *MONTH_OF.values(), 'May'})})\.?\s\d{{1,2}}(?:st|nd|rd|th)?)\s?-\s?"
    rf"(?=(?:{any_of({*MONTH_OF, *MONTH_OF.values(), 'May'})})\.?\s\d{{1,2}}\b)",
    all_of="-",
    any_of=DIGITS,
)
# Not beside another single letter, where the hyphen joins spelled acronyms: "U T C-H T M L".
LETTER_RANGE = Prefiltered(r"(?<![\w-])(?<!\b[A-Z] )([A-Z])-([A-Z])(?![\w-])(?! [A-HJ-Z]\b)", all_of="-")
TIMESTAMP = Prefiltered(
    r"(?<![\w.-])(\d{4}-\d\d-\d\d)T([0-2]\d:[0-5]\d)(:[0-5]\d)?(?:\.\d{1,9})?(?:(Z)|([+-])(\d\d):?(\d\d))?(?!\w)",
    all_of="-:T",
)
HOURS_AND_MINUTES = Prefiltered(
    r"(?<![\w.,])(\d{1,3})\s?h(?:rs?)?\s?(\d{1,2})\s?m(?:in)?(?!\w)", all_of="hm", any_of=DIGITS
)
DAYS_AGO = Prefiltered(r"(?<![\w.,])(\d{1,4})d(?=\s(?:ago|later|left)\b)", all_of="d", any_of=DIGITS)
ZONE = Prefiltered(r"(?<![\w])(UTC|GMT)\s?([+-])\s?(?=\d)", all_of="T", any_of="+-")
NEGATIVE_MONEY = Prefiltered(rf"(?<![\w)\d])(?:-\s?({SIGN})|({SIGN})-)(?=\d)", all_of="-", any_of=DIGITS)
INDIAN_GROUPS = Prefiltered(r"(?<![\w.,])\d{1,2}(?:,\d\d){1,5},\d{3}(?!\d|,\d)", all_of=",", any_of=DIGITS)
SQUARE_FEET = Prefiltered(r"(?<=\d)\s?(sq|cu)\.\s?ft\b(\.(?=\s*$|\s+[A-Z]))?\.?", all_of=".ft", any_of=DIGITS)
SWISS_THOUSANDS = Prefiltered(r"(?<![\w.,'])\d{1,3}(?:'\d{3}){1,5}(?![\w'])", all_of="'", any_of=DIGITS)
VOLTS_AND_AMPS = Prefiltered(
    r"(?<![\w.,])(\d{1,4}(?:\.\d{1,2})?\s?V(?:AC|DC)?(?:,|\s?/|\s?@)?\s?)(\d{1,3}(?:\.\d{1,3})?)\s?A\b",
    all_of="VA",
    any_of=DIGITS,
)
COMPASS = Prefiltered(r"(?<=\d)\s?°\s?([NSEW])(?!\w)", all_of="°")
COMPASS_NAMES = {"N": "north", "S": "south", "E": "east", "W": "west"}
EVEN = Prefiltered(r"(?<![\w.,/-])50-50(?![\w/-])", all_of="-50")
TIMES = Prefiltered(
    r"(?<=\d)x(?=\s(?:as|faster|slower|more|less|the|better|bigger|larger|smaller|cheaper|higher|lower|longer)\b)",
    all_of="x",
    any_of=DIGITS,
)
# One or two digits after the comma are cents: "€4,50". Three are a group of thousands.
MONEY_COMMA = Prefiltered(
    rf"({SIGN}\s?)?(?<![\w.,])(\d{{1,6}}),(\d\d)(?![\d.,]\d|\d)(\s?{SIGN})?", all_of=",", any_of=DIGITS
)
DECIMAL_COMMA = Prefiltered(r"(?<![\w.,])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?![\d.,]\d|\d)", all_of=",.", any_of=DIGITS)
CODES = {
    "USD": "U S dollars", "EUR": "euros", "GBP": "British pounds", "JPY": "Japanese yen", "CHF": "Swiss francs",
    "CAD": "Canadian dollars", "AUD": "Australian dollars", "INR": "Indian rupees", "CNY": "Chinese yuan",
    "SEK": "Swedish kronor", "NOK": "Norwegian kroner", "DKK": "Danish kroner", "NZD": "New Zealand dollars",
    "MXN": "Mexican pesos", "BRL": "Brazilian reais", "KRW": "Korean won", "SGD": "Singapore dollars",
}  # fmt: skip
SCALE = r"(?:\s?(?:thousand|million|billion|trillion|k|K|M|m|bn|B)\b)?"
SCALE_LETTER = re.compile(r"(\d)\s?(k|m|mn|bn|b)$", re.IGNORECASE)
DOLLARS = {
    "US": "U S",
    "C": "Canadian",
    "CA": "Canadian",
    "A": "Australian",
    "AU": "Australian",
    "NZ": "New Zealand",
    "HK": "Hong Kong",
    "S": "Singapore",
    "MX": "Mexican",
}
REAIS = Prefiltered(r"(?<!\w)R\$\s?(?=\d)", all_of="R$", any_of=DIGITS)
DOLLAR = Prefiltered(rf"(?<!\w)({'|'.join(DOLLARS)})\$\s?({NUMBER}{SCALE})(?!\w)", all_of="$", any_of=DIGITS)
CODE_FIRST = Prefiltered(rf"(?<![\w$/])({'|'.join(CODES)})\s?({NUMBER}{SCALE})(?!\w)", any_of=DIGITS)
CODE_LAST = Prefiltered(rf"(?<![\w.,{SIGNS}])({NUMBER}{SCALE})\s?({'|'.join(CODES)})(?!\w)", any_of=DIGITS)
EITHER = {
    "he/she": "he or she", "she/he": "she or he", "his/her": "his or her", "him/her": "him or her", "s/he": "he or she",
    "yes/no": "yes or no", "true/false": "true or false", "on/off": "on or off", "either/or": "either or",
    "a/b": "A B", "i/o": "I O", "tcp/ip": "T C P I P", "p/e": "P E", "r/c": "R C",
}  # fmt: skip
EITHER_WORD = Prefiltered(rf"(?<![\w/])(?:{'|'.join(EITHER)})(?![\w/])", all_of="/", flags=re.IGNORECASE)


def speak_ranges(text: str) -> str:
    """Return the text with rates, feet and inches, and ranges of times, days and months in words around the numbers."""
    text = TIMESTAMP.sub(_timestamp, text)
    text = EITHER_WORD.sub(lambda match: EITHER[match[0].lower()], text)
    text = CUPS.sub(_cups, RATE.sub(_rate, text))
    text = VOLTS_AND_AMPS.sub(r"\1\2 amps", SWISS_THOUSANDS.sub(lambda match: match[0].replace("'", ""), text))
    text = REAIS.sub("BRL ", text)
    text = DOLLAR.sub(lambda match: _amount(match[2], f"{DOLLARS[match[1]]} dollars"), text)
    text = CODE_FIRST.sub(lambda match: _amount(match[2], CODES[match[1]]), text)
    text = CODE_LAST.sub(lambda match: _amount(match[1], CODES[match[2]]), text)
    text = INDIAN_GROUPS.sub(lambda match: match[0].replace(",", ""), text)
    text = SQUARE_FEET.sub(lambda match: f" {'square' if match[1] == 'sq' else 'cubic'} feet{match[2] or ''}", text)
    text = MONEY_COMMA.sub(_money_comma, text)
    text = DECIMAL_COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", text)
    text = DOTTED_TIME.sub(lambda match: f"{match[1] or match[3]}:{match[2] or match[4]}", text)
    text = HOURS_RANGE.sub(r"\1 to ", TIME_RANGE.sub(r"\1 to ", CLOCK_RANGE.sub(r"\1 to ", text)))
    text = MONTH_DAYS.sub(lambda match: f"{_day(match[1])} {ordinal(int(match[2]))} to {ordinal(int(match[3]))}", text)
    text = MONTH_TO_MONTH.sub(r"\1 to ", text)
    text = DECADES.sub(r"\1s to '", AGES.sub(r"\1 to ", EVEN.sub("fifty fifty", text)))
    text = DAYS_AGO.sub(r"\1 days", HOURS_AND_MINUTES.sub(_duration, text))
    text = ZONE.sub(lambda match: f"{match[1]} {'plus' if match[2] == '+' else 'minus'} ", text)
    text = COMPASS.sub(lambda match: f" degrees {COMPASS_NAMES[match[1]]}", text)
    text = NEGATIVE_MONEY.sub(lambda match: f"minus {match[1] or match[2]}", text)
    text = DAY_BEFORE_DASH.sub(lambda match: DAYS[match[1]], speak_ranges_of_names(text))
    text = DOTTED_DAY.sub(
        lambda match: DAYS[match[1]] + (match[2] or ""), DAY_BEFORE_TIME.sub(lambda match: f"{DAYS[match[1]]},", text)
    )
    return TIMES.sub(" times", text)


def speak_ranges_of_names(text: str) -> str:
    """Return the text with ranges of days, months and letters in words: "Mon-Fri", "A-Z"."""
    text = CALENDAR_RANGE.sub(lambda match: f"{_day(match[1])} to {_day(match[2])}", text)
    return LETTER_RANGE.sub(_letters, text)


def speak_lengths(text: str) -> str:
    """Return the text with feet and inches as words. Call it while double quotes are still there."""
    text = FEET_AND_INCHES.sub(r"\1 foot \2 ", FEET_BY_FEET.sub(r"\1 foot by \2 foot", text))
    text = INCHES_BY.sub(" by ", _inches(text))
    text = ATTACHED_INCHES.sub(lambda match: f"{match[1] or match[2]} inches", text)
    return FEET.sub(lambda match: f"{match[1]} {'foot' if match[1] == '1' else 'feet'}", text)


def _inches(text: str) -> str:
    """Read `12"` as inches unless that mark closes a quotation."""
    if not INCHES.may_match(text):
        return text
    parts: list[str] = []
    end = marks = 0
    for match in INCHES.pattern.finditer(text):
        marks += text.count('"', end, match.start())
        parts.append(text[end : match.start()])
        closes = marks % 2 == 1
        noun = NOUN_AFTER.match(text, match.end())
        parts.append(match[0] if closes else f"{match[1]} {'inch' if noun or match[1] == '1' else 'inches'}")
        marks += closes
        end = match.end()
    return "".join((*parts, text[end:]))


def _rate(match: re.Match[str]) -> str:
    """Read `$5/hr` and `2 mg/kg/day`."""
    per = [PER[each] for each in (match[2], match[3]) if each]
    return " ".join((match[1], *(each if each == "each" else f"per {each}" for each in per)))


def _cups(match: re.Match[str]) -> str:
    whole, last = match.groups("")
    return f"{whole}{last} {'cup' if not whole and (last == '1' or '/' in last) else 'cups'}"


def _duration(match: re.Match[str]) -> str:
    hours, minutes = match[1], match[2]
    return f"{hours} {'hour' if hours == '1' else 'hours'} {minutes} {'minute' if minutes == '1' else 'minutes'}"


def _timestamp(match: re.Match[str]) -> str:
    """Return `2024-02-29 at 10:30 UTC` for an ISO 8601 time; whole minutes lose their seconds."""
    date, time, seconds, zulu, sign, hours, minutes = match.groups()
    zone = " UTC" if zulu else ""
    if sign:
        zone = f" UTC {'plus' if sign == '+' else 'minus'} {int(hours)}" + (f":{minutes}" if int(minutes) else "")
    return f"{date} at {time}{seconds if seconds and seconds != ':00' else ''}{zone}"


def _money_comma(match: re.Match[str]) -> str:
    before, whole, cents, after = match.groups("")
    return f"{before}{whole}.{cents}{after}" if before or after else match[0]


def _letters(match: re.Match[str]) -> str:
    """Return "A to Z". Neighbours in the alphabet are a pair: "X-Y"."""
    return f"{match[1]} to {match[2]}" if ord(match[2]) - ord(match[1]) > 1 else match[0]


def _day(name: str) -> str:
    return CALENDAR.get(name, name)


def _amount(written: str, currency: str) -> str:
    """Return "7 Canadian dollars and 50 cents" for an amount with cents, and the number with its currency otherwise."""
    written = SCALE_LETTER.sub(lambda match: f"{match[1]} {MULTIPLES[match[2].lower()]}", written)
    cents = re.fullmatch(r"([\d,]+)\.(\d\d)", written)
    if cents is None or not currency.endswith(("dollars", "euros")):
        return f"{written} {currency}"
    return f"{cents[1]} {currency}" + (f" and {int(cents[2])} cents" if int(cents[2]) else "")
