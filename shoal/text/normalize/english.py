"""Normalize written English to spoken words, for models that were trained on spoken words only.

The result consists of letters, spaces and `. , ? ! ' - ; :`. Normalization is idempotent: folding comes first and
leaves spaces, so that no later step joins characters into new spellings; digits and symbols are gone after their
step; abbreviations are expanded until none is left.
"""

import re
from itertools import takewhile

from shoal.errors import NothingToSpeak
from shoal.text.markdown import plain_text
from shoal.text.normalize.abbreviations import expand_abbreviations
from shoal.text.normalize.acronyms import spell_capitals
from shoal.text.normalize.citations import speak_verses
from shoal.text.normalize.codes import speak_codes
from shoal.text.normalize.currencies import CURRENCIES
from shoal.text.normalize.currencies import SIGN as SIGN_OF_MONEY
from shoal.text.normalize.fold import check_script, fold, without_glosses
from shoal.text.normalize.identifiers import in_parts, speak_identifiers
from shoal.text.normalize.latex import speak_latex
from shoal.text.normalize.numbers import digits
from shoal.text.normalize.prefilter import DIGITS, Prefiltered
from shoal.text.normalize.quantities import TEMPERATURES, speak_quantities
from shoal.text.normalize.ranges import speak_lengths, speak_ranges, speak_ranges_of_names
from shoal.text.normalize.roman import speak_roman
from shoal.text.style_tags import drop_style_tags
from shoal.text.tokenizer import SPEAKER_TAG

EMAIL = Prefiltered(
    r"(?<![\w.+-])[A-Za-z0-9_+-]{1,64}(?:\.[A-Za-z0-9_+-]{1,64}){0,5}@"
    r"[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,4}(?![\w-])",
    all_of="@.",
)
URL = re.compile(
    r"(?:(?:https?|ftp)://(?:www\.)?|(?<![\w.])www\.)(?P<address>[^\s<>\"]{1,300})"
    r"|(?<![\w.@-])(?P<domain>(?:[A-Za-z0-9-]{1,63}\.){1,4}(?:com|org|net|edu|gov|io|ai|dev|app|info|co\.uk)"
    r"(?![\w-])(?:/[^\s<>\"]{1,300})?"
    # Short links; without a path these are more often words.
    r"|[A-Za-z0-9-]{1,63}\.(?:ly|co|be|me|gg|gl|tv)/[^\s<>\"]{1,300})"
)
ADDRESS_SIGNS = {
    ".": "dot",
    "/": "slash",
    "-": "dash",
    "_": "underscore",
    "?": "question mark",
    "=": "equals",
    "&": "and",
    "@": "at",
    "#": "hash",
    ":": "colon",
    "%": "percent",
    "+": "plus",
    "~": "tilde",
}

URL_SEGMENTS = 3
SAYABLE_SEGMENT = re.compile(r"(?=.{1,30}$)[A-Za-z]+(?:[-_.][A-Za-z0-9]+)*|[1-9]\d{0,3}")
PORT = re.compile(r":(\d{2,5})(?![\w.])")
IP_AND_PORT = Prefiltered(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3}):(\d{2,5})(?![\w:])", all_of=":.", any_of=DIGITS)

