"""Words in capitals: spelled letter by letter, read as a word, or shouted."""

import re

READ_AS_WORDS = frozenset(
    ("HMM", "SHH", "PSST", "PFFT", "TSK", "BRR", "GRR", "ZZZ", "JPEG", "MPEG", "JSON", "YAML", "NASDAQ", "CMOS")
)
# Written consonants at the beginning and at the end of English words of two to six letters.
ONSETS = (
    "B BL BR C CH CHR CL CR CZ D DR DW F FJ FL FR G GH GL GN GR H J K KH KL KN KR KW L LL M N P PH PHL PHR PL "
    "PR PS Q R RH S SC SCH SCHW SCR SH SHR SK SL SM SN SP SPH SPL SPR SQ ST STR SV SW T TH THR THW TR TS TW V "
    "W WH WR X Z"
)
CODAS = (
    "B BB BT C CH CHT CK CT D DD DST DTH F FF FT FTH G GG GH GHT GHTH GM GN H HM K L LB LC LCH LD LF LK LL LM "
    "LN LP LPH LPT LST LT LTH LTZ M MB MN MP MPH MPT MT N NC NCH ND NG NGTH NK NN NT NTH NX P PH PT PTH R RB "
    "RC RCH RD RF RG RK RL RLD RM RMTH RN RNT RP RR RRH RSH RST RT RTH RTZ S SC SH SK SM SP SS ST T TCH TH THM "
    "TT TZ V W WD WK WL WN WT WTH X XT XTH Z ZZ"
)
# Excludes vowels that no short English word begins with: "EOD", "UAW".
PRONOUNCEABLE = re.compile(
    rf"(?!EO(?!N)|IA(?!N)|UA|UE|UO|OE)(?:{'|'.join(ONSETS.split())})?[AEIOUY](?:[A-Z]*[AEIOUY])?(?:(?:{'|'.join(CODAS.split())})S?)?"
)
# Acronyms that could be read as words, but are spelled.
SPELLED = frozenset(
    """
    AC AI AKA AM API APIS AQI ASAP ATM BA BBC CEO CFO CIA CIO CO COO CPU CTO DC DIY DNA DOA EDM EPS ESL EST ETA EU EV
    FA FAQ FBI FYI GDP GOP GPA GPU HIV HR IBM ID IDE IEEE IOS IOT IOU IP IPO IQ IRS IT IV JFK LA LED MIA MIT MRI
    NBA NFL NGO NY NYC OS OT PA PHP PO POV POW PR QA RNA ROI SEO SOS SUV TBA TV UAE UCLA UEFA UFO UI UK UN UPC
    UPS URI URL US USA USB USD USPS USSR UTC UUID UUIDS UV UX VAT VIP
    """.split()  # noqa: SIM905 - a list of a hundred strings would take a page
)
# Acronyms of SPELLED that are also English words. In a sentence in capitals they are read as words.
WORDS_TOO = frozenset(("AM", "EST", "ID", "IT", "LA", "LED", "PA", "UPS", "US", "CO", "AC", "POW"))
CAPITALS = re.compile(r"(?<![\w'])([A-Z]{2,6})(s|'s)?(?![\w'])")
TRAILING_CAPITALS = re.compile(r"(?<=[a-z])([A-Z]{2,5})(s?)(?![\w'])")
NEIGHBOUR_BEFORE = re.compile(r"(?<![\w'])([A-Z]{1,20})[\s,!?.]{1,3}\Z")
NEIGHBOUR_AFTER = re.compile(r"[\s,!?.]{1,3}([A-Z]{1,20})(?![\w'])")


def spell_capitals(text: str) -> str:
    """Return the text with acronyms spelled: `T V` for TV. Shouted words and pronounceable acronyms (NASA) stay."""
    text = TRAILING_CAPITALS.sub(_spell_trailing, text)
    return CAPITALS.sub(_spell, text)


def _spell(match: re.Match[str]) -> str:
    word, ending = match[1], match[2] or ""
    if not (_unpronounceable(word) or (word in SPELLED and not (word in WORDS_TOO and _shouted(match)))):
        return match[0]
    return " ".join(word) + ("'s" if ending else "")


def _spell_trailing(match: re.Match[str]) -> str:
    """Spell capitals at the end of a word as an acronym of their own: ChatGPT, macOS."""
    word = match[1]
    if not (_unpronounceable(word) or word in SPELLED):
        return match[0]
    return f" {' '.join(word)}{match[2] and chr(39) + match[2]}"


def _unpronounceable(word: str) -> bool:
    """Return whether a word has no vowel, or consonants that no English word begins or ends with."""
    return word not in READ_AS_WORDS and PRONOUNCEABLE.fullmatch(word) is None


def _shouted(match: re.Match[str]) -> bool:
    """Return whether a word beside this one is in capitals and is not an acronym itself."""
    before = NEIGHBOUR_BEFORE.search(match.string, max(0, match.start() - 24), match.start())
    after = NEIGHBOUR_AFTER.match(match.string, match.end())
    return any(_is_word(each[1]) for each in (before, after) if each)


def _is_word(word: str) -> bool:
    return len(word) > 1 and not _unpronounceable(word) and (word not in SPELLED or word in WORDS_TOO)
