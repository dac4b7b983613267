from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.load import Checkpoint
from shoal.errors import TextError
from shoal.model.dual_ar import DualAR
from shoal.model.generate import frame_budget, generate, generate_tokens
from shoal.model.slow import Head
from shoal.speech import FinishReason, SamplingParams

PROMPT = torch.tensor([[65, 66, 67], *[[0, 0, 0]] * 10])


class ScriptedHead(Head):
    """Samples these semantic tokens, one per frame, whatever the model thinks."""

    def __init__(self, model: DualAR, script: list[int]) -> None:
        super().__init__(model.slow)
        self.script = iter(script)

    def forward(self, normed: Tensor) -> Tensor:
        logits = torch.full((1, len(self.ids)), -1e4)
        logits[0, self.logit_index(torch.tensor([next(self.script)]))] = 0.0
        return logits


@pytest.fixture(params=["s1", "s2"])
def checkpoint(request: pytest.FixtureRequest, tiny: Checkpoint, tiny_s2: Checkpoint) -> Checkpoint:
    return tiny if request.param == "s1" else tiny_s2


def test_an_immediate_stop_token_gives_no_frames(checkpoint: Checkpoint) -> None:
    model = checkpoint.model
    generation = generate(model, ScriptedHead(model, [model.config.stop_id]), PROMPT, SamplingParams(max_frames=5))
    assert generation.finish is FinishReason.STOP
    assert generation.codes.shape == (10, 0)


def test_only_the_frame_of_the_stop_token_is_dropped(checkpoint: Checkpoint) -> None:
    model, first = checkpoint.model, checkpoint.model.config.semantic_begin_id
    head = ScriptedHead(model, [first + 3, first + 4, model.config.stop_id])
    generation = generate(model, head, PROMPT, SamplingParams(max_frames=9, repetition_penalty=1.0))
    assert generation.finish is FinishReason.STOP
    assert generation.codes[0].tolist() == [3, 4]


def test_the_last_frame_is_kept_when_length_ends_the_loop(checkpoint: Checkpoint) -> None:
    model, first = checkpoint.model, checkpoint.model.config.semantic_begin_id
    head = ScriptedHead(model, [first + 3, first + 4, first + 5])
    generation = generate(model, head, PROMPT, SamplingParams(max_frames=3, repetition_penalty=1.0))
    assert generation.finish is FinishReason.LENGTH
    assert generation.codes[0].tolist() == [3, 4, 5]


def test_no_limit_fills_the_context(tiny: Checkpoint) -> None:
    config = tiny.model.config
    assert frame_budget(config, 10, 0) == config.slow.max_seq_len - 10
    assert frame_budget(config, 10, 10**9) == config.slow.max_seq_len - 10
    assert frame_budget(config, 10, 7) == 7


def test_a_short_context_is_filled_to_its_end(tiny: Checkpoint) -> None:
    model = DualAR(replace(tiny.model.config, slow=replace(tiny.model.config.slow, max_seq_len=20)))
    model.load_state_dict(tiny.model.state_dict())
    script = [model.config.semantic_begin_id + step % 50 for step in range(99)]
    generation = generate(model, ScriptedHead(model, script), PROMPT, SamplingParams(max_frames=0))
    assert generation.finish is FinishReason.LENGTH
    assert generation.codes.shape == (10, 17)


def test_a_prompt_that_is_too_long_is_refused(tiny: Checkpoint) -> None:
    config = tiny.model.config
    assert frame_budget(config, config.max_prompt, 0) > 0
    with pytest.raises(TextError, match=rf"{config.max_prompt + 1} tokens, this model accepts {config.max_prompt}"):
        frame_budget(config, config.max_prompt + 1, 5)
    with pytest.raises(TextError):
        generate(tiny.model, Head(tiny.model.slow), torch.zeros(11, 1500, dtype=torch.long), SamplingParams())


def test_the_same_seed_gives_the_same_frames_and_another_seed_others(checkpoint: Checkpoint) -> None:
    head = Head(checkpoint.model.slow)
    spoken = [
        generate(checkpoint.model, head, PROMPT, SamplingParams(seed=seed, max_frames=6, top_p=0.95)).codes
        for seed in (1, 1, 2)
    ]
    assert torch.equal(spoken[0], spoken[1])
    assert not torch.equal(spoken[0], spoken[2])


def test_tokens_are_yielded_one_by_one_and_generation_can_be_abandoned(checkpoint: Checkpoint) -> None:
    tokens = generate_tokens(checkpoint.model, Head(checkpoint.model.slow), PROMPT, SamplingParams(max_frames=500))
    assert next(tokens).shape == (11,)
    tokens.close()  # type: ignore[attr-defined]


def test_a_grid_of_any_integer_dtype_is_accepted(tiny: Checkpoint) -> None:
    head, sampling = Head(tiny.model.slow), SamplingParams(max_frames=2)
    assert torch.equal(
        generate(tiny.model, head, PROMPT.int(), sampling).codes, generate(tiny.model, head, PROMPT, sampling).codes
    )