SLASH_WORDS = {
    "and/or": "and or",
    "w/o": "without",
    "w/": "with",
    "n/a": "not applicable",
    "c/o": "care of",
    "km/h": "kilometers per hour",
    "m/s": "meters per second",
}
SLASH_WORD = Prefiltered(r"(?<![\w/])(?:and/or\b|w/o\b|w/|n/a\b|c/o\b|km/h\b|m/s\b)", all_of="/", flags=re.IGNORECASE)
SIGNS = {
    "&": " and ",
    "%": " percent ",
    "+": " plus ",
    "=": " equals ",
    "@": " at ",
    "#": " hash ",
    "/": " slash ",
    "°": " degrees ",
    "µ": " micro ",
    **{sign: f" {one} " for sign, (one, *_) in CURRENCIES.items()},
    "(": ", ",
    ")": ", ",
    "{": ", ",
    "}": ", ",
    "|": ", ",
}
DEGREES = Prefiltered(r"°\s?([CF])\b", all_of="°")
# "f(x)" and "O(n)"; "(s)" after a word is its plural.
FUNCTION = Prefiltered(r"(?<![\w'])([A-Za-z]|sin|cos|tan|log|ln|exp)\(([^()\n]{1,24})\)", all_of="()")
CALL = Prefiltered(r"(?<=\w)\(\)", all_of="()")
LAST_BRACKET = Prefiltered(r"[)\]}]+(?=[.!?]?\s*$)", any_of=")]}")
SIGN = re.compile(f"[{re.escape(''.join(SIGNS))}]")
ABOUT = Prefiltered(rf"~\s?(?={SIGN_OF_MONEY}?\d)", all_of="~")
COMPARISONS = {
    ">=": " greater than or equal to ",
    "<=": " less than or equal to ",
    "!=": " is not equal to ",
    "==": " equals ",
}
COMPARISON = Prefiltered(r"(?<![<>!=])[<>!=]=(?![<>=])", all_of="=")
FEWER = Prefiltered(rf"(?<![^\s(,])<(?={SIGN_OF_MONEY}?\.?\d)", all_of="<")
MORE = Prefiltered(rf"(?<![^\s(,])>(?={SIGN_OF_MONEY}?\.?\d)", all_of=">")
LESS = Prefiltered(r"(?<=\d)\s?<\s?(?=\d)|(?<=\s)<(?=\s)|(?<=\b[A-Za-z])<(?=[A-Za-z]\b|\d)", all_of="<")
GREATER = Prefiltered(r"(?<=\d)\s?>\s?(?=\d)|(?<=\s)>(?=\s)|(?<=\b[A-Za-z])>(?=[A-Za-z]\b|\d)", all_of=">")
# "Go to Settings > Privacy" is a way through menus.
MENU = Prefiltered(
    r"\b((?:go to|open|click|tap|press|choose|select|navigate to|under|menu)\b[^.?!>\n]{1,60}[A-Za-z])"
    r"((?: ?> ?[A-Z][^.?!>\n]{0,40}[A-Za-z]\b){1,8})",
    all_of=">",
    flags=re.IGNORECASE,
)
HEART = Prefiltered(r"(?<=\bI )<3(?= [A-Za-z])", all_of="<3")
# A hyphen between variables and numbers is a minus: "x - y", "3 - x", "x^2 - 3x", "x = -b". In words it is a dash.
VARIABLE = r"\d{0,9}(?:[b-z]\b|a\b(?! [A-Za-z]))(?!')"
MINUS = Prefiltered(
    rf"(?:(?<=\b[b-z])|(?<=\d[a-z])|(?<=\^\d)|(?<=[\d)]))(?<!\b[A-Za-z]\d) - (?={VARIABLE}|\()"
    r"|(?:(?<=\b[i-nt-z])|(?<=\d[a-z])|(?<=\^\d)) - (?=\d)"
    r"|(?<==) ?-(?=[a-z]\b)|(?<=\()-(?=[a-z] ?[-+*/^)])|(?<=[*+/^<>] )-(?=[a-z]\b)",
    all_of="-",
)

# ":)", ";-)" and ":P" are no words. Before a capital letter they stand where a sentence ends.
EMOTICON = Prefiltered(r"(?<!\S)[:;]'?-?[()DPp|](?![^\s.,!?])(?=(\s+[A-Z])?)", any_of=":;")
RULE = Prefiltered(r"([=#*_~+/|<>^-])\1{2,}", any_of="=#*_~+/|<>^-")  # a line drawn with signs
# The dot of an abbreviation, which is no full stop: "Ph.D., spoke", "1 yd., 2 gal.".
DOT_BEFORE_COMMA = Prefiltered(r"(?<![.\s])\.(?=[,;])", all_of=".")
PARAGRAPH = Prefiltered(r"\n\s*\n", all_of="\n")
ELLIPSIS = re.compile(r"\.{2,}(?=(\s*[a-z])?)")
DASH = Prefiltered(r"-{2,}|(?<!\S)-(?!\S)", all_of="-")
LOOSE_HYPHEN = Prefiltered(r"(?<![A-Za-z])-|-(?![A-Za-z])", all_of="-")
LOOSE_APOSTROPHE = Prefiltered(r"(?<![A-Za-z])'|'(?![A-Za-z])", all_of="'")
UNSPOKEN = re.compile(r"[^A-Za-z .,?!'\-;:]+")
SPACES = re.compile(" {2,}")
MARKS = re.compile(r" ?[.,?!;:](?: ?[.,?!;:])*+ ?")
STRONGEST_FIRST = "?!.;:,"


