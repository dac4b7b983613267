"""Sentences for the teachers to say: WordNet's definitions and examples, and templates of our own for everyday talk.

The text consists of plain spoken words, so that sound and letters agree with any teacher: no digits, no symbols, no
initials, no capitals to be spelled. The hash of a sentence decides whether it may be trained on, so a held-out sentence
stays held out when the corpus grows or changes its order or seed.

WordNet 3.0 (Debian `wordnet-base`) is Copyright 2006 by Princeton University, under the permissive WordNet licence:
use, copying, modification and distribution free of charge, with its notice kept. The rest is written here.

    python -m training.text_corpus --out build/corpus/sentences.txt
"""

from training.text_corpus.command import main
from training.text_corpus.corpus import TextCorpus, make_corpus, unique
from training.text_corpus.files import read_sentences, write_sentences
from training.text_corpus.fillers import FILLERS
from training.text_corpus.heldout import HELDOUT, HELDOUT_WORDS, heldout_key, in_heldout_bucket, words_of
from training.text_corpus.numbers import number_words, ordinal_words, year_words
from training.text_corpus.plain import MAX_CHARACTERS, is_plain, normalise
from training.text_corpus.templates import TEMPLATES, template_sentences
from training.text_corpus.wordnet import WORDNET, Synset, parse_synset, read_synsets

__all__ = [
    "FILLERS",
    "HELDOUT",
    "HELDOUT_WORDS",
    "MAX_CHARACTERS",
    "TEMPLATES",
    "WORDNET",
    "Synset",
    "TextCorpus",
    "heldout_key",
    "in_heldout_bucket",
    "is_plain",
    "main",
    "make_corpus",
    "normalise",
    "number_words",
    "ordinal_words",
    "parse_synset",
    "read_sentences",
    "read_synsets",
    "template_sentences",
    "unique",
    "words_of",
    "write_sentences",
    "year_words",
]
