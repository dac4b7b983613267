"""Roman numerals as English words: after names of rulers as ordinals, after nouns that are numbered as cardinals."""

import re

from shoal.text.normalize.numbers import cardinal, ordinal, year
from shoal.text.normalize.prefilter import Prefiltered

VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
ROMAN_DIGITS = "".join(VALUES)
# Canonical numerals only: "IIII" and "VX" are not numbers. The look-ahead excludes the empty numeral.
ROMAN = r"(?=[IVXLCDM])M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})"
# A possessive may follow: "Henry VIII's wives"; "I'm" and "I'd" are not numerals.
END = r"(?![\w-])(?!'(?!s\b))"
# One letter with a dot, before another word, is an initial: "John V. Smith".
INITIAL = r"(?![IVX]\.\s?[A-Za-z])"

TITLES = "King|Queen|Pope|Emperor|Empress|Tsar|Czar|Kaiser|Prince|Princess|Sultan|Shah|Pharaoh|Duke|Duchess|Caliph"
# First names that rulers, popes and heirs bear. After other words a numeral is a cardinal: "Rocky IV".
RULERS = (
    "Abdullah|Adrian|Albert|Alexander|Alexios|Alfonso|Amenhotep|Andrew|Anne|Antiochus|Artaxerxes|Baldwin|Bela|Benedict|Boniface"
    "|Boris|Carl|Carlos|Casimir|Catherine|Celestine|Charles|Christian|Clement|Cleopatra|Conrad|Constantine|Cyrus|Darius|David"
    "|Edmund|Edward|Elizabeth|Eric|Eugene|Faisal|Farouk|Felipe|Ferdinand|Francis|Franz|Frederick|Friedrich|George|Gregory|Gustav"
    "|Haakon|Harald|Harold|Hassan|Henri|Henry|Honorius|Hussein|Innocent|Isabella|Ivan|James|Joan|John|Joseph|Juan|Julius|Justin"
    "|Justinian|Kenneth|Ladislaus|Leo|Leopold|Louis|Lothair|Ludwig|Magnus|Malcolm|Manuel|Margaret|Margrethe|Mary|Matthias"
    "|Maximilian|Mehmed|Michael|Mohammed|Murad|Napoleon|Nicholas|Olaf|Olav|Oscar|Otto|Paul|Pedro|Peter|Philip|Philippe|Pius"
    "|Ptolemy|Rama|Rameses|Ramesses|Ramses|Richard|Robert|Roger|Rudolf|Sancho|Selim|Sigismund|Simeon|Sixtus|Stephen|Suleiman"
    "|Theodosius|Thutmose|Tutankhamun|Umberto|Urban|Valentinian|Victor|Vittorio|Vladimir|Wenceslaus|Wilhelm|Willem|William"
    "|Xerxes"
)
HEIRS = "Anthony|Arthur|Daniel|Donald|Douglas|Frank|Harry|Howard|Jack|Kim|Martin|Samuel|Thomas|Walter"
NUMBERED = (
    "Act|Annex|Apollo|Appendix|Article|Bowl|Book|Category|Chapter|Class|Division|Episode|Exhibit|Figure|Gemini|Generation|Grade"
    "|Group|Henry|Level|Mark|Olympiad|Page|Part|Phase|Psalm|Round|Saturn|Scene|Schedule|Season|Section|Stage|Step|Table|Tier"
    "|Title|Tome|Type|Unit|Verse|Version|Volume|War"
)
COUNTED_AFTER = "century|dynasty|legion|corps|millennium|olympiad"
# A numeral after one of these is not a number: "The IV drip", "My CV".
DETERMINERS = r"(?:The|An?|This|That|My|His|Her|Its|Our|Your|Their|In|On|At|By|For|Via|And|Or|But|If|With|No)"

