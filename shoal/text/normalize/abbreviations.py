"""Expand abbreviations: titles, streets, companies, dotted letters. A dot that also ends a sentence stays."""

import re
from functools import partial

from shoal.text.normalize.currencies import SIGN
from shoal.text.normalize.months import MONTH_OF
from shoal.text.normalize.prefilter import DIGITS, Prefiltered
from shoal.text.normalize.quantities import read_apart

# A word of this list after an abbreviation begins a sentence: "Acme Inc. She left." Other capitalized words may be
# names: "the U.S. Congress".
STARTERS = (
    "A|After|All|Also|An|And|Are|As|At|Be|Because|Before|Both|But|By|Can|Could|Did|Do|Does|Each|Even|Every|For|From"
    "|Had|Has|Have|He|Her|Here|His|How|However|I|If|In|Is|It|Its|Just|Let|Many|Maybe|Most|My|No|Not|Now|On|Once|One"
    "|Or|Our|Perhaps|Please|She|Should|Since|So|Some|Still|Such|That|The|Their|Then|There|These|They|This|Those|To"
    "|Today|Tomorrow|Was|We|Were|What|When|Where|Which|While|Who|Why|Will|With|Would|Yes|Yesterday|You|Your"
)
ENDS_SENTENCE = rf"(?=\s*$|\s+(?:{STARTERS})(?:n't)?(?![\w.]))"
SENTENCE_END = re.compile(ENDS_SENTENCE)
TEXT_END = re.compile(r"\s*$")
DOTTED_LETTERS = Prefiltered(
    r"(?<![\w.])((?!e\.g|i\.e)[A-Za-z](?:\.[A-Za-z]){1,8}|(?:e\.g|i\.e))(?![A-Za-z0-9])"
    rf"((?<!e\.g)(?<!i\.e)\.(?:{ENDS_SENTENCE}|(?=\s+(?:Mr|Mrs|Ms|Dr|Prof)\b)"
    # After a time of day a capital begins a sentence, unless it is of a day, a month or a zone: "9 a.m. Eastern".
    r"|(?<=[ap]\.m\.)(?=\s+(?!(?:[MTWFS][a-z]{2,5}day|Eastern|Central|Mountain|Pacific|Atlantic|Standard|Local|Greenwich"
    rf"|{'|'.join((*MONTH_OF, *MONTH_OF.values()))}|Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b)[A-Z][a-z])))?\.?",
    all_of=".",
)
DOTTED_READINGS = {"e.g": "for example", "i.e": "that is"}

# An abbreviation may touch digits and symbols, which become separate words, but not letters.
WORD_START = r"(?<![A-Za-z])(?<![A-Za-z]['-])"
WORD_END = r"(?![A-Za-z])(?!['-][A-Za-z])"

