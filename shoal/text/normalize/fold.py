"""Fold Unicode to printable ASCII for English text.

Symbols with an English name are replaced by it (`×`, `→`) and accents are removed. Other scripts become spaces, since
removing a character could join two words.
"""

import re
import unicodedata

from shoal.errors import TextError
from shoal.text.normalize.currencies import CURRENCIES

# Currency, degree and micro signs are kept: they are read together with their number.
UNCHANGED = frozenset((*CURRENCIES, "°", "µ"))

# Letters without a decomposition, and symbols with a reading of their own.
NAMED = {
    **dict.fromkeys("‘’‚‛′`´ʼ", "'"),
    **dict.fromkeys("“”„‟«»″", '"'),
    **dict.fromkeys("‐‑‒–−", "-"),
    **dict.fromkeys("—―", " -- "),
    **dict.fromkeys("•·∙▪●◦", ", "),
    **dict.fromkeys("，、", ", "),
    **dict.fromkeys("。｡", ". "),
    **dict.fromkeys("™®℠", " "),
    "…": "...",
    "！": "! ",
    "？": "? ",
    "；": "; ",
    "：": ": ",
    "¿": " ",
    "¡": " ",
    "⁄": "/",
    "²": " squared ",
    "³": " cubed ",
    "×": " times ",
    "÷": " divided by ",
    "±": " plus or minus ",
    "≈": " approximately ",
    "≠": " is not equal to ",
    "≤": " less than or equal to ",
    "≥": " greater than or equal to ",
    "→": " to ",
    "√": " square root of ",
    "∑": " sum of ",
    "∏": " product of ",
    "∫": " integral of ",
    "∂": " partial ",
    "∇": " nabla ",
    "∆": " delta ",
    "∈": " in ",
    "∉": " not in ",
    "∀": " for all ",
    "∃": " there exists ",
    "∪": " union ",
    "∩": " intersection ",
    "⊂": " subset of ",
    "⇒": " implies ",
    "⇔": " if and only if ",
    "∝": " proportional to ",
    "≡": " is identical to ",
    "∅": " empty set ",
    "∠": " angle ",
    "⊥": " perpendicular to ",
    "∥": " parallel to ",
    "¬": " not ",
    "∧": " and ",
    "∨": " or ",
    "∞": " infinity ",
    "π": " pi ",
    "μ": "µ",
    "Ω": " ohm ",
    "©": " copyright ",
    "§": " section ",
    "№": " number ",
    "‰": " per mille ",
    "℃": "°C",
    "℉": "°F",
    "ß": "ss",
    "æ": "ae",
    "Æ": "Ae",
    "œ": "oe",
    "Œ": "Oe",
    "ø": "o",
    "Ø": "O",
    "ł": "l",
    "Ł": "L",
    "đ": "d",
    "Đ": "D",
    "ð": "d",
    "Ð": "D",
    "þ": "th",
    "Þ": "Th",
    "ı": "i",
}
GREEK_NAMES = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"),
    *("nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
PLAIN = re.compile(r"[\x20-\x7e\n]*")
OTHER = re.compile(r"[^\x20-\x7e\n]")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
# Exponents follow a number or a variable; after a word, and for ¹ alone, they are footnote numbers.
EXPONENT = re.compile(r"(?:(?<=\d)|(?<=\b[A-Za-z]))(?!¹(?![⁰¹²³⁴-⁹]))[⁺⁻]?[⁰¹²³⁴-⁹]{1,18}")
# Areas and volumes: "km²". EXPONENT does not match after a unit, which is not a single letter.
UNIT_POWER = re.compile(r"(?<=\d|\s|/)(km|cm|mm|ft|in|mi|yd)([²³])")
RATED = re.compile(r"(?<![★☆⭐])([★⭐]{1,10})(☆{0,9})(?![★☆⭐])")
# "²³⁵U" is an isotope, "²/₃" a fraction.
MASS_NUMBER = re.compile(r"(?<!\w)[⁰¹²³⁴-⁹]{1,3}(?=[A-Z][a-z]?\b)")
RAISED_FRACTION = re.compile(r"(?<![⁰¹²³⁴-⁹])([⁰¹²³⁴-⁹]{1,3})[⁄/]([₀-₉]{1,3})(?!\w)")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# "2½" would decompose to "21/2", so a space is inserted first.
MIXED_FRACTION = re.compile(r"(?<=\d)(?=[¼½¾⅐-⅞])")


# Single Greek letters stand for quantities in English text. Greek words are refused.
GREEK = {
    **dict(zip("αβγδεζηθικλμνξοπρστυφχψω", GREEK_NAMES, strict=True)),
    **dict(zip("ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ", GREEK_NAMES, strict=True)),
}
WORD = re.compile(r"[^\W\d_]+")
# Letters that do not fold to ASCII: all but the Latin blocks and the letter-like symbols.
FOREIGN = re.compile(r"[^\u0000-\u024f\u0300-\u036f\u1e00-\u1eff\u2070-\u218f\ufb00-\ufb06\uff21-\uff5a]")


# "Moscow (Москва)", "Tokyo (東京, Tōkyō)": what stands in brackets repeats a word that was read. "¯\\_(ツ)_/¯" too.
GLOSS = re.compile(r"([¯\\_/]{0,3})[(（]([^()（）\n]{1,200})[)）]([¯\\_/]{0,3})")


def without_glosses(text: str) -> str:
    """Return the text without words of other scripts in brackets, and without brackets that have no other word."""
    return text if text.isascii() else GLOSS.sub(_without_foreign_words, text)


def _without_foreign_words(match: re.Match[str]) -> str:
    english = WORD.sub(lambda word: word[0] if _is_english(word[0]) else "", match[2])
    if english == match[2]:
        return match[0]
    return f"{match[1]}({english}){match[3]}" if any(map(str.isalnum, english)) else " "


def check_script(text: str) -> None:
    """Raise TextError for words in a script that English is not written in: dropping them would change the text."""
    if text.isascii():
        return
    for match in WORD.finditer(text):
        if not _is_english(match[0]):
            found = FOREIGN.search(match[0])
            assert found is not None
            name = unicodedata.name(found[0], "unknown letters").split()[0]
            script = name if name == "CJK" else name.capitalize()
            raise TextError(
                f"{match[0][:32]!r} is written in {script} script, and this model speaks English only: "
                "write it in Latin letters, or use a multilingual model"
            )


def _is_english(word: str) -> bool:
    return FOREIGN.search(word) is None or _is_symbol(word)


def _is_symbol(word: str) -> bool:
    """Return whether a word is a Greek letter, perhaps beside a Latin one ("Δx"), or a sign with an English name."""
    return len(word) <= 2 and all(letter in GREEK or letter in NAMED or letter.isascii() for letter in word)


def fold(text: str) -> str:
    """Return the text in printable ASCII, line ends and the characters of UNCHANGED."""
    if PLAIN.fullmatch(text):
        return text
    text = UNIT_POWER.sub(lambda match: f"{match[1]}^{match[2].translate(SUPERSCRIPTS)}", RATED.sub(_stars, text))
    text = MASS_NUMBER.sub(lambda match: f"{match[0].translate(SUPERSCRIPTS)} ", text.replace("§§", " sections "))
    text = RAISED_FRACTION.sub(_raised_fraction, text)
    text = EXPONENT.sub(lambda match: f"^{match[0].translate(SUPERSCRIPTS)}", MIXED_FRACTION.sub(" ", text))
    composed = unicodedata.normalize("NFC", text)
    return OTHER.sub(lambda match: fold_character(match[0]), composed)


def _raised_fraction(match: re.Match[str]) -> str:
    return f" {match[1].translate(SUPERSCRIPTS)}/{match[2].translate(SUBSCRIPTS)}"


def _stars(match: re.Match[str]) -> str:
    """Return "4 out of 5 stars" for a row of full and empty stars; one star alone is an ornament."""
    full, empty = len(match[1]), len(match[2])
    if full + empty == 1:
        return " "
    return f" {full} out of {full + empty} stars " if empty else f" {full} stars "


def fold_character(character: str) -> str:
    if character in UNCHANGED:
        return character
    if character in NAMED:
        return NAMED[character]
    if character in GREEK:
        return f" {GREEK[character]} "
    if unicodedata.category(character) in ("Mn", "Cf"):
        return ""
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return fold_decomposed(character)


def fold_decomposed(character: str) -> str:
    base = unicodedata.normalize("NFKD", character).replace("⁄", "/")
    ascii_part = "".join(mark for mark in base if mark.isascii() and mark.isprintable())
    return ascii_part or " "
