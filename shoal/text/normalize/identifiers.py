"""Names of letters, digits and dots with customary readings: file names, rooms, flights, emergency numbers."""

import re
from functools import partial

from shoal.text.normalize.numbers import below_hundred, cardinal, digits, plural
from shoal.text.normalize.prefilter import DIGITS, Prefiltered
from shoal.text.normalize.quantities import read_apart

# Extensions that are spelled although they have a vowel; those without a vowel are always spelled.
SPELLED_EXTENSIONS = frozenset(
    ("ai", "aac", "api", "avi", "docx", "exe", "iso", "odt", "ogg", "py", "pyc", "ui", "xlsx")
)
FILE_NAME = Prefiltered(
    r"(?<![\w.@])([A-Za-z0-9_-]{2,64}(?: ?\(\d{1,2}\))?)((?:\.[a-z][a-z0-9]{0,9}){1,3})(?![\w@/])(?!\.[A-Za-z])",
    all_of=".",
)
HIDDEN_FILE = Prefiltered(r"(?<![\w.)])\.(?=[a-z]{2,20}\b)|(?<!\.)\.(?=NET\b)", all_of=".")
PATH = Prefiltered(
    r"(?<![\w/~.])(?:~|\.{1,2})?(?:/[A-Za-z][\w.-]{0,63}){2,12}/?(?!\w)|(?<![\w/.])~(?:/\.?[A-Za-z][\w.-]{0,63}){1,12}",
    all_of="/",
)
ETC = re.compile(r"(?<=/)etc(?=/|$|\s)")
INITIALS = Prefiltered(r"(?<![\w&])([A-Z]{1,3})&([A-Z]{1,3})(s?)(?![\w&])", all_of="&")
IP_VERSION = Prefiltered(r"(?<!\w)IPv(?=[46]\b)", all_of="IPv")
SHARP = Prefiltered(r"(?<![\w#])([A-GJF])#(?!\w)", all_of="#")
ACIDITY = Prefiltered(r"(?<![A-Za-z])pH(?![A-Za-z])", all_of="pH")
STAR_KEY = Prefiltered(r"\b((?i:dial|press|enter)\s)\*(\d{0,3})(?=[\s.,]|$)", all_of="*")
HASHTAG = Prefiltered(r"(?<![\w#&/])#(?=[A-Za-z])", all_of="#")