# Titles are capitalized: "rev" in "rev the engine" and "ms" in "250 ms" are none.
TITLES = {
    "Mr": "Mister",
    "MR": "Mister",
    "Mrs": "Missus",
    "MRS": "Missus",
    "Ms": "Miss",
    "Dr": "Doctor",
    "DR": "Doctor",
    "Prof": "Professor",
    "Rev": "Reverend",
    "Sr": "Senior",
    "Jr": "Junior",
    "Capt": "Captain",
    "Lt": "Lieutenant",
    "Sgt": "Sergeant",
}
ABBREVIATIONS = {
    "vs": "versus",
    "etc": "et cetera",
    "approx": "approximately",
    "dept": "department",
    "blvd": "boulevard",
    "ltd": "limited",
    "cf": "compare",
    "tsp": "teaspoon",
    "tbsp": "tablespoon",
    "bldg": "building",
    "thx": "thanks",
    "pls": "please",
    "plz": "please",
    "msg": "message",
    "mtg": "meeting",
}
# Abbreviations only with a dot; without one they are words or parts of words. After a number they are its suffix:
# "the 3rd."
DOTTED_ABBREVIATIONS = {
    "gen": "general",
    "col": "colonel",
    "maj": "major",
    "gov": "governor",
    "sen": "senator",
    "rep": "representative",
    "hon": "honorable",
    "inc": "incorporated",
    "corp": "corporation",
    "co": "company",
    "ave": "avenue",
    "rd": "road",
    "mt": "mount",
    "ft": "fort",
    "tel": "telephone",
    "ext": "extension",
    "apt": "apartment",
    "ste": "suite",
    "hwy": "highway",
    "rte": "route",
    "pkwy": "parkway",
    "pres": "president",
    "cmdr": "commander",
    "adm": "admiral",
    "cpl": "corporal",
    "pvt": "private",
    "supt": "superintendent",
    "bros": "brothers",
    "assn": "association",
    "assoc": "association",
    "intl": "international",
    "natl": "national",
    "univ": "university",
    "govt": "government",
    "mgr": "manager",
    "mgmt": "management",
    "attn": "attention",
    "acct": "account",
    "appt": "appointment",
    "asst": "assistant",
    "qty": "quantity",
    "misc": "miscellaneous",
    # Without "jun.", "jul.", "mar." and "sep.": these are also names or words that end a sentence.
    **{short: MONTH_OF[short.title()] for short in ("jan", "feb", "apr", "aug", "sept", "oct", "nov", "dec")},
}
# Inside a sentence only, before a small letter, a number or a comma: otherwise these are words or names ("Max. He").
INSIDE = {
    "incl": "including",
    "excl": "excluding",
    "max": "maximum",
    "min": "minimum",
    "avg": "average",
    "temp": "temperature",
    "deg": "degrees",
    "est": "estimated",
    "ref": "reference",
    "orig": "originally",
    "prev": "previously",
    "vols": "volumes",
    "conf": "conference",
    "proc": "proceedings",
}
INSIDE_SENTENCE = Prefiltered(
    rf"(?<![\w'-])(?!(?<=\d\s)min)({'|'.join(INSIDE)})\.(?=,|\s+(?-i:[a-z\d.]|{SIGN}))", all_of=".", flags=re.IGNORECASE
)
ESTABLISHED = Prefiltered(r"(?<![\w'-])([Ee])st\.(?=\s+(?:in\s)?1[5-9]\d\d\b|\s+(?:in\s)?20[0-2]\d\b)", all_of="st.")
EDITION = Prefiltered(r"(?<=\d(?:st|nd|rd|th)\s)ed\.(?=,|\s+[a-z(\d])", all_of="ed.")
NUMBERED = {
    "no": "number",
    "nos": "numbers",
    "fig": "figure",
    "vol": "volume",
    "ch": "chapter",
    "p": "page",
    "pp": "pages",
    "vols": "volumes",
    "figs": "figures",
    "fn": "footnote",
    "eq": "equation",
    "para": "paragraph",
    "ep": "episode",
}
CAPITALIZED_NUMBERED = {"Art": "Article", "Arts": "Articles", "Sec": "Section", "Pt": "Part", "Bk": "Book"}
NUMBERED_ABBREVIATION = Prefiltered(
    rf"{WORD_START}(?:({'|'.join(NUMBERED)})\.\s?(?=\d)|(vols?|figs?|ch)\.\s?(?=[IVXLC]{{2,7}}\b|[VX]\b))",
    all_of=".",
    flags=re.IGNORECASE,
)
NUMBERED_CAPITAL = Prefiltered(
    rf"{WORD_START}({'|'.join(CAPITALIZED_NUMBERED)})\.\s?(?=\d|[IVXLC]{{2,7}}\b|[VX]\b)", all_of=".", any_of="ABPS"
)
SAINT_OR_STREET = Prefiltered(rf"{WORD_START}St{WORD_END}(\.{ENDS_SENTENCE})?\.?(?=(\s+[A-Z])?)", all_of="St")
DOCTORATE = Prefiltered(rf"{WORD_START}Ph\.?D(s?)(?:\.(?=\s+[a-z]))?(?![A-Za-z])", all_of="PhD")
DRIVE = Prefiltered(r"(?<=[A-Za-z] )(?<!\band )(?<!\bthe )Dr\b(?:(\.)(?=\s*$)|\.?(?=\s+[a-z0-9]|[,;:]))", all_of="Dr")
ERA = Prefiltered(r"\bAD(?=\s\d)|(?<=\d\s)(?:AD|CE)\b", any_of="DE")
# Inside a sentence: a capital word that begins one is no road ("Ask Dr. Who").
DRIVE_LAST = Prefiltered(rf"(?<=[\w,] )([A-Z][a-z]{{1,30}} )Dr\.{ENDS_SENTENCE}", all_of=".Dr")
ROADS = {"Ave": "Avenue", "Rd": "Road", "Ln": "Lane", "Ct": "Court", "Pl": "Place", "Sq": "Square", "Ter": "Terrace"}
ROAD = Prefiltered(
    rf"\b((?:[A-Z][a-z']{{1,30}}|\d{{1,3}}(?:st|nd|rd|th)) )({'|'.join(ROADS)})"
    rf"(?:(\.){ENDS_SENTENCE}|\.(?!\w)|(?=[,;]|\s*$|\s[NS][EW]\b))",
    any_of="ACLPRST",
)
DIRECTIONS = {"N": "North", "S": "South", "E": "East", "W": "West"}
DIRECTION = Prefiltered(
    r"(?<![\w.])([NSEW])\.?\s(?=\d{1,3}(?:st|nd|rd|th)\b"
    r"|[A-Z][a-z]{1,20}\s(?:St|Ave|Rd|Blvd|Dr|Ln|Street|Avenue|Road|Boulevard|Drive|Lane)\b)",
    any_of="ENSW",
)
VERSUS = Prefiltered(r"(?<=[a-z.)] )v\.(?=\s[A-Z])|(?<=[a-z] )v(?=\s[A-Z][a-z])", all_of=" v")
ET_AL = Prefiltered(r"\b(et al)\.(?=,|\s+[a-z(\d])", all_of=".")
CIRCA = Prefiltered(r"(?<![\w.])(?:ca|c)\.\s?(?=\d)", all_of=".c", any_of=DIGITS)
TITLE = Prefiltered(
    rf"{WORD_START}({'|'.join(TITLES)}){WORD_END}(\.(?=\s*$)|(?<=[JS]r)\.{ENDS_SENTENCE})?\.?", any_of="CDJLMPRS"
)
ABBREVIATION = re.compile(
    rf"{WORD_START}(?:(?!(?<=\d)tb?sp|(?<=\d\s)tb?sp)({'|'.join(ABBREVIATIONS)}){WORD_END}\.?"
    # Not "ft." after a number, as in "6 ft. tall": it is read with the number.
    rf"|(?<!\d)(?!(?<=\d\s)ft)({'|'.join(DOTTED_ABBREVIATIONS)})\.)"
    r"(?=(?-i:(\s+[A-Z])?))",
    re.IGNORECASE,
)
NEVER_LAST = (
    "vs",
    "cf",
    "gen",
    "col",
    "maj",
    "gov",
    "sen",
    "rep",
    "hon",
    "mt",
    "ft",
    "pres",
    "cmdr",
    "adm",
    "cpl",
    "pvt",
    "supt",
)  # a name or another word follows


