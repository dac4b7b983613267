"""Rates, measures and ranges, brought into a form that the rules for quantities read: "5/hr" to "5 per hour"."""

import re
from collections.abc import Iterable

from shoal.text.normalize.currencies import MULTIPLES, SIGN, SIGNS
from shoal.text.normalize.months import MONTH_OF
from shoal.text.normalize.numbers import ordinal


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
RATE = re.compile(rf"(?<![\w.,/])({MONEY}|{NUMBER}\s?[A-Za-zµ%°]{{1,20}})\s?/\s?({any_of(PER)})\b(?!/)")

FEET_AND_INCHES = re.compile(r"(?<![\w.'])(\d{1,2})'\s?(\d{1,2}(?:\.5)?)(?:\"|'')")
FEET_BY_FEET = re.compile(r"(?<![\w.'])(\d{1,5})' ?x ?(\d{1,5})'(?!\w)")
FEET = re.compile(r"(?<![\w.'])(\d{1,5})'(?![\w'])(?=[\s,.;:)!?x]|$)")
INCHES = re.compile(r"(?<![\w.\"])(\d{1,4}(?:\.\d{1,2})?(?: \d/\d{1,2})?)\"")
ATTACHED_INCHES = re.compile(r"(?<![\w.,])(\d{1,4}(?:\.\d{1,2})?)-?in\b(?!-)|(?<=\bft )(\d{1,2}) in\b")

TIME = r"\d{1,2}(?::[0-5]\d)?"
HALF = r"\s?[AaPp]\.?\s?[Mm]\b\.?"
TIME_RANGE = re.compile(rf"(?<![\w:.,-])({TIME}{HALF}|noon|midnight)\s?-\s?(?={TIME}{HALF}|{TIME}\b|noon|midnight)")
HOURS_RANGE = re.compile(rf"(?<![\w:.,-])({TIME})\s?-\s?(?={TIME}{HALF})")
CLOCK_RANGE = re.compile(r"(?<![\w:.,-])(\d{1,2}:[0-5]\d)\s?-\s?(?=\d{1,2}:[0-5]\d(?!\d))")

DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Weds": "Wednesday", "Thu": "Thursday",
    "Thur": "Thursday", "Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday",
}  # fmt: skip
CALENDAR = {**DAYS, **MONTH_OF}
CALENDAR_NAME = any_of({*CALENDAR, *CALENDAR.values(), "May"})
CALENDAR_RANGE = re.compile(rf"(?<![\w-])({CALENDAR_NAME})\.?\s?-\s?({CALENDAR_NAME})(?![\w-])")
# Some are words or names ("Sat", "Sun"): expanded where another day, a date or a time follows.
DAY_BEFORE_TIME = re.compile(rf"(?<![\w-])({any_of(DAYS)})(?:\.,?|,)?(?=\s(?:{any_of(MONTH_OF)}|\d))")
DAY_BEFORE_DASH = re.compile(r"(?<![\w-])(Mon|Tues?|Weds?|Thu(?:rs?)?|Fri)(?=\s?(?:-\s|--|:\s))")
DOTTED_DAY = re.compile(r"(?<![\w-])(Mon|Tues?|Weds?|Thurs?|Fri)(?:(\.)(?=\s*$|\s+[A-Z])|\.(?!\w))")

