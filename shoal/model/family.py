"""Everything that differs between the model families and is not stored in a checkpoint.

Code outside this module reads the fields of `DualARConfig.family` and never compares family names. A new family is an
entry here and, if its files look different, a reader in `shoal.checkpoint`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from shoal.speech import SamplingParams

# How repeated semantic tokens are avoided: by a penalty on the logits of recent tokens, or by repetition-aware
# sampling (RAS), which samples a second time from a flatter distribution.
RepetitionRule = Literal["penalty", "ras"]
PromptFormat = Literal["interleave", "chat"]  # keys of `shoal.text.prompt.PROMPT_BUILDERS`
ReleaseLayout = Literal["pickle", "sharded"]  # flat config.json + model.pth, or nested config.json + safetensors shards


@dataclass(frozen=True)
class Family:
    """Prompt format, sampling rule and file layout shared by all models of a family."""

    name: str
    prompt_format: PromptFormat
    phonemes: bool  # was trained on phoneme tags
    splits_dialogue: bool  # text with speaker tags is split at speaker changes instead of at sentence ends
    repetition_rule: RepetitionRule
    repetition_window: int  # frames
    constrained: bool  # upstream samples only semantic tokens and the stop token, not the whole vocabulary
    norm_fast_input: bool  # the fast transformer reads the hidden state after the final norm
    tied_embeddings: bool  # the released model has no output matrix of its own
    release_layout: ReleaseLayout
    directions: bool  # follows free-form directions in brackets, such as [speak slowly]
    control_tokens: tuple[str, ...]  # in vocabulary order, without the brackets; the semantic tokens follow
    sampling: SamplingParams  # defaults of models that store none

    @property
    def uses_penalty(self) -> bool:
        return self.repetition_rule == "penalty"

    @property
    def uses_ras(self) -> bool:
        return self.repetition_rule == "ras"

    def special_tokens(self, codes: int) -> list[str]:
        """Return the names of all special tokens in vocabulary order, with `codes` semantic tokens."""
        return [f"<|{name}|>" for name in (*self.control_tokens, *(f"semantic:{code}" for code in range(codes)))]


S1_CONTROL_TOKENS = (
    "begin_of_text", "end_of_text", "pad", "im_start", "im_end", "phoneme_start", "phoneme_end", "tool_call_start",
    "tool_call_end", "text", "voice", "interleave", "audio_start", "audio_end", "audio",
)  # fmt: skip
S2_CONTROL_TOKENS = (
    "endoftext", "im_start", "im_end", *(f"reserved_{index}" for index in range(23)), "pad", "phoneme_start",
    "phoneme_end", "text", "voice", "interleave", "audio_start", "audio_end", "audio_pad",
)  # fmt: skip

S1 = Family(
    name="s1",
    prompt_format="interleave",
    phonemes=True,
    splits_dialogue=False,
    repetition_rule="penalty",
    repetition_window=16,
    constrained=False,
    norm_fast_input=False,
    tied_embeddings=False,
    release_layout="pickle",
    directions=False,
    control_tokens=S1_CONTROL_TOKENS,
    sampling=SamplingParams(),
)
S2 = Family(
    name="s2",
    prompt_format="chat",
    phonemes=True,
    splits_dialogue=True,
    repetition_rule="ras",
    repetition_window=10,
    constrained=True,
    norm_fast_input=True,
    tied_embeddings=True,
    release_layout="sharded",
    directions=True,
    control_tokens=S2_CONTROL_TOKENS,
    # Upstream's server fixes top_k at 30 for every request and ignores the penalty.
    sampling=SamplingParams(top_k=30, repetition_penalty=1.0),
)
# The bundled model: S1's prompts and sampling over bytes, with S2's input to the fast transformer.
NANO = replace(S1, name="nano", phonemes=False, norm_fast_input=True)

FAMILIES = {family.name: family for family in (S1, S2, NANO)}