def expand_abbreviations(text: str) -> str:
    text = ESTABLISHED.sub(lambda match: match_case(match[1], "established"), EDITION.sub("edition", text))
    text = INSIDE_SENTENCE.sub(lambda match: match_case(match[1], INSIDE[match[1].lower()]), text)
    text = DOCTORATE.sub(lambda match: f"P H D{match[1] and chr(39) + match[1]}", CIRCA.sub("circa ", text))
    text = ET_AL.sub(r"\1", VERSUS.sub("versus", text))
    text = expand_roads(ERA.sub(lambda match: " ".join(match[0]), text))
    text = DOTTED_LETTERS.sub(read_dotted_letters, text)
    text = NUMBERED_ABBREVIATION.sub(read_numbered, text)
    text = NUMBERED_CAPITAL.sub(lambda match: f"{CAPITALIZED_NUMBERED[match[1]]} ", text)
    text = SAINT_OR_STREET.sub(
        partial(read_apart, lambda match: "Saint" if match[2] and not match[1] else f"Street{match[1] or ''}"), text
    )
    text = TITLE.sub(partial(read_apart, lambda match: TITLES[match[1]] + (match[2] or "")), text)
    return ABBREVIATION.sub(partial(read_apart, read_abbreviation), text)


def expand_roads(text: str) -> str:
    """Return the text with roads and directions of addresses as words: "45 W. 33rd St., off Oak Dr."."""
    text = DRIVE.sub(lambda match: f"Drive{match[1] or ''}", DRIVE_LAST.sub(r"\1Drive.", text))
    text = DIRECTION.sub(lambda match: f"{DIRECTIONS[match[1]]} ", text)
    return ROAD.sub(lambda match: f"{match[1]}{ROADS[match[2]]}{match[3] or ''}", text)


def read_numbered(match: re.Match[str]) -> str:
    written = match[1] or match[2]
    return f"{match_case(written, NUMBERED[written.lower()])} "


def read_dotted_letters(match: re.Match[str]) -> str:
    """Spell `U.S.` letter by letter. At the end of a sentence its last dot is also the full stop."""
    reading = DOTTED_READINGS.get(match[1].lower()) or match[1].upper().replace(".", " ")
    return f"{reading}{'.' if match[2] else ' '}"


def read_abbreviation(match: re.Match[str]) -> str:
    written, before_capital = match[1] or match[2], match[3]
    reading = match_case(written, (ABBREVIATIONS | DOTTED_ABBREVIATIONS)[written.lower()])
    return (
        f"{reading}." if match[0].endswith(".") and _ends_sentence(match, written.lower(), before_capital) else reading
    )


def _ends_sentence(match: re.Match[str], short: str, before_capital: str | None) -> bool:
    if short == "etc" and before_capital is not None:
        return True
    if short in NEVER_LAST:
        return TEXT_END.match(match.string, match.end()) is not None
    return SENTENCE_END.match(match.string, match.end()) is not None


def match_case(written: str, reading: str) -> str:
    return reading[0].upper() + reading[1:] if written[0].isupper() else reading
