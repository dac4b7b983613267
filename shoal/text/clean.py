"""What happens to a text before anything else: the cleaning the models were trained with, and the refusals."""

import re

from shoal.errors import TextError
from shoal.text.tokenizer import SPEAKER_TAG, Tokenizer, check_unicode

# Exactly the ranges that training removed; the models have seen the emoji outside them.
TRAINING_EMOJI = "\U0001f600-\U0001f64f\U0001f300-\U0001f5ff\U0001f680-\U0001f6ff\U0001f1e0-\U0001f1ff"

# Nothing here has a sound, and hidden characters inside a word change its tokens. Tab and line ends stay.
# Joiners (U+200C, U+200D) stay between letters, where Persian and the Indic scripts spell with them.
CONTROLS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f"
INVISIBLE = "\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe0e\ufe0f\ufeff\ufff9-\ufffb"
UNSPOKEN = re.compile(f"[{TRAINING_EMOJI}{CONTROLS}{INVISIBLE}]+")
LOOSE_JOINERS = re.compile(r"(?<!\w)[\u200c\u200d]+|[\u200c\u200d]+(?!\w)")
QUOTES = str.maketrans("‘’", "''")
COMMAS = re.compile(r",{2,}")

# Prose grows little when its numbers are written out; a text of signs alone grows 25 times, and so would its speech.
MAX_GROWTH = 4


def clean_text(text: str) -> str:
    """The text as training saw its texts. Applying it twice changes nothing.

    Unicode forms are left alone: S2's tokenizer composes by itself, and S1 was trained on both forms as they came.
    """
    text = UNSPOKEN.sub("", text.translate(QUOTES))
    text = LOOSE_JOINERS.sub("", text)
    return COMMAS.sub(",", text).strip()


def check_text(text: str, *, max_characters: int, tokenizer: Tokenizer | None = None) -> None:
    """Raises TextError for text that is too long, empty, without a word, not Unicode, or with a control token in it.

    Control tokens are known by their vocabulary, so only a given `tokenizer` finds them. Check the text after cleaning
    it: taking a hidden character out of `<|im_end|>` must not bring the token back.
    """
    if len(text) > max_characters:
        raise TextError(f"the text has {len(text):,} characters, the limit is {max_characters:,}: send it in pieces")
    if not text.strip():
        raise TextError("the text is empty, or of signs alone that nobody speaks")
    check_unicode(text)
    if not has_words(SPEAKER_TAG.sub("", text)):
        raise TextError("the text has no letter or digit in it, so there is nothing to speak")
    if tokenizer is not None:
        tokenizer.check_text(text)


def check_spoken_length(spoken: str, *, max_characters: int) -> None:
    """Raises TextError for a text within the limit whose numbers and signs, as words, are hours of speech."""
    limit = MAX_GROWTH * max_characters
    if len(spoken) > limit:
        raise TextError(
            f"the text has {len(spoken):,} characters with its numbers and signs written out, the limit is {limit:,}: "
            "send it in pieces"
        )


def has_words(text: str) -> bool:
    """A model asked to speak punctuation alone makes up its own words."""
    return any(character.isalnum() for character in text)
