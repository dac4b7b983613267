"""Texts in other languages are recognised; English with foreign names and phrases never is."""

import pytest

from shoal.errors import TextError
from shoal.speech import SpeechRequest
from shoal.text.foreign import foreign_language
from shoal.text.plan import TextRules, plan_text

NANO = TextRules(english_words=True, sentence_turns=True, chunk_bytes=90)
S2 = TextRules(phonemes=True, splits_dialogue=True)

FOREIGN = {
    "French": (
        "Bonjour, comment allez-vous ? Je suis très content de vous voir.",
        "Le président de la République a annoncé que les nouvelles mesures entreront en vigueur demain.",
        "Il n'y a pas de train avant midi, mais vous pouvez prendre le bus.",
        "C'est une belle journée et nous allons à la plage avec les enfants.",
        "Où est la gare, s'il vous plaît ?",
    ),
    "German": (
        "Guten Tag, wie geht es Ihnen?",
        "Der Zug nach Hamburg hat heute leider eine Verspätung von zwanzig Minuten.",
        "Ich habe keine Ahnung, wo mein Schlüssel ist.",
        "Das Wetter wird morgen besser, aber es bleibt kalt.",
        "Bitte schicken Sie mir die Rechnung bis zum Ende der Woche.",
    ),
    "Spanish": (
        "Hola, ¿cómo estás? Hoy es un buen día para salir.",
        "El gobierno ha anunciado que las nuevas medidas entrarán en vigor mañana.",
        "No sé dónde están las llaves de mi casa.",
        "Me gustaría reservar una mesa para dos personas, por favor.",
        "Los niños juegan en el parque con su perro.",
    ),
    "Italian": (
        "Buongiorno, come sta? Sono molto contento di vederla.",
        "Il treno per Roma è in ritardo di venti minuti, ma non c'è problema.",
        "Non so dove sono le chiavi della mia macchina.",
        "Questa sera andiamo a cena con gli amici di mio fratello.",
    ),
    "Portuguese": (
        "Olá, tudo bem? Eu não sei onde está a minha chave.",
        "O governo anunciou que as novas medidas entram em vigor amanhã.",
        "Você pode me ajudar com isso, por favor? Eu tenho muito trabalho.",
    ),
    "Dutch": (
        "Hallo, hoe gaat het met jullie? Ik ben blij dat je er bent.",
        "De trein naar Utrecht heeft vandaag twintig minuten vertraging, maar dat is geen probleem.",
        "Ik weet niet waar mijn sleutels zijn.",
    ),
    "Swedish": (
        "Hej, hur mår du? Jag har inte sett dig på länge.",
        "Tåget till Lund är försenat och vi ska vänta här.",
    ),
    "Polish": ("Dzień dobry, jak się pan ma? Nie wiem, gdzie jest mój klucz.", "Pociąg jest już bardzo spóźniony."),
}

ENGLISH = (
    "Maria de la Cruz.",
    "Oscar de la Renta and Charles de Gaulle",
    "Les Misérables opens at La Scala.",
    "Ludwig van Beethoven, Leonardo da Vinci, Vincent van Gogh.",
    "El Niño and La Niña change the weather of Los Angeles.",
    "She has a certain je ne sais quoi.",
    "Et tu, Brute?",
    "Je suis Charlie.",
    "Kennedy said: Ich bin ein Berliner.",
    "C'est la vie, as they say.",
    "The café served crème brûlée, piña colada and jalapeño fritters à la carte.",
    "Die Welt, Le Monde, El País and La Repubblica reported it.",
    "Rio de Janeiro, São Paulo, Las Vegas, Los Alamos, San José del Cabo",
    "Jean-Luc Picard, Gérard Depardieu, François Truffaut.",
    "Der Spiegel broke the news.",
    "Mercedes-Benz, Volkswagen, Škoda, Citroën.",
    "Mais oui, monsieur.",
    "Vive la France!",
    "Auf Wiedersehen, Pet is a television series.",
    "Hasta la vista, baby.",
    "Que sera, sera.",
    "Red hat, old bin, new den, die cast, man in war.",
    "No comment. Come on. Plus me. Fort sale.",
    "Sie and Er are pronouns of German; ich, du and wir are too.",
    "Rendezvous at the Champs-Élysées, near the Musée d'Orsay and the Place de la Concorde.",
    "Dos Equis, Casa del Mar, Villa d'Este, Palazzo della Ragione",
    "Yes.",
    "pas de deux",
    "Do it to me on a par.",
    "IBM, NASA, MIT, EST, UN, US, IT, AM, PM",
    "Version 2.0",
    "Wat Pho is in Bangkok, and Wat Arun is across the river.",
    "Het Loo Palace",
    "Con Edison, Ben Stein, Dan Brown, Kim Basinger, Hans Zimmer",
)


@pytest.mark.parametrize(("language", "text"), [(each, text) for each, texts in FOREIGN.items() for text in texts])
def test_a_text_in_another_language_is_recognised(language: str, text: str) -> None:
    assert foreign_language(text) == language
    assert foreign_language(text.upper()) in (language, None)


@pytest.mark.parametrize("text", ENGLISH)
def test_english_with_names_and_phrases_is_english(text: str) -> None:
    assert foreign_language(text) is None


def test_a_model_that_speaks_english_only_refuses_other_languages() -> None:
    text = "Guten Tag, wie geht es Ihnen?"
    message = "looks like German, and this model speaks English only.*normalize to en"
    with pytest.raises(TextError, match=message):
        plan_text(SpeechRequest(text), NANO)
    with pytest.raises(TextError, match=message):
        plan_text(SpeechRequest(f"<speak>{text}<break/></speak>"), NANO)
    assert plan_text(SpeechRequest(text, language="en"), NANO).turns
    assert plan_text(SpeechRequest(text, normalize=False), NANO).text == text
    assert plan_text(SpeechRequest(text), S2).text == text


def test_an_english_text_may_quote_a_sentence() -> None:
    quoted = (
        "He looked at me for a while. " * 3
        + "Je ne sais pas, mais vous avez une idée. "
        + "Then they were silent. " * 3
    )
    assert plan_text(SpeechRequest(quoted), NANO).turns


@pytest.mark.parametrize("piece", ["et ", "é", "e'", "je ne ", "l'", "a\n"])
def test_long_texts_are_judged_in_linear_time(piece: str) -> None:
    """Quadratic time would take minutes."""
    foreign_language(piece * (200_000 // len(piece)))