TITLED = Prefiltered(
    rf"\b((?:{TITLES})\s+[A-Z][\w'-]{{1,30}}(?:\s[A-Z][\w'-]{{1,30}})?)\s+{INITIAL}({ROMAN}){END}", any_of=ROMAN_DIGITS
)
RULER = Prefiltered(
    rf"\b((?:{RULERS})(?:\s(?:Paul|Carlos|Philip|Albert|Gustaf|Emmanuel|Joseph))?)\s+(?=[IVX]+{END}){INITIAL}({ROMAN})",
    any_of="IVX",
)
HEIR = Prefiltered(rf"\b((?:{RULERS}|{HEIRS})(?:\s[A-Z]\.)?\s[A-Z][\w'-]{{1,30}})\s+(I{{2,3}}|IV){END}", all_of="I")
# A numeral of one letter belongs to a ruler only if a sentence about a person follows: "Mary I was", not "Mary I
# think".
ABOUT_A_RULER = re.compile(
    r"\s*(?:$|[.,;:!?)]|'s\b|(?:was|is|of|had|ruled|reigned|died|and|who|became|married|at|in|to|for)\b)"
)
# "Class C" and "Section D" have letters; "Part I D" is a spelled word.
LETTER = r"(?![LCDM]\b|[IVX] [A-Z]\b)"
NUMBERED_NOUN = Prefiltered(rf"\b((?i:{NUMBERED})s?)\s+{LETTER}({ROMAN}){END}", any_of=ROMAN_DIGITS)
NUMBERED_PAIR = Prefiltered(
    rf"\b((?i:{NUMBERED})s?)\s+({ROMAN})(\s?(?:and|or|to|through|-|,|&)\s?)(?:(?<=s )|(?!I\b))({ROMAN}){END}",
    any_of=ROMAN_DIGITS,
)
NUMBERED_OF = Prefiltered(rf"\b((?i:{NUMBERED}))\s+({ROMAN})( of )({ROMAN}){END}", any_of=ROMAN_DIGITS)
SUBDIVIDED = Prefiltered(
    rf"\b((?i:phase|type|class|stage|grade|group|part))\s+(?=[IVX])({ROMAN})([a-c])(?![\w'-])", any_of="IVX"
)
LOWER_CASE = re.compile(r"\b((?i:chapter|page|pages|scene|volume|section|verse))\s+([ivx]{2,6})(?![\w'-])")
COUNTED = Prefiltered(rf"(?<![\w'-])({ROMAN})(?:st|nd|rd|th)?\s+(?=(?i:{COUNTED_AFTER})s?\b)", any_of=ROMAN_DIGITS)
# "(i) notice; (ii) cure; (iii) waiver": numbers if the second one is there; "(i)" alone may be a letter.
LIST_NUMERAL = Prefiltered(r"(?<![\w(])(\(?)([ivx]{1,5})\)(?=\s)", all_of=")")
WORLD_WAR = Prefiltered(r"(?<![\w'-])WW\s?(I{1,3}|1|2|3)(?![\w-])(?!'(?!s\b))", all_of="W")
NAMED = Prefiltered(rf"\b(?!{DETERMINERS}\b)([A-Z][a-z][\w'-]{{0,30}})\s+([IVX]{{2,6}}){END}", any_of="IVX")
LONG = Prefiltered(rf"(?<![\w'-])(?=[IVXLCDM]{{4}})({ROMAN}){END}", any_of=ROMAN_DIGITS)
WAR_NUMBERS = {"I": "one", "II": "two", "III": "three", "1": "one", "2": "two", "3": "three"}


def value(numeral: str) -> int:
    """Return the number that a canonical numeral stands for."""
    digits = [VALUES[letter] for letter in numeral]
    return sum(-one if one < following else one for one, following in zip(digits, [*digits[1:], 0], strict=True))


def speak_roman(text: str) -> str:
    """Return the text with Roman numerals as words, where the words around them say that they are numerals."""
    text = WORLD_WAR.sub(lambda match: f"World War {WAR_NUMBERS[match[1]]}", text)
    if "ii)" in text:
        text = LIST_NUMERAL.sub(_list_numeral, text)
    text = COUNTED.sub(lambda match: f"{ordinal(value(match[1]))} ", text)
    text = TITLED.sub(_ruler, text)
    text = RULER.sub(_named_ruler, text)
    text = HEIR.sub(_ruler, text)
    text = NUMBERED_PAIR.sub(_numbered_pair, NUMBERED_OF.sub(_numbered_pair, text))
    text = SUBDIVIDED.sub(lambda match: f"{_numbered(match)} {match[3]}", text)
    text = NUMBERED_NOUN.sub(_numbered, text)
    text = LOWER_CASE.sub(_lower_case, NAMED.sub(_named, text))
    return LONG.sub(_long, text)


def _ruler(match: re.Match[str]) -> str:
    return f"{match[1]} the {ordinal(value(match[2])).capitalize()}"


def _named_ruler(match: re.Match[str]) -> str:
    name, numeral = match[1], match[2]
    if name == "Malcolm" and numeral == "X":
        return match[0]
    if len(numeral) == 1 and numeral == "I" and not ABOUT_A_RULER.match(match.string, match.end()):
        return match[0]
    return _ruler(match)


def _numbered(match: re.Match[str]) -> str:
    return f"{match[1]} {cardinal(value(match[2]))}"


def _numbered_pair(match: re.Match[str]) -> str:
    joined = " to " if match[3].strip() == "-" else match[3]
    return f"{match[1]} {cardinal(value(match[2]))}{joined}{cardinal(value(match[4]))}"


def _named(match: re.Match[str]) -> str:
    return _numbered(match) if re.fullmatch(ROMAN, match[2]) else match[0]


def _lower_case(match: re.Match[str]) -> str:
    numeral = match[2].upper()
    return f"{match[1]} {cardinal(value(numeral))}" if re.fullmatch(ROMAN, numeral) else match[0]


def _list_numeral(match: re.Match[str]) -> str:
    numeral = match[2].upper()
    return f"{match[1]}{cardinal(value(numeral))})" if re.fullmatch(ROMAN, numeral) else match[0]


def _long(match: re.Match[str]) -> str:
    number = value(match[1])
    return year(number) if 1100 <= number <= 2099 else cardinal(number)
