"""Rules by which a model's texts are read and split, from its profile, family and vocabulary; no weights are read."""

from functools import cache

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.format.directory import ModelDescription, read_model_config, read_tokenizer
from shoal.checkpoint.format.profile import ModelProfile, default_profile, read_profile
from shoal.errors import CheckpointError
from shoal.model.family import Family
from shoal.text import phonemes
from shoal.text.plan import TextRules
from shoal.text.tokenizer import Tokenizer


def checkpoint_text_rules(checkpoint: ModelDescription) -> TextRules:
    family = checkpoint.model.config.family
    return _rules(checkpoint.profile, family, reads_phonemes=_reads_phonemes(family, checkpoint.tokenizer))


def model_text_rules(name: str) -> TextRules:
    """Return the rules of the model of that name. Raises ModelNotFound and CheckpointError."""
    if name.startswith(RANDOM_PREFIX):
        from shoal.checkpoint.random import random_family  # needs torch, which the rules of stored models do not

        family = random_family(name.removeprefix(RANDOM_PREFIX))
        return _rules(default_profile(family), family, reads_phonemes=family.phonemes)
    directory = find_directory(name)
    tokenizer = read_tokenizer(directory)
    family = read_model_config(directory, tokenizer).family
    return _rules(read_profile(directory, family), family, reads_phonemes=_reads_phonemes(family, tokenizer))


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


@cache  # built for every request otherwise
def _control_tokens(family: Family) -> frozenset[str]:
    return frozenset(family.special_tokens(codes=0))


def _reads_phonemes(family: Family, tokenizer: Tokenizer) -> bool:
    """Return whether the model was trained on phoneme tags and its vocabulary has them."""
    try:
        return family.phonemes and all(tokenizer.token_id(each) >= 0 for each in (phonemes.START, phonemes.END))
    except CheckpointError:
        return False