MONTH_DAYS = re.compile(
    rf"(?<![\w-])({any_of({*MONTH_OF, *MONTH_OF.values(), 'May'})})\.?\s(\d{{1,2}})(?:st|nd|rd|th)?"
    r"\s?-\s?(\d{1,2})(?:st|nd|rd|th)?(?![\w:%/-])"
)
DECADES = re.compile(r"(?<!\w)([12]\d\d0)'?s\s?-\s?'?(?=[2-9]0s\b)")
AGES = re.compile(r"(?<![\w.,-])(\d{1,3})-(?=\d{1,3}-(?:year|month|week|day|hour|minute|mile|foot|page)\b)")
MONTH_TO_MONTH = re.compile(
    rf"(?<![\w-])((?:{any_of({*MONTH_OF, *MONTH_OF.values(), 'May'})})\.?\s\d{{1,2}}(?:st|nd|rd|th)?)\s?-\s?"
    rf"(?=(?:{any_of({*MONTH_OF, *MONTH_OF.values(), 'May'})})\.?\s\d{{1,2}}\b)"
)
# Beside a spelled letter the hyphen joins acronyms: "U T C-H T M L".
LETTER_RANGE = re.compile(r"(?<![\w-])(?<!\b[A-Z] )([A-Z])-([A-Z])(?![\w-])(?! [A-HJ-Z]\b)")
TIMESTAMP = re.compile(
    r"(?<![\w.-])(\d{4}-\d\d-\d\d)T([0-2]\d:[0-5]\d)(:[0-5]\d)?(?:\.\d{1,9})?(?:(Z)|([+-])(\d\d):?(\d\d))?(?!\w)"
)
HOURS_AND_MINUTES = re.compile(r"(?<![\w.,])(\d{1,3})\s?h(?:rs?)?\s?(\d{1,2})\s?m(?:in)?(?!\w)")
DAYS_AGO = re.compile(r"(?<![\w.,])(\d{1,4})d(?=\s(?:ago|later|left)\b)")
ZONE = re.compile(r"(?<![\w])(UTC|GMT)\s?([+-])\s?(?=\d)")
NEGATIVE_MONEY = re.compile(rf"(?<![\w)\d])(?:-\s?({SIGN})|({SIGN})-)(?=\d)")
INDIAN_GROUPS = re.compile(r"(?<![\w.,])\d{1,2}(?:,\d\d){1,5},\d{3}(?!\d|,\d)")
SQUARE_FEET = re.compile(r"(?<=\d)\s?(sq|cu)\.\s?ft\b(\.(?=\s*$|\s+[A-Z]))?\.?")
SWISS_THOUSANDS = re.compile(r"(?<![\w.,'])\d{1,3}(?:'\d{3}){1,5}(?![\w'])")
VOLTS_AND_AMPS = re.compile(
    r"(?<![\w.,])(\d{1,4}(?:\.\d{1,2})?\s?V(?:AC|DC)?(?:,|\s?/|\s?@)?\s?)(\d{1,3}(?:\.\d{1,3})?)\s?A\b"
)
COMPASS = re.compile(r"(?<=\d)\s?°\s?([NSEW])(?!\w)")
COMPASS_NAMES = {"N": "north", "S": "south", "E": "east", "W": "west"}
EVEN = re.compile(r"(?<![\w.,/-])50-50(?![\w/-])")
TIMES = re.compile(
    r"(?<=\d)x(?=\s(?:as|faster|slower|more|less|the|better|bigger|larger|smaller|cheaper|higher|lower|longer)\b)"
)
# One or two digits after the comma are cents: "€4,50". Three are a group of thousands.
MONEY_COMMA = re.compile(rf"({SIGN}\s?)?(?<![\w.,])(\d{{1,6}}),(\d\d)(?![\d.,]\d|\d)(\s?{SIGN})?")
DECIMAL_COMMA = re.compile(r"(?<![\w.,])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?![\d.,]\d|\d)")
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
DOLLAR = re.compile(rf"(?<!\w)({'|'.join(DOLLARS)})\$\s?({NUMBER}{SCALE})(?!\w)")
CODE_FIRST = re.compile(rf"(?<![\w$])({'|'.join(CODES)})\s?({NUMBER}{SCALE})(?!\w)")
CODE_LAST = re.compile(rf"(?<![\w.,{SIGNS}])({NUMBER}{SCALE})\s?({'|'.join(CODES)})(?!\w)")
EITHER = {
    "he/she": "he or she", "she/he": "she or he", "his/her": "his or her", "him/her": "him or her", "s/he": "he or she",
    "yes/no": "yes or no", "true/false": "true or false", "on/off": "on or off", "either/or": "either or",
    "a/b": "A B", "i/o": "I O", "tcp/ip": "T C P I P", "p/e": "P E", "r/c": "R C",
}  # fmt: skip
EITHER_WORD = re.compile(rf"(?<![\w/])(?:{'|'.join(EITHER)})(?![\w/])", re.IGNORECASE)


def speak_ranges(text: str) -> str:
    """Return the text with rates, feet and inches, and ranges of times, days and months in words around the numbers."""
    text = TIMESTAMP.sub(_timestamp, text)
    text = EITHER_WORD.sub(lambda match: EITHER[match[0].lower()], text)
    text = RATE.sub(lambda match: f"{match[1]} {'' if PER[match[2]] == 'each' else 'per '}{PER[match[2]]}", text)
    text = VOLTS_AND_AMPS.sub(r"\1\2 amps", SWISS_THOUSANDS.sub(lambda match: match[0].replace("'", ""), text))
    text = DOLLAR.sub(lambda match: _amount(match[2], f"{DOLLARS[match[1]]} dollars"), text)
    text = CODE_FIRST.sub(lambda match: _amount(match[2], CODES[match[1]]), text)
    text = CODE_LAST.sub(lambda match: _amount(match[1], CODES[match[2]]), text)
    text = INDIAN_GROUPS.sub(lambda match: match[0].replace(",", ""), text)
    text = SQUARE_FEET.sub(lambda match: f" {'square' if match[1] == 'sq' else 'cubic'} feet{match[2] or ''}", text)
    text = MONEY_COMMA.sub(_money_comma, text)
    text = DECIMAL_COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", text)
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
    text = _inches(text)
    text = ATTACHED_INCHES.sub(lambda match: f"{match[1] or match[2]} inches", text)
    return FEET.sub(lambda match: f"{match[1]} {'foot' if match[1] == '1' else 'feet'}", text)


def _inches(text: str) -> str:
    """Read `12"` as inches unless that mark closes a quotation."""
    if not INCHES.search(text):
        return text
    parts: list[str] = []
    end = marks = 0
    for match in INCHES.finditer(text):
        marks += text.count('"', end, match.start())
        parts.append(text[end : match.start()])
        closes = marks % 2 == 1
        noun = re.match(r"\s[a-z]", text[match.end() : match.end() + 2])
        parts.append(match[0] if closes else f"{match[1]} {'inch' if noun or match[1] == '1' else 'inches'}")
        marks += closes
        end = match.end()
    return "".join((*parts, text[end:]))


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
