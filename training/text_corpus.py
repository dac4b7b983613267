"""Sentences for the teachers to say: WordNet's definitions and examples, and templates of our own for everyday talk.

Text comes out as plain spoken words, so that the sound and the letters agree whichever teacher reads it: no digits, no
symbols, no initials, no capitals to be spelled. A sentence's hash decides for ever whether it may be trained on, so a
held-out sentence stays held out when the corpus grows, changes its order or its seed.

WordNet 3.0 (Debian `wordnet-base`) is Copyright 2006 by Princeton University, under the permissive WordNet licence:
use, copying, modification and distribution free of charge, with its notice kept. The rest is written here.

    python -m training.text_corpus --out build/corpus/sentences.txt
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WORDNET = Path("/usr/share/wordnet")
MIN_CHARACTERS, MAX_CHARACTERS = 2, 160
HELDOUT_SHARE = 0.01
HELDOUT_WORDS = range(6, 15)

# ---------------------------------------------------------------------------------------------------------------------
# Numbers as words.


def words(text: str) -> list[str]:
    return text.split()


def listed(text: str) -> list[str]:
    """Choices set apart by bars, wherever the lines break."""
    return [" ".join(choice.split()) for choice in text.split("|")]


SMALL = words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen"""
)
TENS = words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
SCALES = ((1_000_000_000, "billion"), (1_000_000, "million"), (1_000, "thousand"))
IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def number_words(number: int, joiner: str = " ") -> str:
    """English words for 0 <= number < 10**12; `joiner` stands after the hundreds, " and " in British usage."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens] + (f"-{SMALL[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{SMALL[hundreds]} hundred" + (joiner + number_words(rest, joiner) if rest else "")
    scale, name = next((scale, name) for scale, name in SCALES if number >= scale)
    count, rest = divmod(number, scale)
    return f"{number_words(count, joiner)} {name}" + (f" {number_words(rest, joiner)}" if rest else "")


def ordinal_words(number: int) -> str:
    head, last = re.fullmatch(r"(.*?)([a-z]+)", number_words(number)).groups()  # type: ignore[union-attr]
    if last in IRREGULAR_ORDINALS:
        return f"{head}{IRREGULAR_ORDINALS[last]}"
    return f"{head}{last[:-1]}ieth" if last.endswith("y") else f"{head}{last}th"


def year_words(year: int) -> str:
    """A year as it is read aloud: nineteen oh five, two thousand six, twenty twenty-six."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return number_words(year)
    if not rest:
        return f"{number_words(century)} hundred"
    return f"{number_words(century)} {'oh ' if rest < 10 else ''}{number_words(rest)}"


def decade_words(decade: int) -> str:
    century, rest = divmod(decade, 100)
    return f"{number_words(century)} {TENS[rest // 10][:-1]}ies" if rest >= 20 else f"{number_words(century)} hundreds"


def digits_words(digits: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in digits)


# ---------------------------------------------------------------------------------------------------------------------
# Plain spoken words.

SPOKEN = {
    r"\be\.g\.": "for example",
    r"\bi\.e\.": "that is",
    r"\betc\b\.?": "et cetera",
    r"\bvs\b\.?": "versus",
    r"\bca?\. (?=\d)": "about ",
    r"\bMr\.": "Mister",
    r"\bMrs\.": "Missus",
    r"\bDr\.": "Doctor",
    r"\bSt\. (?=[A-Z])": "Saint ",
    r"\bProf\.": "Professor",
    r"\bNo\. (?=\d)": "number ",
    r"&": " and ",
    r"(?<=\d) ?%": " percent",
    r"(?<=\d) ?-(?=\d)": " to ",
    r"--| - ": ", ",
    r"`": "'",
    r"[\u2018\u2019]": "'",
    r"[\u201c\u201d]": '"',
}
PLAIN = re.compile(r"[A-Za-z .,?!'\"\-;:]+")
# Capitals, initials and lone letters: one teacher spells them, another tries to say them as a word.
SPELLED = re.compile(r"\b[A-Z]{2,}|(?<![A-Za-z'])[b-zB-HJ-Z](?![A-Za-z'])|[A-Za-z]\.[A-Za-z]|[a-z][A-Z]")
AMBIGUOUS_NUMBER = re.compile(r"\d[:/]\d")


def spell_numbers(text: str) -> str:
    """Digits to words where their reading is plain: years, decades, ordinals, whole and decimal numbers."""
    text = re.sub(r"\b(1[1-9]\d0|20[0-9]0)'?s\b", lambda m: decade_words(int(m[1])), text)
    text = re.sub(r"\b(\d{1,3})(?:st|nd|rd|th)\b", lambda m: ordinal_words(int(m[1])), text)
    text = re.sub(r"\$(\d{1,6})\b(?![.,]\d)", lambda m: f"{number_words(int(m[1]))} dollars", text)
    text = re.sub(r"\b\d{1,3}(?:,\d{3})+\b", lambda m: number_words(int(m[0].replace(",", ""))), text)
    text = re.sub(r"\b(1[1-9]\d\d|20\d\d)\b(?![.,]\d)", lambda m: year_words(int(m[1])), text)
    text = re.sub(r"\b(\d{1,4})\.(\d{1,4})\b", lambda m: f"{number_words(int(m[1]))} point {digits_words(m[2])}", text)
    return re.sub(r"\b\d{1,4}\b", lambda m: number_words(int(m[0])), text)