# Nouns whose number is read in parts: "Room one oh one", "Boeing seven forty-seven".
READ_IN_PARTS = (
    "room|suite|apartment|apt|flight|gate|boeing|airbus|porsche|ferrari|peugeot|locker|bus|route|highway|hwy|interstate|freeway"
    "|extension|ext|unit|channel|studio|building|hall|box|exit|platform|train|line|bay|aisle|studio|level"
)
NUMBERED_PLACE = Prefiltered(
    rf"\b((?i:{READ_IN_PARTS})s?\.?\s+#?(?:[A-Z]-?)?)(\d{{3,4}})(?=[A-F]?(?![\w%°$€£]))(?![.,:/-]?\d)", any_of=DIGITS
)
# Written without a dot too: "Hwy 101", "Apt 5C", "Mk II".
PLACES = {"Hwy": "Highway", "Rte": "Route", "Apt": "Apartment", "Ste": "Suite", "Ext": "Extension", "ext": "extension"}
PLACE = Prefiltered(
    rf"(?<![\w'-])(?:({'|'.join(PLACES)})(?=\s#?\d)|Mk\.?(?=\s?(?:\d|[IVX]{{1,4}}\b)))", any_of="HRASEeM"
)
# Two-letter airline codes before a space and a number. Directly before digits, any two capitals are read as a code.
AIRLINES = "AA|AC|AF|AI|AY|AZ|BA|CX|DL|EK|EY|FR|IB|JL|KL|LH|LX|NH|NZ|OS|QF|QR|SA|SK|SN|SQ|TK|TP|UA|US|VS|WN"
FLIGHT_NUMBER = Prefiltered(
    rf"(?<![\w-])(?:([A-Z]{{2}})|({AIRLINES})\s)(\d{{3,4}})(?![\w%°-])(?![.,:/]\d)", any_of=DIGITS
)
AIRCRAFT = Prefiltered(r"\b((?i:boeing|airbus)\s+[A-Z]?)(\d{3})-(\d{3})(?!\d)", all_of="-", any_of=DIGITS)
# "F-150", "A380", "RTX 4090": a capital before three digits, or two and more before a space and four.
MODEL = Prefiltered(
    r"(?<![\w.,/&-])(?:([B-HJ-Z]|[AI](?! ))-?(\d{3})|([A-Z]{2,5}) (?!\d00\d)(\d{4}))(s?)(?![\w%°-])(?![.,:/]\d)",
    any_of=DIGITS,
)
MODELS = Prefiltered(r"(?<![\w-])([A-Z]{1,3})-(\d{1,2})s(?!\w)", all_of="-s", any_of=DIGITS)  # "two B-52s"
RETIREMENT_PLAN = Prefiltered(r"(?<![\w.,-])([4-5]0[1-9])\(?([a-z])\)?(?=(?:\(\d\))?(?![\w(]))", any_of=DIGITS)
STATUS = Prefiltered(
    r"\b((?i:HTTP|status|error)\s|(?i:an?|the)\s(?=404|[45]\d\d\s(?i:error|status|response|means|during|from)\b))"
    r"([1-5]0\d)(?![\w%°$€£])(?![.,:/-]\d)",
    any_of=DIGITS,
)
HOUSE_NUMBER = Prefiltered(
    r"(?<![\w.,/-])\d{3,4}(?=\s\d{1,3}(?:st|nd|rd|th)\s(?:Ave|St|Rd|Blvd|Dr|Ln|Pl|Ct)(?:\b|[a-z]))", any_of=DIGITS
)
# Codes that people read digit by digit: "your code is 4 8 2 9", "area code 4 1 5".
CODE = Prefiltered(
    r"\b((?i:zip|post(?:al )?code|code|passcode|otp|pin|(?:account|serial|tracking|confirmation|reference|routing|card"
    r"|ticket|invoice|member|passport|booking|policy|case|claim|order|meeting|customer|employee|student|patient|user"
    r"|transaction|registration|licen[cs]e|loan|vehicle|record|session|request)\s(?:number|no\.?|id))"
    r"(?:\s(?:is|was)|:)?\s+#?|\bID(?:\sis|:)?\s+#?"
    r"|\b(?i:card|account|number|visa|mastercard|amex)\s(?:\w{1,12}\s){0,2}?(?i:end(?:ing|s|ed)\s(?:in|with))\s+)"
    r"(\d{3,})(?![\w%°$€£])(?![.,:/-]\d)",
    any_of=DIGITS,
)
STATES = (
    "AK|AL|AR|AZ|CA|CO|CT|DC|DE|FL|GA|IA|ID|IL|KS|KY|LA|MA|MD|MI|MN|MO|MS|MT|NC|ND|NE|NH|NJ|NM|NV|NY|PA|RI|SC|SD|TN|TX|UT"
    "|VA|VT|WA|WI|WV|WY"
)
# Codes that are also words ("Well, OK") are read as states only before a ZIP code.
STATES_AND_WORDS = f"{STATES}|HI|IN|ME|OH|OK|OR"
ZIP_CODE = Prefiltered(rf"(?<!\w)({STATES_AND_WORDS})\s(\d{{5}})(?:-(\d{{4}}))?(?![\w-])(?![.,:]\d)", any_of=DIGITS)
CITY_AND_STATE = Prefiltered(rf"(?<=[a-z],\s)({STATES})(?=[\s.,;:!?)]|$)", all_of=",")
# Two capitals beside a digit are letters of a code or a formula: "FY25", "SO4".
LETTERS_BEFORE_DIGIT = Prefiltered(r"(?<![A-Za-z])(?!WW)([A-Z]{2})(?=\d)", any_of=DIGITS)
ISBN = Prefiltered(r"\b(ISBN(?:-1[03])?:?\s)(\d[\d-]{8,16}[\dX])(?![\w-])", all_of="ISBN")
NUMBER_SIGN = re.compile(r"\b[Nn]o\b\.?")
INITIALS_WITH_SEMICOLON = Prefiltered(r"(?<!\w)TL;DR(?!\w)", all_of=";", flags=re.IGNORECASE)
EMERGENCY = Prefiltered(
    r"\b((?i:call(?:ed|ing|s)?|dial(?:ed|led|ing|s)?|phone[ds]?|ring|rang|text)\s+)(\d{3})(?![\w%°])(?![.,:/-]?\d)",
    any_of=DIGITS,
)


