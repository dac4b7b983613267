"""Recognise texts in Latin letters that are not English, for models that speak English only.

The function words of a text decide. English with foreign names and phrases must never be rejected, so the
evidence has to be strong: a text of up to three words is not judged. Time is linear in the length of the text.
"""

import re
from collections import Counter

WORD = re.compile(r"[^\W\d_]{1,40}(?:['’][^\W\d_]{1,40})?")
MAX_WORDS = 5_000  # more do not change the result

# Function words and the commonest verbs that are neither English words nor parts of names.
STRONG = {
    "French": """
        je tu il elle nous vous ils elles les une et est sont était étaient suis êtes avons avez ont été être avoir
        que qui quoi où dans avec sur sous chez mais donc car si ne pas très aussi alors comme cette ces ses leur leurs
        mes tes votre notre nos vos cela ça ceci tout tous toute toutes bien merci bonjour bonsoir oui jamais toujours
        quand pourquoi parce encore peut peux veux veut fait faire va vais allez allons c'est j'ai n'est d'un d'une
        qu'il qu'elle l'on s'il plaît aujourd'hui demain hier deux trois entre depuis sans après avant quelle quel
        """,
    "German": """
        ich du er sie wir ihr und ist sind waren wird werden wurde habe haben hatte nicht kein keine
        ein eine einen einem einer eines dem dass daß auf für von zu zum zur bei nach aus über unter
        auch noch nur schon sehr wie wo wer warum wenn weil aber oder doch mein meine dein deine sein seine ihre ihren
        unser uns euch mich dich sich mir dir ihm ihn ihnen es das jetzt hier dort heute morgen gestern guten danke
        bitte ja nein kann können möchte muss müssen soll gibt geht machen zwischen durch gegen ohne
        """,
    "Spanish": """
        yo tú él ella nosotros ustedes ellos ellas los las una unos unas es son está están estoy estás era fue ser
        estar hay tiene tengo tienen que qué quién dónde cuándo cómo con sin sobre entre desde hasta pero porque
        muy más también este esta estos estas ese esa su sus mi mis tu tus nuestro nuestra lo le les se nos
        cuando donde como todo todos toda todas hola gracias buenos buenas días hoy mañana ayer sí puede puedo
        quiero hacer por para ya así
        """,
    "Italian": """
        io tu lui lei noi voi loro gli una uno è sono sei siamo siete era erano essere avere ho hai ha abbiamo hanno
        che chi cosa dove quando perché come con senza sopra sotto tra fra ma anche molto più non questo questa questi
        queste quello quella suo sua suoi mio mia tuo tua nostro nostra della dello degli delle dell' nel nella nelle
        nei alla allo agli alle dal dalla sul sulla ciao grazie buongiorno buonasera oggi domani ieri sì può posso
        voglio fare tutto tutti ogni c'è un'altra l'ho
        """,
    "Portuguese": """
        eu ele ela nós você vocês eles elas os uma uns umas é são está estão estou era foi ser estar há tem tenho têm
        que quem onde quando como com sem sobre entre desde até mas porque muito mais também este esta esse essa isso
        seu sua seus suas meu minha nosso nossa não sim ao aos à às pelo pela no na nos nas num numa do dos das
        olá obrigado obrigada bom boa dia hoje amanhã ontem pode posso quero fazer todo todos já
        """,
    "Dutch": """
        ik jij hij zij wij jullie het een en zijn ben bent waren wordt worden werd heb hebt heeft hebben had niet geen
        dat deze dit die voor met naar uit bij tot als maar ook nog al zeer heel waar wie wat waarom hoe wanneer omdat
        mijn jouw haar ons onze hun mij jou hem zich hallo dank goedemorgen vandaag morgen gisteren ja nee kan kunnen
        wil moet moeten gaat gaan doen tussen zonder tegen
        """,
    "Swedish": """
        jag du han hon vi ni och är var inte ett som på av till med för från om men eller också mycket den det där här
        hur vad vem varför när min mitt din ditt sin vår dem mig dig sig honom henne kan ska skulle har hade blir blev
        hej tack idag imorgon igår
        """,
    "Polish": """
        ja ty ona ono my wy oni się nie jest są był była było być mam masz mamy że który która które gdzie kiedy
        dlaczego jak ale albo oraz dla przez przy pod nad bez już jeszcze bardzo tylko tak ten ta te tego tej mój moja
        twój jego jej ich dzień dobry dziękuję proszę dzisiaj jutro wczoraj
        """,
}
# Function words that also occur in English or in names. They count only in a text that has enough words of STRONG.
WEAK = {
    "French": "le la de des du un en au aux ce son sa ma ta lui on par pour plus a l d",
    "German": "der die den des im am an in so bin war hat will man was mit um",
    "Spanish": "el la de del un en y o al no me a",
    "Italian": "il la le lo di da del un in e o al no si i a",
    "Portuguese": "o a as de da em um e se me por para no do",
    "Dutch": "de van in is was of om op aan te er we ze je me",
    "Swedish": "en i är de så att",
    "Polish": "i w z na do to co po za od o a",
}
ENGLISH = frozenset(
    """
    the and of to is that it with for this you are be not they at his her she he from by have has had were but
    or your which their there been would can could said what when who how why my our out up into than then them
    these some its i'm it's don't can't won't isn't i'll we're you're that's didn't doesn't i've he's she's
    let's yes if all i do does did about after before because please thank thanks should where will just like
    very
    """.split()  # noqa: SIM905 - as a list it would take a page
)
ACCENTS = re.compile("[àâãäåçèéêëìíîïñòóôõöøùúûüýæœßąćęłńśźż]")
MIN_WORDS = 4  # "pas de deux" is English
MIN_STRONG, MIN_EVIDENCE = 2, 3  # numbers of different words: of STRONG, and of STRONG and WEAK together
MIN_SHARE = 0.33  # fraction of all words
MAX_ENGLISH = 0.25  # English function words per word of evidence