def normalise(text: str) -> str | None:
    """The sentence in plain spoken words, or None when it cannot be read in one way only."""
    text = re.sub(r"\([^()]*\)", " ", text)
    for written, spoken in SPOKEN.items():
        text = re.sub(written, spoken, text)
    if AMBIGUOUS_NUMBER.search(text):
        return None
    text = spell_numbers(text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r" (?=[.,?!;:])", "", text)
    text = re.sub(r"([,;:])[,;:]+", r"\1", text).strip(" ,;:-")
    return text if is_plain(text) and not SPELLED.search(text) else None


def is_plain(text: str) -> bool:
    """Whether the text has the length and the letters of a sentence for the corpus."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
        return False
    return bool(PLAIN.fullmatch(text) and re.search("[A-Za-z]", text)) and ".." not in text and text.count('"') % 2 == 0


def as_sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


# ---------------------------------------------------------------------------------------------------------------------
# WordNet.

# Glosses mark such entries in these words; nobody needs to hear them from us.
UNPLEASANT = re.compile(r"\b(slurs?|offensive|vulgar|obscene|disparag\w+|derogatory|profane|sexual\w*|prostitut\w*)\b")
PERSONAL = "I|I'm|I'll|I've|he|she|they|we|you|it|don't|please"
PERSONAL_OPENING = re.compile(rf"({PERSONAL})\b", re.I)
NATURAL_OPENING = re.compile(rf"({PERSONAL}|the|my|his|her|our|their|this|that|there)\b", re.I)


@dataclass(frozen=True, slots=True)
class Synset:
    """One WordNet entry: the words that share a meaning, its definitions and examples, all as written there."""

    lemmas: tuple[str, ...]
    definitions: tuple[str, ...]
    examples: tuple[str, ...]


def parse_synset(line: str) -> Synset:
    """One line of a `data.*` file; its format is WordNet's wndb(5)."""
    fields, _, gloss = line.partition(" | ")
    numbered = fields.split()
    count = int(numbered[3], 16)
    lemmas = tuple(re.sub(r"\(\w+\)$", "", lemma).replace("_", " ") for lemma in numbered[4 : 4 + 2 * count : 2])
    # A dash after the closing quote names an author: those are quotations, not the editors' examples.
    quoted = re.findall(r'"([^"]*)"(\s*-)?', gloss)
    definitions = re.sub(r'"[^"]*"(\s*-[^;]*)?', ";", gloss).split(";")
    return Synset(
        lemmas, tuple(filter(None, map(str.strip, definitions))), tuple(q for q, author in quoted if not author)
    )


def read_synsets(folder: Path) -> list[Synset]:
    synsets: list[Synset] = []
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"data.{part}").read_text(encoding="ascii", errors="replace").splitlines()
        synsets += [parse_synset(line) for line in lines if not line.startswith("  ") and not UNPLEASANT.search(line)]
    return synsets


def wordnet_examples(synsets: Iterable[Synset]) -> Iterator[str]:
    """Example sentences get their capital and full stop; example phrases stay phrases."""
    for text in normalised(example for synset in synsets for example in synset.examples):
        yield as_sentence(text) if NATURAL_OPENING.match(text) and " " in text else text


def wordnet_definitions(synsets: Iterable[Synset], rng: random.Random) -> Iterator[str]:
    """Half of the definitions dressed as sentences: people type both ways."""
    for text in normalised(definition for synset in synsets for definition in synset.definitions):
        yield as_sentence(text) if rng.random() < 0.5 else text


def wordnet_phrases(synsets: Iterable[Synset], rng: random.Random, words: int, phrases: int) -> Iterator[str]:
    """Single words and set phrases, lower-case lemmas only: names are read too differently."""
    lemmas = sorted(
        {lemma for synset in synsets for lemma in synset.lemmas if re.fullmatch("[a-z][a-z ]{2,28}", lemma)}
    )
    single = [lemma for lemma in lemmas if " " not in lemma]
    several = [lemma for lemma in lemmas if " " in lemma]
    for lemma in [*rng.sample(single, min(words, len(single))), *rng.sample(several, min(phrases, len(several)))]:
        yield rng.choice((lemma, lemma.capitalize(), as_sentence(lemma), f"the {lemma}", f"{lemma.capitalize()}?"))


