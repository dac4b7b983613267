import pytest

from shoal.speech import SpeechRequest
from shoal.text.normalize.letter_names import NAMES
from shoal.text.plan import TextRules, plan_text

NANO = TextRules(english_words=True, sentence_turns=True, chunk_bytes=90)
S1 = TextRules(phonemes=True)

LETTERS = [
    ("The FDA approved it.", "The eff-dee-ay approved it."),
    ("the CEO's plan, two DVDs", "the see-ee-oh's plan, two dee-vee-dee's"),
    ("macOS and iOS", "mac oh-ess and i oh-ess"),
    ("Plan B. It works.", "Plan bee. It works."),
    ("H2O, 3D and C++", "aitch two oh, three dee and see plus plus"),
    ("x - y = 3", "ex minus why equals three"),
    ("R&D, Q&A", "ar and dee, cue and ay"),
    ("a T-shirt, an X-ray", "a T-shirt, an X-ray"),
    ("Serial ABCDEFGH1", "Serial ABCDEFGH one"),
    ("the HTTP API and the USB-C port", "the aitch-tee-tee-pee ay-pee-i and the yoo-ess-bee-see port"),
    ("AMD and the IBM CEO", "ay-em-dee and the i-bee-em see-ee-oh"),
    ("OK, that is ok. They OK'd it.", "Okay, that is okay. They okay'd it."),
    ("Send the JSON by npm, not ssh.", "Send the jay-son by en-pee-em, not ess-ess-aitch."),
    ("Hmm, shh! The nth time, psst. in kg", "Hmm, shh! The nth time, psst. in kay-jee"),
    ("The WHO said so. WHO DID IT?", "The double-yoo-aitch-oh said so. WHO DID IT?"),
    ("a US-based TV-show, non-US, 4 cc", "a yoo-ess-based tee-vee-show, non-yoo-ess, four see-sees"),
    ("WXYZTR", "double-yoo-ex-why-zee-tee-ar"),
]
INITIALS = [
    ("John F. Kennedy spoke.", "John eff Kennedy spoke."),
    ("J. R. R. Tolkien, by A. A. Milne", "jay-ar-ar Tolkien, by ay-ay Milne"),
    ("vitamin D. Sunlight helps.", "vitamin dee. Sunlight helps."),
    ("See Appendix B. Figures follow.", "See Appendix bee. Figures follow."),
]
WORDS = [
    ("At 5 PM I left at 9 AM EST.", "At five pee-em I left at nine ay-em ee-ess-tee."),
    ("In the USA I love pie.", "In the yoo-ess-ay I love pie."),
    ("The FBI came. An API fails.", "The eff-bee-i came. An ay-pee-i fails."),
    ("A US judge. A TV show. ABC news.", "A yoo-ess judge. A tee-vee show. ay-bee-see news."),
    ("I am. A man and I.", "I am. A man and I."),
    ("Once Upon A Time, an A student", "Once Upon A Time, an ay student"),
    ("Vitamin A and Appendix A", "Vitamin ay and Appendix ay"),
]


@pytest.mark.parametrize(("written", "read"), LETTERS)
def test_nano_reads_letters_by_their_names(written: str, read: str) -> None:
    assert plan_text(SpeechRequest(written), NANO).text == read


@pytest.mark.parametrize(("written", "read"), INITIALS)
def test_the_dot_of_an_initial_ends_no_sentence(written: str, read: str) -> None:
    plan = plan_text(SpeechRequest(written), NANO)
    assert plan.text == read
    assert len(plan.turns) == read.rstrip(".").count(".") + 1


@pytest.mark.parametrize(("written", "read"), WORDS)
def test_the_article_and_the_pronoun_stay_words(written: str, read: str) -> None:
    assert plan_text(SpeechRequest(written), NANO).text == read


def test_readings_with_names_of_letters_are_read_as_they_are() -> None:
    for _, read in (*LETTERS, *INITIALS, *WORDS):
        assert plan_text(SpeechRequest(read), NANO).text == read


def test_every_letter_has_a_name_of_its_own() -> None:
    assert sorted(NAMES) == list("abcdefghijklmnopqrstuvwxyz")
    assert len(set(NAMES.values())) == 26


def test_models_that_read_numbers_themselves_get_letters_as_written() -> None:
    assert plan_text(SpeechRequest("The FDA said so.", language="en"), S1).text == "The F D A said so."