def foreign_language(text: str) -> str | None:
    """Return the name of the language of a text that is not English; None for English and in doubt."""
    words = [match[0].replace("’", "'") for match, _ in zip(WORD.finditer(text), range(MAX_WORDS), strict=False)]
    if len(words) < MIN_WORDS:
        return None
    counts = Counter(map(str.lower, words))
    # Capitalized words with accents are mostly names.
    accented = 0 if text.isascii() else sum(bool(ACCENTS.search(word)) and word[0].islower() for word in words)
    english = sum(count for word, count in counts.items() if word in ENGLISH)
    if english > MAX_ENGLISH * (len(words) + accented):
        return None  # no language can have enough evidence
    scores = {language: _evidence(counts, language, accented) for language in STRONG}
    best = max(scores, key=lambda language: scores[language])
    evidence = scores[best]
    return best if evidence >= MIN_SHARE * len(words) and english <= MAX_ENGLISH * evidence > 0 else None


def _evidence(counts: Counter[str], language: str, accented: int) -> int:
    """Return the number of words of a text that indicate a language; 0 if too few different ones occur."""
    strong = _STRONG_WORDS[language] & counts.keys()
    weak = _WEAK_WORDS[language] & counts.keys()
    if len(strong) < MIN_STRONG or len(strong) + len(weak) + bool(accented) < MIN_EVIDENCE:
        return 0
    unlisted = max(0, accented - sum(counts[word] for word in strong if ACCENTS.search(word)))
    return sum(counts[word] for word in strong | weak) + unlisted


_STRONG_WORDS = {language: frozenset(words.split()) - ENGLISH for language, words in STRONG.items()}
_WEAK_WORDS = {language: frozenset(words.split()) - ENGLISH for language, words in WEAK.items()}