def normalised(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in map(normalise, texts) if text is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Templates: {slot} is filled from a list or by a function of the generator.

FIRST_NAMES = words(
    """Anna Ben Carol David Emma Frank Grace Henry Isabel Jack Karen Leo Maria Nathan Olivia Peter Quentin Rachel Sam
    Tina Victor Wendy Alice Brian Clara Daniel Ellen Felix Gloria Harold Irene James Kate Lucas Martha Nora Oscar
    Paula Robert Sarah Thomas Ursula Vincent William Amanda Andrew Barbara Charles Charlotte Christopher Diana
    Dorothy Edward Elizabeth Eric Fiona George Hannah Ian Jennifer Jessica John Joseph Julia Kevin Laura Linda
    Margaret Mark Matthew Megan Michael Michelle Nancy Nicholas Patricia Patrick Paul Philip Rebecca Richard Rosa
    Ruth Simon Sophie Stephen Susan Teresa Timothy Tony Walter Aisha Omar Priya Ravi Carlos Elena Hiroshi Ingrid
    Mohammed Yuki Chloe Dylan Ethan Zoe"""
)
LAST_NAMES = words(
    """Adams Baker Bell Bennett Brooks Brown Campbell Carter Clark Collins Cook Cooper Cox Davis Edwards Evans Fisher
    Foster Garcia Gray Green Hall Harris Hill Howard Hughes Jackson Jenkins Johnson Jones Kelly King Lee Lewis Long
    Lopez Martin Martinez Miller Mitchell Moore Morgan Morris Murphy Nelson Parker Patel Perry Peterson Phillips
    Porter Price Reed Richardson Roberts Rogers Ross Russell Sanders Scott Shaw Simmons Singh Smith Stewart Sullivan
    Taylor Thompson Turner Walker Ward Watson White Williams Wilson Wood Wright Young"""
)
CITIES = words(
    """London Paris Berlin Madrid Rome Vienna Boston Chicago Seattle Denver Houston Dallas Phoenix Toronto Montreal
    Dublin Edinburgh Manchester Bristol Oxford Cambridge Liverpool Sydney Melbourne Auckland Tokyo Singapore Cairo
    Athens Lisbon Oslo Stockholm Copenhagen Amsterdam Brussels Prague Warsaw Budapest Mumbai Bangkok Moscow
    Philadelphia Portland Atlanta Miami Nashville Memphis Baltimore Detroit Milwaukee"""
)
COUNTRIES = words(
    """Canada Mexico Brazil Argentina Spain France Germany Italy Greece Turkey Egypt Kenya India China Japan Australia
    Ireland Scotland Norway Sweden Finland Poland Portugal Switzerland Austria Thailand Vietnam Indonesia"""
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
LETTERS = list("BCDEFGHJKLMNOPQRSTUVWXYZ")
FOODS = listed(
    """bread|fresh fish|roast chicken|apple pie|vegetable soup|rice and beans|scrambled eggs|orange juice|
    hot chocolate|black coffee|green tea|ice cream|tomato salad|pancakes|cheese|strawberries|baked potatoes|noodles|
    cheese sandwiches|pizza|mushroom pasta|chocolate cake|toast and jam|porridge with honey|lemonade|peanut butter|
    yogurt|grilled vegetables"""
)
THINGS = listed(
    """phone|umbrella|bicycle|jacket|wallet|camera|laptop|guitar|notebook|suitcase|blanket|lamp|key|ticket|map|hammer|
    kettle|mirror|pillow|ladder|basket|clock|chair|envelope|torch|radio|painting|vase|backpack|passport|watch|scarf|
    charger|screwdriver|printer|kitchen table|garden hose|shopping bag|coffee cup|birthday card|old photograph|
    blue folder"""
)
PLACES = listed(
    """the station|the airport|the library|the hospital|the museum|the bakery|the park|the post office|
    the swimming pool|the supermarket|the theatre|the bank|the river|the bridge|the beach|the town hall|the market|
    the university|the bus stop|the restaurant|the harbour|the cinema|the garden|the office|the school|
    the corner shop|the pharmacy|the stadium"""
)
ROOMS = listed(
    "kitchen|living room|bedroom|bathroom|garage|attic|basement|hallway|dining room|garden shed|study|laundry room"
)
ADJECTIVES = listed(
    """quiet|strange|beautiful|difficult|simple|expensive|cheap|broken|heavy|comfortable|dangerous|funny|famous|
    ordinary|wonderful|terrible|useful|important|delicious|boring|bright|ancient|modern|lovely|enormous|tiny|
    fragile|noisy"""
)
FEELINGS = listed(
    """happy|tired|nervous|excited|angry|surprised|worried|proud|lonely|grateful|hungry|thirsty|relieved|confused|
    disappointed|cheerful|sleepy|curious|calm|jealous|embarrassed|hopeful"""
)
RELATIVES = listed(
    """my mother|my father|my sister|my brother|our neighbour|my grandmother|my uncle|his wife|her husband|
    their daughter|my cousin|our teacher|my boss|the doctor|the driver|the manager|my best friend|an old friend|
    the nurse|the landlord|the waiter|his secretary|my roommate|the plumber|her grandson"""
)
ACTIONS = listed(
    """wash the dishes|walk the dog|water the plants|call the office|buy some milk|read a book|clean the windows|
    write a letter|fix the roof|paint the fence|cook dinner|learn French|play the piano|go swimming|ride a horse|
    bake a cake|take a nap|feed the cat|pay the rent|pack the bags|change the batteries|sweep the floor|
    plan the trip|climb the hill|study for the exam|clear the table|open the window|close the curtains|
    send the package|answer the phone|book a table|catch the train|visit the museum|watch a film|finish the report|
    mow the lawn|check the oil|sign the form|return the books|move the piano"""
)
PAST = listed(
    """lost the keys|found a wallet|missed the bus|broke a glass|won the race|sold the house|forgot my birthday|
    saw a fox in the garden|bought a new car|burned the toast|planted a tree|wrote a long letter|left early|
    fell asleep on the sofa|painted the door red|caught a cold|told a good joke|cut the grass|locked the door|
    spilled the coffee|fixed the radio|borrowed my ladder|cancelled the meeting|moved to another city|
    ran all the way home|took the wrong train|passed the exam|heard a strange noise|made breakfast for everyone|
    lent me some money|opened a small shop|learned to drive"""
)
WHENS = listed(
    """tomorrow|tonight|next week|this evening|in the morning|after lunch|before dinner|on the weekend|at midnight|
    later|next month|this afternoon|right now|as soon as possible|in a few minutes|after work|
    before the rain starts|one of these days|early tomorrow|at the end of the month|during the holidays|
    when you have time"""
)
PASTS = listed(
    """yesterday|last night|last week|this morning|an hour ago|two days ago|last summer|on the way home|
    a long time ago|before breakfast|after the party|at the weekend|in the middle of the night|during the storm|
    last winter|while I was away"""
)
WEATHERS = listed(
    """sunny|cloudy|windy|rainy|foggy|very cold|rather warm|stormy|mild|freezing|unusually hot|damp and grey"""
)
JOBS = listed(
    """teacher|nurse|carpenter|lawyer|farmer|journalist|baker|pilot|engineer|gardener|musician|dentist|plumber|
    photographer|librarian|mechanic|firefighter|waiter|electrician|painter|scientist|tailor|bus driver|
    police officer"""
)
COLOURS = listed("red|blue|green|yellow|white|black|brown|grey|orange|purple|pink|silver|golden|dark blue|pale green")
ANIMALS = listed(
    "dog|cat|horse|rabbit|parrot|fox|cow|sheep|goat|duck|owl|squirrel|turtle|hedgehog|pony|kitten|puppy|goose|deer"
)
UNITS = listed(
    """kilometers|miles|meters|kilograms|pounds|litres|degrees|percent|minutes|hours|days|weeks|people|pages|steps|
    tickets|dollars|students|chairs|boxes|inches|gallons|seconds|kilometers per hour|square meters"""
)
TITLES = listed("Doctor|Mister|Missus|Professor|Captain|Sergeant|Judge|Senator|Uncle|Aunt")
LANGUAGES = listed(
    """English|French|German|Spanish|Italian|Japanese|Chinese|Arabic|Portuguese|Russian|Polish|Swedish|Hindi"""
)
SUBJECTS = listed(
    """history|music|science|geography|mathematics|cooking|gardening|football|politics|poetry|chess|photography"""
)
OPENERS = listed(
    """I think|I am sure|Of course|I heard that|She said|He told me that|Everyone knows that|Maybe|I hope|
    It seems that|To be honest,|As far as I know,|In my opinion,|Believe me,|I suppose|I was told that|You know,|
    By the way,|Actually,"""
)


def any_number(rng: random.Random) -> int:
    """A number of one to seven digits, the short ones as likely as the long."""
    digits = rng.randint(1, 7)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def spoken_number(rng: random.Random) -> str:
    return number_words(any_number(rng), rng.choice((" ", " and ")))


def spoken_date(rng: random.Random) -> str:
    month, day = rng.choice(MONTHS), ordinal_words(rng.randint(1, 31))
    return rng.choice((f"{month} {day}", f"the {day} of {month}", f"{rng.choice(DAYS)}, {month} {day}"))


def spoken_time(rng: random.Random) -> str:
    hour, minute = number_words(rng.randint(1, 12)), rng.randint(1, 29)
    past = f"{rng.choice(('quarter', 'half', 'ten', 'twenty', number_words(minute) + ' minutes'))} past {hour}"
    to = f"{rng.choice(('quarter', 'five', 'twenty'))} to {hour}"
    digital = f"{hour} {rng.choice(('fifteen', 'thirty', 'forty-five', 'oh five', number_words(minute + 30)))}"
    part = rng.choice((" in the morning", " in the afternoon", " at night", "", "", ""))
    return rng.choice((f"{hour} o'clock", past, to, digital)) + part


def plural(count: int, one: str, many: str) -> str:
    return f"{number_words(count)} {one if count == 1 else many}"


def spoken_money(rng: random.Random) -> str:
    one, many, cent = rng.choice(
        (("dollar", "dollars", "cents"), ("pound", "pounds", "pence"), ("euro", "euros", "cents"))
    )
    whole = plural(max(1, any_number(rng) % 10 ** rng.randint(1, 5)), one, many)
    return f"{whole} and {number_words(rng.randint(2, 99))} {cent}" if rng.random() < 0.4 else whole


def spoken_phone(rng: random.Random) -> str:
    groups = rng.choice(((3, 4), (3, 3, 4), (5, 6), (2, 2, 2, 2)))
    return ", ".join(digits_words("".join(rng.choice("0123456789") for _ in range(size))) for size in groups)


# A list, not any sequence: a bare string would be one too, and fill in its letters.
Filler = list[str] | Callable[[random.Random], str]
FILLERS: Mapping[str, Filler] = {
    "person": FIRST_NAMES,
    "last": LAST_NAMES,
    "full": lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
    "title": TITLES,
    "city": CITIES,
    "country": COUNTRIES,
    "day": DAYS,
    "month": MONTHS,
    "food": FOODS,
    "thing": THINGS,
    "place": PLACES,
    "room": ROOMS,
    "adj": ADJECTIVES,
    "feeling": FEELINGS,
    "someone": RELATIVES,
    "do": ACTIONS,
    "did": PAST,
    "when": WHENS,
    "ago": PASTS,
    "weather": WEATHERS,
    "job": JOBS,
    "colour": COLOURS,
    "animal": ANIMALS,
    "units": UNITS,
    "language": LANGUAGES,
    "subject": SUBJECTS,
    "opener": OPENERS,
    "n": spoken_number,
    "few": lambda rng: number_words(rng.randint(2, 99)),
    "nth": lambda rng: ordinal_words(rng.randint(1, 120)),
    "year": lambda rng: year_words(rng.randint(1100, 2060)),
    "date": spoken_date,
    "time": spoken_time,
    "money": spoken_money,
    "phone": spoken_phone,
    "decimal": lambda rng: f"{number_words(rng.randint(0, 99))} point {digits_words(str(rng.randint(1, 99)))}",
    "letters": lambda rng: ", ".join(rng.sample(LETTERS, rng.randint(2, 5))),
}

EVERYDAY = """{opener} {someone} {did} {ago}.
{opener} we should {do} {when}.
{opener} {person} will {do} {when}.
{someone} {did} {ago}.
{someone} and {person} {did} {ago}.
{person} {did} {ago}, and nobody noticed.
{someone} wants to {do} {when}.
{person} has to {do} before going to {place}.
I need to {do} {when}.
I was too {feeling} to {do}.
{person} looked {feeling} when {someone} {did}.
We had {food} for lunch at {place}.
I would like {food} and {food}, please.
There is no {food} left in the {room}.
The {thing} in the {room} is {adj}.
Please put the {colour} {thing} in the {room}.
I left my {thing} at {place} {ago}.
My {thing} is {colour}, but yours is {colour}.
It was {weather} in {city} {ago}.
It will be {weather} {when}, so take your {thing}.
The {colour} {animal} was sleeping in the {room}.
A {animal} and a {animal} were playing near {place}.
{person} works as a {job} in {city}.
{someone} is a {job}, and {person} is a {job}.
We walked from {place} to {place} in {few} minutes.
Turn left at {place}, then go straight on to {place}.
The road to {place} is closed until {day}.
{person} speaks {language} and a little {language}.
Let's meet at {place} at {time}.
The train to {city} leaves at {time}.
Don't forget to {do} {when}.
If it is {weather} {when}, we will {do}.
When {someone} {did}, everyone was {feeling}.
I am {feeling} because {person} {did}.
You can {do} while I {do}.
It is {adj}, but I like it anyway.
This {thing} is too {adj} for me.
{person} gave me a {adj} {thing} for my birthday.
The {job} asked {someone} to {do}.
I can't {do} without my {thing}.
Nobody in {city} could {do} like {person}.
We are going to {country} {when} with {someone}.
{person} grew up in {country} and moved to {city}.
The {adj} {thing} belongs to {someone}.
Thank you for the {food} and the {adj} {thing}.
After {time} the {room} gets {adj} and quiet.
They talked about {subject} until {time}.
I have always been interested in {subject} and {subject}.
The {animal} followed {person} all the way to {place}.
{person} said, "I will {do} {when}."
First we {did}, then we {did}.
Sorry, I have to {do} first.
{someone} never has time to {do}.
The shop near {place} sells {food} and {food}.
Put on something {colour}; we are going to {place}.
You should {do}, not {do}!
I promise to {do} {when}.
What a {adj} {thing}!
How {adj} the {room} looks {when}!"""
QUESTIONS = """Can you {do} {when}?
Could you please {do}?
Where did you put the {colour} {thing}?
Why is {someone} so {feeling}?
What time does {place} open on {day}?
Did {person} {do} {ago}?
Have you ever been to {country}?
Who {did} {ago}?
Would you like {food} or {food}?
How far is it from {city} to {city}?
Is there a {thing} in the {room}?
When will {someone} {do}?
Do you want to {do} with {person}?
Are you {feeling} about {subject}?
Shall we {do} {when}?
Why don't you {do}, {person}?
How much is this {adj} {thing}?
Does {person} still live near {place}?
Which is better, the {colour} {thing} or the {colour} one?
Is it going to be {weather} in {city} {when}?
Excuse me, is this the way to {place}?
{person}, can you hear me?
You are from {country}, aren't you?
What did {someone} say about the {thing}?
How long does it take to {do}?
May I borrow your {thing} until {day}?
Do you speak {language}?
What is your favourite {colour} {thing}?
Have you seen my {thing} anywhere?"""
NUMBERS = """{n}
{n}.
The number is {n}.
There are {n} {units} in all.
It is about {n} {units} from {city} to {city}.
We counted {n} {units} {ago}.
The answer is {decimal}.
Chapter {few}, page {few}.
Room {few} is on the {nth} floor.
She finished in {nth} place out of {few}.
The temperature was {few} degrees {ago}.
About {few} percent of the {units} were lost.
{few} plus {few} is not {few}.
My phone number is {phone}.
Please call {phone}.
Dial {phone} and ask for {person}.
It weighs {decimal} kilograms.
He is {few} years old, and she is {few}.
The code is {phone}.
{few} divided by {few} makes {decimal}.
Bus number {few} stops at {place}.
More than {n} people live there.
Take the {nth} exit and drive {few} {units}."""
DATES = """The meeting is on {date}.
{date}
She was born on {date}, {year}.
It happened in {year}.
The war ended in {year}.
My birthday is on {date}.
We moved to {city} in {month}, {year}.
The shop will be closed from {date} to {date}.
Between {year} and {year} the town grew quickly.
Today is {date}.
See you on {day}!
In the summer of {year} we {did}.
The library was built in {year} and restored in {year}.
The letter is dated {date}, {year}.
{someone} arrives on {date} at {time}."""
TIMES = """It is {time}.
{time}.
I wake up at {time} on {day}.
The film starts at {time} and ends at {time}.
Is it {time} already?
The next bus leaves at {time}.
Set an alarm for {time}, please.
Dinner will be ready at {time}.
Meet me at {time}, not at {time}."""
MONEY = """That will be {money}, please.
It costs {money}.
{money}.
I paid {money} for this {thing}.
The rent is {money} a month.
Can you lend me {money} until {day}?
The {thing} costs {money}, but the {thing} is only {money}.
She saved {money} in {few} weeks.
A ticket to {city} is {money}."""
NAMES = """My name is {full}.
This is {full} speaking.
{full}
{person} {last} and {full}
{title} {last} will see you now.
{title} {last} lives in {city}.
Is {title} {last} at home?
I would like to speak to {title} {last}.
{full} was born in {country}.
Have you met {person}?
Dear {title} {last},
{person}, this is {person}.
{person}!
{city}, {country}
Welcome to {city}!
It is spelled {letters}.
The letters are {letters}.
Please read row {letters} again."""
GREETINGS = """Hello, {person}!
Hi {person}, how are you?
Good morning, {person}.
Good afternoon, {title} {last}.
Good evening, everyone.
Good night, {person}, sleep well.
Goodbye, {person}, see you {when}.
Thank you very much, {person}.
Thanks for your help, {title} {last}.
Nice to meet you, {person}.
Happy birthday, {person}!
Welcome home, {person}.
Congratulations, {person}, you did it!
I am sorry, {person}.
Excuse me, {title} {last}.
Please come in, {person}, and sit down.
Have a nice {day}, {person}!
Take care, {person}.
Yes, {person}, of course.
No, {person}, not {when}.
Wait for me, {person}!
Don't worry, {person}.
Be careful, {person}!
Merry Christmas and a happy new year, {person}!"""
PHRASES = """a {adj} {thing}
the {colour} {thing}
{adj} and {adj}
my {adj} {thing}
{food} and {food}
in the {room}
near {place}
{weather} in {city}
not so {adj}
{when}
{ago}
{do}
the {job} and the {animal}
a {colour} {animal}
{feeling}, but {feeling}
from {city} to {city}
very {adj}
so {feeling}!
{day} morning
{day} night, {time}"""
ONE_WORD = listed(
    """Yes|No|Maybe|Hello|Hi|Goodbye|Bye|Thanks|Please|Sorry|Okay|Sure|Right|Wrong|Stop|Wait|Go|Come|Look|Listen|Help|
    Now|Later|Never|Always|Today|Tomorrow|Yesterday|Here|There|Why|What|Who|When|Where|How|Really|Exactly|Perfect|
    Great|Good|Fine|Welcome|Careful|Quickly|Slowly|Again|Enough|Nothing|Everything|Nobody|Everyone|Ready|Done|True|
    False|Correct|Absolutely|Certainly|Probably|Congratulations|Testing|Morning|Evening|Cheers|Indeed|Hooray|
    Alright|Nope|Yeah|Well"""
)

TEMPLATES = (
    (EVERYDAY, 34_000),
    (QUESTIONS, 9_000),
    (NUMBERS, 7_000),
    (DATES, 4_000),
    (TIMES, 2_500),
    (MONEY, 3_000),
    (NAMES, 4_000),
    (GREETINGS, 1_500),
    (PHRASES, 5_000),
)


def fill(template: str, rng: random.Random) -> str:
    """The template with every slot filled; starts with a capital if the template is a sentence."""

    def choose(match: re.Match[str]) -> str:
        filler = FILLERS[match[1]]
        return filler(rng) if callable(filler) else rng.choice(filler)

    text = re.sub(r"\{(\w+)\}", choose, template)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:] if template[-1] in ".?!," else text


def fill_all(templates: str, count: int, rng: random.Random) -> Iterator[str]:
    """`count` fillings, templates taking turns; repeated ones are the caller's to drop."""
    choices = templates.splitlines()
    return (fill(choices[turn % len(choices)], rng) for turn in range(count))


def template_sentences(rng: random.Random) -> Iterator[str]:
    for templates, count in TEMPLATES:
        yield from filter(is_plain, fill_all(templates, count, rng))
    for word in ONE_WORD:
        yield from (word, f"{word}.", f"{word}!", f"{word}?")


# ---------------------------------------------------------------------------------------------------------------------
# Held out: never trained on, for measuring how well people would understand the voice.

HELDOUT = """The neighbours are having a barbecue in their back garden tonight.
I think we took the wrong turn after the second roundabout.
Could you turn the music down while I make this call?
She packed two sandwiches and a flask of tea for the journey.
My brother forgot his umbrella, and of course it started raining.
The lift is out of order, so please use the stairs.
He always reads the last page of a novel first.
We ran out of coffee just before the guests arrived.
Is there anything good on television this evening?
The baby slept through the fireworks without waking once.
I can never remember where I parked the car.
They painted the front door a cheerful shade of yellow.
Would you mind watching my bag for a moment?
The soup needs a little more salt and pepper.
Our flight was delayed because of thick fog.
Grandma taught me how to knit a pair of socks.
The children built a castle out of old cardboard boxes.
It took us three hours to put that shelf together.
He waved from the platform until the train disappeared.
I prefer walking to work when the weather is dry.
The dentist said I should floss more often.
Somebody left the fridge door open all night.
We planted tomatoes, beans and a few herbs on the balcony.
She has been learning the violin since she was seven.
The cat knocked a glass off the table again.
You can borrow my jacket if you feel cold.
There was a long queue outside the new bakery.
I would rather stay at home than go dancing.
The washing machine makes a funny noise when it spins.
His grandfather repaired clocks in a tiny workshop.
Let me know when you get home safely.
We spent the whole afternoon looking for the dog's lead.
The teacher asked everyone to speak a little louder.
I burned my tongue on the hot chocolate.
How many eggs do we need for this recipe?
The bridge was closed after the heavy storms.
She laughed so hard that she started to cry.
My phone battery died in the middle of our conversation.
They offered him a better job in another city.
The roses in front of the house smell wonderful.
Please take your shoes off before you come in.
I haven't seen my old school friends for years.
The lake was so clear that we could see the bottom.
He carried the heavy boxes up four flights of stairs.
Did you remember to lock the back door?
The film was much funnier than the book.
A strong wind blew the laundry off the line.
We should leave early to avoid the traffic.
The doctor told her to rest for a few days.
I found an old letter hidden inside the piano.
Their new puppy chews everything it can reach.
The museum is free on the first Sunday of the month.
She wrote down the address on the back of her hand.
What did you think of the speech last night?
The kettle is boiling, so shall I make some tea?
He missed the last bus and had to walk home.
I need a new pair of glasses for reading.
The snow melted as quickly as it had come.
Nobody expected the smallest team to win the cup.
We watched the sun go down behind the hills.
The plumber will be here before noon on Thursday.
My sister collects postcards from all over the world.
Can I have the recipe for this delicious cake?
The streetlight outside my window keeps me awake.
She speaks so softly that I can hardly hear her.
The farmer sold his apples at the side of the road.
It was the hottest summer that anyone could remember.
I promised to help my aunt move house on Saturday.
The waiter brought us the wrong order twice.
He whistles an old tune while he shaves.
The library smells of dust and old paper.
You look tired; did you sleep badly again?
We have to return these books by Friday.
The birds start singing long before the sun is up.
She cut her finger while slicing an onion.
Why don't we take the boat across to the island?
The carpet in the hall needs a good clean.
He apologised for being late and ordered a drink.
I like the smell of rain on warm pavement.
The twins are so alike that even their teacher mixes them up.
There is a spare key under the flower pot.
Our team played well but lost in the final minute.
The train was so crowded that we stood all the way.
Would you prefer the window seat or the aisle?
She keeps a torch beside her bed in case of a power cut.
The shopkeeper wrapped the gift in bright blue paper.
I can't find the other half of this puzzle.
The old man fed the pigeons every morning before breakfast.
We heard footsteps on the roof during the night.
He has a good memory for faces but not for names.
The milk has gone sour, so don't drink it.
She waited an hour in the cold for a taxi.
Somewhere in the distance a church bell was ringing.
The jumper shrank when I washed it too hot.
I asked for directions, but nobody knew the street.
They grow their own potatoes behind the garage.
The meeting lasted twice as long as planned.
Have you tried switching it off and on again?
My grandfather could fix almost anything with a piece of wire.
The path through the forest was covered with leaves.
She bought a ticket but left it on the counter.
We played cards by candlelight until the power came back.
The ice on the pond is too thin for skating.
I'll call you back as soon as I finish eating.
The new manager seems friendly and surprisingly young.
He spilled paint all over his best trousers.
The view from the tower is worth the climb.
Do you know whose bicycle is leaning against our fence?
The nurse brought him another pillow and a blanket.
We bought fresh bread and cheese for the picnic.
She was the first person in her family to study medicine.
The garden looks lovely now that the tulips are out.
I keep my grandmother's ring in a small wooden box.
The taxi driver knew every shortcut in the city.
They named the kitten after a famous detective.
The radio said that the storm will pass by evening.
He practised his speech in front of the mirror.
Is it all right if I bring a friend along?
The sand was almost too hot to walk on.
We got lost in the market but found a lovely cafe.
My knees hurt whenever the weather changes.
The postman slipped on the icy steps this morning.
She always hums when she is nervous.
I wish we had brought a bigger tent.
The bathroom tap has been dripping for a week.
He gave up smoking when his daughter was born.
The castle on the hill is open to visitors in summer.
Could we have a table near the window, please?
The horse refused to jump over the last fence.
I don't understand a word of these instructions.
They danced in the kitchen while the pasta was cooking.
The shop on the corner repairs shoes and cuts keys.
She has two cats, a parrot and a very old tortoise.
We were just about to leave when the phone rang.
The concert was cancelled because the singer was ill.
He drew a map on the back of an envelope.
The water in the pool is colder than I expected.
You should have seen the look on his face!
The chairs are comfortable, but the desk is too low.
I usually have porridge with honey in the winter.
Our neighbour plays the trumpet late at night.
The stars look brighter when you are far from town.
She forgot the punch line in the middle of the joke.
There wasn't a single cloud in the sky all day.
The bakery sells out of rolls by nine o'clock.
We took turns pushing the car up the hill.
He planted an oak tree when he was a boy.
The wallpaper in the bedroom is starting to peel.
I have an appointment with the eye doctor at noon.
The boat rocked gently as we drifted past the harbour.
They met by chance in a crowded waiting room.
The rice is ready, but the fish needs longer.
She answered every question without hesitating.
My father still writes all his letters by hand.
The heater makes the room warm in a few minutes.
We could smell the sea long before we saw it.
He tripped over the cable and dropped the tray.
The old oak door creaks whenever somebody opens it.
I will think about it and tell you tomorrow.
The parcel arrived a week later than promised."""
HELDOUT_EXAMPLES = 90


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.casefold())


