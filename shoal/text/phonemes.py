"""Phonemes: the tags that S1 and S2 read, Arpabet, and IPA converted to it.

A tag holds one word in CMU Arpabet, or a syllable of pinyin or romaji:
`<|phoneme_start|>R EH1 D<|phoneme_end|>`.
"""

import re

from shoal.errors import TextError

START, END = "<|phoneme_start|>", "<|phoneme_end|>"
TAG = re.compile(r"(<\|phoneme_(?:start|end)\|>)")
# Letters, digits and spaces only, so that nothing else passes inside a tag.
SPAN = re.compile(r"<\|phoneme_start\|>[A-Za-z0-9' ]{1,200}<\|phoneme_end\|>")

VOWELS = frozenset({"AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"})
CONSONANTS = frozenset(
    {"B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V", "W"}
    | {"Y", "Z", "ZH"}
)
ASCII_CAPITALS = re.compile("[A-Z]")  # Arpabet has capitals, IPA small letters
PHONE = re.compile(r"([A-Z]{1,2})([0-2]?)")

# British and American symbols of the English sounds. At each position the longest symbol matches first.
IPA = {
    "tʃ": "CH", "t͡ʃ": "CH", "dʒ": "JH", "d͡ʒ": "JH", "aɪ": "AY", "aʊ": "AW", "eɪ": "EY", "oʊ": "OW", "əʊ": "OW",
    "ɔɪ": "OY", "ɜː": "ER", "ɝː": "ER", "ɪə": "IH R", "eə": "EH R", "ʊə": "UH R", "ɑː": "AA", "ɔː": "AO", "iː": "IY",
    "uː": "UW", "ər": "ER", "ɜr": "ER",
    "ɑ": "AA", "ɒ": "AA", "a": "AA", "æ": "AE", "ʌ": "AH", "ə": "AH", "ɐ": "AH", "ɔ": "AO", "ɛ": "EH", "e": "EH",
    "ɜ": "ER", "ɝ": "ER", "ɚ": "ER", "ɪ": "IH", "i": "IY", "o": "OW", "ʊ": "UH", "u": "UW",
    "b": "B", "d": "D", "ð": "DH", "f": "F", "ɡ": "G", "g": "G", "h": "HH", "j": "Y", "k": "K", "l": "L", "ɫ": "L",
    "m": "M", "n": "N", "ŋ": "NG", "p": "P", "r": "R", "ɹ": "R", "ɾ": "D", "s": "S", "ʃ": "SH", "t": "T", "θ": "TH",
    "v": "V", "w": "W", "ʍ": "W", "z": "Z", "ʒ": "ZH", "x": "K",
}  # fmt: skip
LONGEST_SYMBOL = max(map(len, IPA))
STRESS = {"ˈ": "1", "'": "1", "ˌ": "2"}
UNSOUNDED = frozenset(". ‿͡ːˑ̩ʰ-/[]")

SIBILANTS = frozenset({"S", "Z", "SH", "ZH", "CH", "JH"})
VOICELESS = frozenset({"P", "T", "K", "F", "TH"})


def tagged(phonemes: str) -> str:
    """Return the phonemes of one word as the models read them."""
    return f"{START}{phonemes}{END}"


def without_spans(text: str) -> str:
    """Return the text with a space in place of each complete phoneme tag."""
    return SPAN.sub(" ", text) if START in text else text


def is_arpabet(phonemes: str) -> bool:
    phones = phonemes.split()
    return bool(phones) and all(map(_is_phone, phones))


def arpabet(phonemes: str, alphabet: str = "") -> str:
    """Return phonemes in Arpabet. The alphabet is `ipa`, an Arpabet one, or by default either.

    Raises TextError for an unknown alphabet or symbol.
    """
    if alphabet not in ("", "ipa", "arpabet", "x-arpabet", "cmu-arpabet", "x-cmu-arpabet"):
        raise TextError(f"unknown alphabet {alphabet[:32]!r}: use ipa or arpabet")
    plain = " ".join(phonemes.strip().strip("/").upper().split())
    if alphabet != "ipa" and is_arpabet(plain):
        return plain
    if alphabet not in ("", "ipa") or (not alphabet and ASCII_CAPITALS.search(phonemes)):
        wrong = next((each for each in plain.split() if not _is_phone(each)), plain)
        raise TextError(f"{wrong[:32]!r} is not an Arpabet phoneme")
    return from_ipa(phonemes)


def from_ipa(ipa: str) -> str:
    """Return the Arpabet of an English word in IPA. Raises TextError naming the symbol that English does not have."""
    phones: list[str] = []
    stress, place = "0", 0
    while place < len(ipa):
        if ipa[place] in STRESS:
            stress, place = STRESS[ipa[place]], place + 1
            continue
        if ipa[place] in UNSOUNDED:
            place += 1
            continue
        symbol = _symbol_at(ipa, place)
        for phone in IPA[symbol].split():
            phones.append(f"{phone}{stress}" if phone in VOWELS else phone)
            stress = "0" if phone in VOWELS else stress
        place += len(symbol)
    if not phones:
        raise TextError(f"{ipa[:32]!r} has no phonemes")
    return " ".join(phones)


def possessive(phonemes: str) -> str:
    """Return the phonemes of a word with a possessive s."""
    last = phonemes.split()[-1]
    return f"{phonemes} {'AH0 Z' if last in SIBILANTS else 'S' if last in VOICELESS else 'Z'}"


def _symbol_at(ipa: str, place: int) -> str:
    for length in range(LONGEST_SYMBOL, 0, -1):
        if ipa[place : place + length] in IPA:
            return ipa[place : place + length]
    raise TextError(f"{ipa[place]!r} in {ipa[:32]!r} is not a sound of English that can be written in Arpabet")


def _is_phone(phone: str) -> bool:
    match = PHONE.fullmatch(phone)
    return match is not None and (match[1] in VOWELS or (match[1] in CONSONANTS and not match[2]))