def normalize(text: str) -> str:
    """Return the text as an English speaker reads it. Raises TextError when nothing can be spoken."""
    text = without_glosses(text)
    check_script(text)
    text = plain_text(speak_latex(text))
    text = EMOTICON.sub(lambda match: ". " if match[1] else " ", RULE.sub(" ", fold(text)))
    text = drop_style_tags(SPEAKER_TAG.sub(" ", text) if "<|" in text else text)
    text = speak_lengths(text).replace('"', " ")
    text = speak_identifiers(speak_codes(speak_addresses(text))).replace("_", " ")
    text = speak_ranges(speak_roman(speak_verses(text)))
    text = expand_abbreviations(text)
    text = DOT_BEFORE_COMMA.sub("", speak_quantities(speak_relations(text)))
    text = expand_until_stable(tidy(speak_signs(text)))
    if not re.search("[A-Za-z]", text):
        raise NothingToSpeak("the text contains nothing that can be spoken in English")
    return text


def expand_until_stable(text: str) -> str:
    """Expand what tidying exposes, as in `(in Jan).`, until nothing changes. Readings have none, so it ends."""
    while (expanded := spell_capitals(tidy(expand_abbreviations(speak_ranges_of_names(speak_roman(text)))))) != text:
        text = expanded
    return text


def speak_addresses(text: str) -> str:
    text = IP_AND_PORT.sub(lambda match: f"{match[1]} port {_port(match[2])}", text)
    text = EMAIL.sub(lambda match: spell_address(match[0]), text)
    return URL.sub(lambda match: spell_address(shorten(match["address"] or match["domain"])), text)


def shorten(address: str) -> str:
    """Return the host and the first readable path segments of a URL; query, fragment and opaque ids are not said.

    Punctuation that ends the sentence around the address is kept.
    """
    bare = address.rstrip(".,!?;:)'/")
    host, *path = re.split(r"[/?#]", bare)
    words = list(takewhile(SAYABLE_SEGMENT.fullmatch, path[:URL_SEGMENTS])) if "/" in bare else []
    return "/".join((host.partition("@")[2] or host, *words)) + address[len(bare) :]


def spell_address(address: str) -> str:
    """Return `example dot com slash page`; punctuation that ends the sentence around the address is kept."""
    bare = address.rstrip(".,!?;:)'/")
    bare_words = PORT.sub(lambda match: f" port {_port(match[1])} ", bare)
    spoken = "".join(f" {ADDRESS_SIGNS[sign]} " if sign in ADDRESS_SIGNS else sign for sign in bare_words)
    return f"{spoken}{address[len(bare) :].replace('/', ' ')}"


def _port(written: str) -> str:
    """Return "eighty eighty" for 8080: four digits are read in pairs, others one by one."""
    return in_parts(written) if len(written) == 4 else digits(written)


def speak_relations(text: str) -> str:
    """Replace relation signs that only have a reading next to numbers; runs before the numbers are spelled out."""
    text = COMPARISON.sub(lambda match: COMPARISONS[match[0]], ABOUT.sub("about ", text))
    text = MENU.sub(lambda match: match[1] + match[2].replace(">", " to "), HEART.sub("love", text))
    text = MINUS.sub(" minus ", text)
    text = MORE.sub("more than ", FEWER.sub("less than ", text))
    text = LESS.sub(" is less than ", text)
    return GREATER.sub(" is greater than ", text)


def speak_signs(text: str) -> str:
    text = FUNCTION.sub(r"\1 of \2", CALL.sub("", text))
    text = DEGREES.sub(lambda match: f" degrees {TEMPERATURES[match[1]]} ", text)
    text = SLASH_WORD.sub(lambda match: f"{SLASH_WORDS[match[0].lower()]} ", text)
    text = LAST_BRACKET.sub("", text)
    return SIGN.sub(lambda match: SIGNS[match[0]], text)


def tidy(text: str) -> str:
    """Keep speakable characters only, with one space between words and one mark between phrases."""
    text = ELLIPSIS.sub(lambda match: ", " if match[1] else ". ", PARAGRAPH.sub(end_paragraph, text))
    text = UNSPOKEN.sub(" ", DASH.sub(", ", text))
    text = LOOSE_APOSTROPHE.sub(" ", LOOSE_HYPHEN.sub(" ", text))
    text = MARKS.sub(strongest_mark, SPACES.sub(" ", text) if "  " in text else text)
    return text.strip().lstrip(".,?!;: ")


def end_paragraph(match: re.Match[str]) -> str:
    """Return a full stop for a paragraph that ends without one."""
    return " " if match.string[max(match.start() - 1, 0)] in ".!?" else ". "


def strongest_mark(match: re.Match[str]) -> str:
    return f"{min(match[0].replace(' ', ''), key=STRONGEST_FIRST.index)} "