def heldout_key(text: str) -> str:
    """What makes two sentences the same test: their words, however written."""
    return " ".join(words_of(text))


def bucket(text: str) -> float:
    """A number in [0, 1) that depends on nothing but the words."""
    digest = hashlib.blake2b(heldout_key(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def in_heldout_bucket(text: str) -> bool:
    return bucket(text) < HELDOUT_SHARE


def suits_heldout(text: str) -> bool:
    """Whether an example sounds like someone talking, and is not trained on."""
    return bool(PERSONAL_OPENING.match(text)) and len(words_of(text)) in HELDOUT_WORDS and in_heldout_bucket(text)


# ---------------------------------------------------------------------------------------------------------------------
# The corpus.


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Sentences to train on, in no particular order, and sentences never to be trained on, the most everyday first."""

    training: list[str]
    heldout: list[str]


def unique(texts: Iterable[str]) -> list[str]:
    """First of each: same words, same closing mark of question or exclamation."""
    first: dict[tuple[str, str], str] = {}
    for text in texts:
        first.setdefault((heldout_key(text), text[-1] if text[-1] in "?!" else ""), text)
    return list(first.values())


def make_corpus(synsets: Sequence[Synset], seed: int = 0) -> TextCorpus:
    rng = random.Random(seed)
    examples = unique(wordnet_examples(synsets))
    everything = unique(
        [
            *template_sentences(rng),
            *examples,
            *wordnet_definitions(synsets, rng),
            *wordnet_phrases(synsets, rng, words=14_000, phrases=8_000),
        ]
    )
    natural = sorted((text for text in examples if suits_heldout(text)), key=bucket)
    heldout = unique([*HELDOUT.splitlines(), *natural[:HELDOUT_EXAMPLES]])
    forbidden = {heldout_key(text) for text in heldout}
    training = [text for text in everything if not in_heldout_bucket(text) and heldout_key(text) not in forbidden]
    rng.shuffle(training)
    return TextCorpus(training, heldout)


def read_sentences(path: Path) -> list[str]:
    """One sentence per line; a name that ends in .gz is decompressed."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()


def write_sentences(path: Path, sentences: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{sentence}\n" for sentence in sentences).encode()
    # Without a time stamp the same sentences are the same file.
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.text_corpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="training sentences; heldout.txt is put beside them")
    parser.add_argument("--wordnet", type=Path, default=WORDNET, help="folder with data.noun and its fellows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    corpus = make_corpus(read_synsets(options.wordnet), options.seed)
    write_sentences(options.out, corpus.training)
    write_sentences(options.out.parent / "heldout.txt", corpus.heldout)
    print(f"{len(corpus.training)} training sentences, {len(corpus.heldout)} held out")


if __name__ == "__main__":
    main()
