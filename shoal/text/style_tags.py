"""Style tags: `(excited)` of the S1 family and `[whisper]` of the S2 family, for models that do not know them."""

import re

# The markers that OpenAudio S1 documents. Other words in parentheses are part of the text.
S1_MARKERS = (
    "angry|sad|excited|surprised|satisfied|delighted|scared|worried|upset|nervous|frustrated|depressed"
    "|empathetic|embarrassed|disgusted|moved|proud|relaxed|grateful|confident|interested|curious|confused"
    "|joyful|disdainful|unhappy|anxious|hysterical|indifferent|impatient|guilty|scornful|panicked|furious"
    "|reluctant|keen|disapproving|negative|denying|astonished|serious|sarcastic|conciliative|comforting"
    "|sincere|sneering|hesitating|yielding|painful|awkward|amused|in a hurry tone|shouting|screaming"
    "|whispering|soft tone|laughing|chuckling|sobbing|crying loudly|sighing|panting|groaning|crowd laughing"
    "|background laughter|audience laughing|break|long-break|breath|laugh|cough|lip-smacking|sigh"
)
S1_TAG = re.compile(rf"(?<!\w)\((?:{S1_MARKERS})\)", re.IGNORECASE)
S2_TAG = re.compile(r"(?<!\\)\[[^\[\]\n]{1,64}\]")


def drop_style_tags(text: str) -> str:
    """Return the text without style tags: a model that was not trained with them would read them aloud."""
    text = S1_TAG.sub(" ", text) if "(" in text else text
    return S2_TAG.sub(" ", text) if "[" in text else text