def speak_identifiers(text: str) -> str:
    """Return the text with file names and numbers of places and flights as words."""
    text = PATH.sub(_path, text)
    text = FILE_NAME.sub(_file_name, HIDDEN_FILE.sub(" dot ", text))
    text = INITIALS.sub(
        lambda match: f"{' '.join(match[1])} and {' '.join(match[2])}{match[3] and chr(39) + match[3]}", text
    )
    text = IP_VERSION.sub("I P v ", text)
    text = HASHTAG.sub("hashtag ", SHARP.sub(r"\1 sharp", text))
    text = STAR_KEY.sub(lambda match: f"{match[1]}star {digits(match[2])}", ACIDITY.sub(" P H ", text))
    text = PLACE.sub(lambda match: PLACES[match[1]] if match[1] else "Mark", text)
    text = INITIALS_WITH_SEMICOLON.sub("T L D R", text)
    text = AIRCRAFT.sub(lambda match: f"{match[1]} {in_parts(match[2])} {in_parts(match[3])}", text)
    text = CODE.sub(lambda match: f"{NUMBER_SIGN.sub('number', match[1]).rstrip('#')}{digits(match[2])}", text)
    text = ISBN.sub(lambda match: f"{match[1]}{digits(match[2])}{' X' if match[2].endswith('X') else ''}", text)
    text = EMERGENCY.sub(lambda match: f"{match[1]}{digits(match[2])}", text)
    text = NUMBERED_PLACE.sub(partial(read_apart, _numbered_place), text)
    text = MODELS.sub(lambda match: f"{match[1]} {plural(below_hundred(int(match[2])))}", MODEL.sub(_model, text))
    text = RETIREMENT_PLAN.sub(lambda match: f"{in_parts(match[1])} {match[2]} ", text)
    text = STATUS.sub(lambda match: f"{match[1]}{in_parts(match[2])}", text)
    text = HOUSE_NUMBER.sub(lambda match: in_parts(match[0]), text)
    text = FLIGHT_NUMBER.sub(lambda match: f"{' '.join(match[1] or match[2])} {in_parts(match[3])}", text)
    return LETTERS_BEFORE_DIGIT.sub(lambda match: f"{' '.join(match[1])} ", speak_states(text))


def speak_states(text: str) -> str:
    """Return the text with codes of states as letters and ZIP codes as digits: "N Y one zero one one eight"."""
    text = ZIP_CODE.sub(lambda match: f"{' '.join(match[1])} {digits(match[2] + (match[3] or ''))}", text)
    return CITY_AND_STATE.sub(lambda match: " ".join(match[1]), text)


def in_parts(written: str) -> str:
    """Return three or four digits as people read a room or a flight: "one oh one", "twenty-four ninety"."""
    high, low = divmod(int(written), 100)
    if written[0] == "0":
        return digits(written)
    if low == 0:
        return cardinal(int(written)) if high % 10 == 0 else f"{below_hundred(high)} hundred"
    return f"{below_hundred(high)} {'oh ' if low < 10 else ''}{below_hundred(low)}"


def _numbered_place(match: re.Match[str]) -> str:
    return f"{match[1].replace('#', 'number')} {in_parts(match[2])}"


def _model(match: re.Match[str]) -> str:
    number = in_parts(match[2] or match[4])
    return f"{match[1] or match[3]} {plural(number) if match[5] else number}"


def _path(match: re.Match[str]) -> str:
    spelled = ETC.sub("E T C", match[0]).replace("~", " tilde ").replace("..", " dot dot ")
    return spelled.replace("/", " slash ")


def _file_name(match: re.Match[str]) -> str:
    extensions = [_extension(each) for each in match[2][1:].split(".")]
    return " dot ".join((match[1].replace("(", " ").replace(")", ""), *extensions))


def _extension(written: str) -> str:
    pronounceable = re.search("[aeiouy]", written) and written not in SPELLED_EXTENSIONS
    return written if pronounceable else " ".join(written.upper())
