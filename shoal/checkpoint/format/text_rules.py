"""Text rules of a model, from its profile, family and vocabulary, without reading its weights."""

from functools import cache, lru_cache

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.format.directory import ModelDescription, read_model_config, read_tokenizer
from shoal.checkpoint.format.profile import ModelProfile, default_profile, read_profile
from shoal.errors import CheckpointError
from shoal.model.family import Family
from shoal.text.phonemes import END, START
from shoal.text.plan import TextRules
from shoal.text.tokenizer import Tokenizer


def checkpoint_text_rules(checkpoint: ModelDescription) -> TextRules:
    family = checkpoint.model.config.family
    return _rules(
        checkpoint.profile, family, reads_phonemes=reads_phonemes(checkpoint.tokenizer, phonemes=family.phonemes)
    )


def model_text_rules(name: str) -> TextRules:
    """Return the rules of the model of that name. Raises ModelNotFound and CheckpointError."""
    if name.startswith(RANDOM_PREFIX):
        from shoal.checkpoint.random import random_family  # needs torch, which the rules of stored models do not

        family = random_family(name.removeprefix(RANDOM_PREFIX))
        return _rules(default_profile(family), family, reads_phonemes=family.phonemes)
    directory = find_directory(name)
    tokenizer = read_tokenizer(directory)
    family = read_model_config(directory, tokenizer).family
    return _rules(
        read_profile(directory, family), family, reads_phonemes=reads_phonemes(tokenizer, phonemes=family.phonemes)
    )


def _rules(profile: ModelProfile, family: Family, *, reads_phonemes: bool) -> TextRules:
    return TextRules(
        english_words=profile.normalize,
        phonemes=reads_phonemes,
        directions=family.directions,
        splits_dialogue=family.splits_dialogue,
        sentence_turns=profile.sentence_turns,
        chunk_bytes=profile.chunk_bytes,
        max_characters=profile.max_characters,
        control_tokens=_control_tokens(family),
    )


@cache  # used by every request
def _control_tokens(family: Family) -> frozenset[str]:
    return frozenset(family.special_tokens(codes=0))


@lru_cache(maxsize=8)  # used by every request
def reads_phonemes(tokenizer: Tokenizer, *, phonemes: bool) -> bool:
    """Return whether a vocabulary has the phoneme tags; `phonemes`: the model's family was trained on them."""
    try:
        return phonemes and all(tokenizer.token_id(each) >= 0 for each in (START, END))
    except CheckpointError:
        return False
