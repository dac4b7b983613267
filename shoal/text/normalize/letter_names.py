"""Names of letters in a normalized text, for nano: "F B I" becomes "eff-bee-i".

nano slurs capitals that stand alone: "The F D A approved it" sounds like "The fee approved it". The spellings were
chosen among several by what a recogniser heard (docs/text.md).
"""

import re

from shoal.text.normalize.abbreviations import STARTERS
from shoal.text.normalize.acronyms import SPELLED

NAMES = {
    **{"a": "ay", "b": "bee", "c": "see", "d": "dee", "e": "ee", "f": "eff", "g": "jee", "h": "aitch", "i": "i"},
    **{"j": "jay", "k": "kay", "l": "el", "m": "em", "n": "en", "o": "oh", "p": "pee", "q": "cue", "r": "ar"},
    **{"s": "ess", "t": "tee", "u": "yoo", "v": "vee", "w": "double-yoo", "x": "ex", "y": "why", "z": "zee"},
}
START, END = r"(?<![\w'-])", r"(?![\w-])(?!'(?!s\b))"
# Letters of one acronym or several: "F B I", also in "U S-based", "non-U S" and "C Cs".
LETTERS = re.compile(r"(?<![\w'])[A-Z](?:[ -][A-Z])+(?=s?(?!\w))(?!'(?!s\b))")
# "A" and "I" alone are words. A capital A inside a sentence is a letter, unless the words around it have capitals too.
SINGLE = re.compile(rf"{START}[B-HJ-Zb-hj-z]{END}")
# Nouns that are followed by a letter: "Plan A".
LETTERED_NOUNS = (
    "Appendix|Block|Class|Exhibit|Gate|Grade|Group|Level|Option|Part|Plan|Schedule|Section|Series|Team|Type|Vitamin"
    "|Zone"
)
LONE_A = re.compile(rf"{START}([a-z][\w'-]*|[B-Z] and) A(?=[ .,?!;:]|$)")
LETTERED_A = re.compile(rf"\b((?:{LETTERED_NOUNS})s?) A(?=[ .,?!;:]|$)")
# The dot of an initial ends no sentence: "John F. Kennedy", "by J. K. Rowling"; that of "Plan B. It works" does.
INITIALS = re.compile(
    rf"(?:(?<![\w'-])(?!(?:{LETTERED_NOUNS})s? )([A-Z][\w'-]{{1,30}}|and|by|for|from|of|or|to|with) |^|(?<=[.!?,;:] ))"
    rf"((?:[A-Z]\. ?){{1,4}})(?=[A-Z][a-z'-])(?!(?:{STARTERS})(?:n't)?\b)"
)
TIMES_OF_DAY = ("AM", "PM")
# Before a pronoun: "at five P M I left". The I after other letters belongs to them: "F B I".
BEFORE_PRONOUN = frozenset(
    (*TIMES_OF_DAY, "AI", "CD", "DC", "DVD", "EU", "ID", "LA", "NYC", "PC", "TV", "UK", "UN", "US", "USA")
)
# Before them an A that begins a sentence is the article: "A C D player".
AFTER_ARTICLE = SPELLED | {"CD", "DJ", "MP", "PC", "QR", "VP"}
BEGINS_SENTENCE = re.compile(r"(?:^|[.?!:] |[A-Z]{2} )\Z")
MAX_LETTERS = 6  # of one word; longer codes are several words


# Capitals that nano misreads as words: "OK" sounds like "oak", "JSON" like "John".
RESPELLED = {"ok": "okay", "json": "jay-son"}
RESPELLED_WORD = re.compile(rf"{START}(?:OK|Ok|ok|JSON|json)(?=[sd]?(?!\w)|'[sd]\b)")
ORGANISATION = re.compile(r"(?<=\b[Tt]he )WHO(?!\w)(?! [A-Z]{2})")
# Words without a vowel are spelled ("npm", "ssh", "kg"), unless they are a sound.
CONSONANTS_ONLY = re.compile(
    rf"{START}(?!hm|mm|mhm|sh+{END}|pss*t{END}|pf+t{END}|tsk|br+{END}|gr+{END}|zz|nth{END})[b-df-hj-np-tv-xz]{{2,5}}{END}"
)


def name_letters(text: str) -> str:
    """Return a normalized text with the names of its single letters; letters of one acronym are one word."""
    text = RESPELLED_WORD.sub(_respelled, ORGANISATION.sub("W H O", text))
    text = CONSONANTS_ONLY.sub(lambda match: _joined(match[0]), text)
    text = INITIALS.sub(lambda match: f"{match[1]} {_joined(match[2])} " if match[1] else f"{_joined(match[2])} ", text)
    text = LETTERED_A.sub(r"\1 ay", LONE_A.sub(r"\1 ay", LETTERS.sub(_acronyms, text)))
    return SINGLE.sub(lambda match: NAMES[match[0].lower()], text)


def _respelled(match: re.Match[str]) -> str:
    word = RESPELLED[match[0].lower()]
    at_start = BEGINS_SENTENCE.search(match.string[max(match.start() - 3, 0) : match.start()])
    return word.capitalize() if at_start else word


def _joined(letters: str) -> str:
    return "-".join(NAMES[each.lower()] for each in letters if each.isalpha())


def _acronyms(match: re.Match[str]) -> str:
    letters = match[0].replace(" ", "").replace("-", "")
    before = match.string[max(match.start() - 3, 0) : match.start()]
    article, letters = _without_article(letters, begins=BEGINS_SENTENCE.search(before) is not None)
    pronoun = " I" if letters[-1] == "I" and letters[:-1] in BEFORE_PRONOUN else ""
    letters = letters.removesuffix(pronoun[1:]) if pronoun else letters
    return article + " ".join(map(_joined, _groups(letters))) + pronoun


def _without_article(letters: str, *, begins: bool) -> tuple[str, str]:
    """Divide "AUS" into the article and the acronym where a sentence begins: "A U S judge"."""
    is_article = begins and letters[0] == "A" and letters not in SPELLED
    if is_article and (len(letters) > 3 or letters[1:] in AFTER_ARTICLE):
        return "A ", letters[1:]
    return "", letters


def _groups(letters: str) -> list[str]:
    """Divide the letters of adjacent acronyms, "H T T P A P I", and of a time and its zone; long codes too."""
    if letters[:2] in TIMES_OF_DAY and len(letters) > 4:
        return [letters[:2], letters[2:]]
    whole = letters in SPELLED or letters[:-1] in SPELLED  # "USB-C"
    for at in () if whole else range(2, len(letters) - 1):
        if letters[at:] in SPELLED or letters[:at] in SPELLED:
            return [letters[:at], letters[at:]]
    return [letters[at : at + MAX_LETTERS] for at in range(0, len(letters), MAX_LETTERS)]
