"""Clean a text as in training, and validate it."""

import re

from shoal.errors import NothingToSpeak, TextError
from shoal.text.tokenizer import Tokenizer, check_unicode, without_speaker_tags

# Emoji that were removed from the training texts. The models have seen others.
TRAINING_EMOJI = "\U0001f600-\U0001f64f\U0001f300-\U0001f5ff\U0001f680-\U0001f6ff\U0001f1e0-\U0001f1ff"

# These characters have no sound, and inside a word they change its tokens. Tab and line ends stay.
# Joiners (U+200C, U+200D) stay between letters, where Persian and the Indic scripts spell with them.
CONTROLS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f"
INVISIBLE = "\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe0e\ufe0f\ufeff\ufff9-\ufffb"
UNSPOKEN = re.compile(f"[{TRAINING_EMOJI}{CONTROLS}{INVISIBLE}]+")
LOOSE_JOINERS = re.compile(r"(?<!\w)[\u200c\u200d]+|[\u200c\u200d]+(?!\w)")
QUOTES = str.maketrans("‘’", "''")
COMMAS = re.compile(r",{2,}")

# Normalized prose is hardly longer than its text; a text of symbols alone can become 25 times as long.
MAX_GROWTH = 4


def clean_text(text: str) -> str:
    """Clean a text as in training. Idempotent.

    Unicode normalization forms are kept: S2's tokenizer composes by itself, and S1 was trained on both forms.
    """
    if not (text.isascii() and text.isprintable()):
        text = UNSPOKEN.sub("", text.translate(QUOTES))
        text = LOOSE_JOINERS.sub("", text)
    return (COMMAS.sub(",", text) if ",," in text else text).strip()


def check_text(text: str, *, max_characters: int, tokenizer: Tokenizer | None = None) -> None:
    """Raise TextError for text that is too long, empty, without a word, not Unicode, or contains a control token.

    Control tokens are only checked with a `tokenizer`. Check the cleaned text: removing an invisible character from
    `<|im_end|>` must not restore the token.
    """
    if len(text) > max_characters:
        raise TextError(
            f"the text has {len(text):,} characters, the limit is {max_characters:,}: split it into several requests"
        )
    if not text.strip():
        raise NothingToSpeak("the text is empty or has only characters that cannot be spoken")
    check_unicode(text)
    if not has_words(without_speaker_tags(text)):
        raise NothingToSpeak("the text has no letter or digit: there is nothing to speak")
    if tokenizer is not None:
        tokenizer.check_text(text)


def check_spoken_length(spoken: str, *, max_characters: int) -> None:
    """Raise TextError for a text within the limit whose normalized form is too long to speak."""
    limit = MAX_GROWTH * max_characters
    if len(spoken) > limit:
        raise TextError(
            f"the text has {len(spoken):,} characters with its numbers and symbols spelled out, the limit is "
            f"{limit:,}: split it into several requests"
        )


def has_words(text: str) -> bool:
    """Return whether there is a letter or digit: models invent words for punctuation alone."""
    return any(map(str.isalnum, text))
