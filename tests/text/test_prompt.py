import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from shoal.errors import InvalidRequest, TextError
from shoal.text.prompt import ChatPrompts, Codes, GridBuilder, InterleavePrompts, PromptBuilder, Reference, build_prompt
from shoal.text.split import split_dialogue
from shoal.text.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "prompts" / "cases.json").read_text())
CODEBOOKS = 10
WORDS = st.text(alphabet="ab é.,!?\n你<|>", max_size=12)
FRAMES = npst.arrays(np.int32, st.tuples(st.just(CODEBOOKS), st.integers(0, 4)), elements=st.integers(0, 159))

named = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])


def codes_of(matrices: Sequence[Sequence[Sequence[int]]]) -> list[Codes]:
    return [np.array(matrix, np.int32) for matrix in matrices]


def references_of(case: dict[str, Any]) -> list[Reference]:
    return [Reference(each["text"], np.array(each["codes"], np.int32)) for each in case["references"]]


def builder(family: str, *, specials: bool = False) -> PromptBuilder:
    columns = GridBuilder(load_tokenizer(GOLDEN / family / "checkpoint"), CODEBOOKS, specials)
    return InterleavePrompts(columns) if family == "s1" else ChatPrompts(columns)


S1, S2 = builder("s1"), builder("s2")
both_formats = pytest.mark.parametrize("prompts", [S1, S2], ids=["s1", "s2"])


@named
def test_s1_prompts_equal_the_stored_grids_of_upstream(case: dict[str, Any]) -> None:
    prompts = builder("s1", specials=case["name"] == "control_tokens_in_text")
    grid = build_prompt(prompts, [case["text"]], references_of(case))
    assert_grid(grid, np.load(GOLDEN / "prompts" / "s1.npz")[case["name"]])


@named
def test_s2_prompts_equal_the_stored_grids_of_upstream(case: dict[str, Any]) -> None:
    prompts = builder("s2", specials=case["name"] == "control_tokens_in_text")
    texts, generated = case["s2_batches"], codes_of(case.get("generated", []))
    stored = np.load(GOLDEN / "prompts" / "s2.npz")
    for batch in range(len(texts)):
        grid = build_prompt(prompts, texts, references_of(case), generated[:batch])
        assert_grid(grid, stored[f"{case['name']}.{batch}"])


@named
def test_the_texts_of_the_s2_batches_come_from_grouping_the_turns(case: dict[str, Any]) -> None:
    assert split_dialogue(case["text"], case["chunk_length"], drop_lead_in=True) == case["s2_batches"]


def assert_grid(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.int32
    np.testing.assert_array_equal(ours, theirs)


@both_formats
@settings(deadline=None)
@given(texts=st.lists(WORDS, min_size=2, max_size=4), data=st.data())
def test_a_prompt_is_the_one_before_it_with_the_frames_and_a_tail(
    prompts: PromptBuilder, texts: list[str], data: st.DataObject
) -> None:
    generated = data.draw(st.lists(FRAMES, min_size=len(texts) - 1, max_size=len(texts) - 1))
    references = [Reference(data.draw(WORDS), data.draw(FRAMES))]
    before = build_prompt(prompts, texts, references, generated[:-1])
    frames, tail = prompts.grid.frames(generated[-1]), prompts.next_turn(texts[-1])
    whole = build_prompt(prompts, texts, references, generated)
    np.testing.assert_array_equal(np.concatenate((before, frames, tail), axis=1), whole)


@both_formats
def test_a_tail_begins_with_the_stop_token_the_model_sampled(prompts: PromptBuilder) -> None:
    tail = prompts.next_turn("More.")
    assert tail[0, 0] == prompts.grid.tokenizer.stop_id
    assert not tail[1:].any()


@both_formats
@settings(deadline=None)
@given(text=WORDS)
def test_a_first_turn_is_the_end_of_a_next_turn(prompts: PromptBuilder, text: str) -> None:
    tail = prompts.next_turn(text)[:, prompts.tokens_before_first_turn :]
    np.testing.assert_array_equal(prompts.first_turn(text), tail)


def test_an_earlier_batch_of_s1_reads_like_a_reference() -> None:
    codes = np.arange(30, dtype=np.int32).reshape(CODEBOOKS, 3)
    as_batch = build_prompt(S1, ["One.", "Two."], generated=[codes])
    np.testing.assert_array_equal(as_batch, S1.prompt("Two.", [Reference("One.", codes)]))


@both_formats
def test_a_control_token_in_text_or_transcript_is_refused(prompts: PromptBuilder) -> None:
    codes = np.zeros((CODEBOOKS, 1), np.int32)
    with pytest.raises(TextError, match="im_end"):
        prompts.prompt("stop<|im_end|>")
    with pytest.raises(TextError, match="im_end"):
        prompts.prompt("fine", [Reference("stop<|im_end|>", codes)])
    with pytest.raises(TextError, match="im_end"):
        prompts.next_turn("stop<|im_end|>")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((9, 4), np.int32), r"\[9, 4\], this model needs \[10, frames\]"),
        (np.zeros(10, np.int32), r"\[10\], this model needs"),
        (np.full((10, 1), 160, np.int32), "160 to 160, this model has 0 to 159"),
        (np.full((10, 1), -1, np.int32), "-1 to -1"),
        (np.zeros((10, 1), np.float32), "float32"),
    ],
)
def test_codes_of_another_model_are_refused(codes: Codes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        S2.prompt("Hello", [Reference("Hi", codes)])


def test_asking_for_a_batch_that_has_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="only 1 texts"):
        build_prompt(S1, ["One."], generated=[np.zeros((CODEBOOKS, 1), np.int32)])


def test_prompts_work_with_a_vocabulary_of_single_bytes(byte_directory: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(byte_directory)
    grid = InterleavePrompts(GridBuilder(tokenizer, 2)).prompt("Hi", [Reference("A", np.array([[3], [5]], np.int32))])
    spoken = [*b"<|speaker:0|>A", tokenizer.semantic_begin + 3, tokenizer.stop_id, *b"<|speaker:0|>Hi"]
    assert grid[0].tolist() == [tokenizer.token_id("<|interleave|>"), *spoken]
    assert grid[1:, 15].tolist() == [3, 5]


@pytest.mark.parametrize("family", ["s1", "s2"])
def test_phoneme_tags_become_control_tokens_and_others_stay_refused(family: str) -> None:
    tokenizer = load_tokenizer(GOLDEN / family / "checkpoint")
    plain, reading = GridBuilder(tokenizer, CODEBOOKS), GridBuilder(tokenizer, CODEBOOKS, phonemes=True)
    text = "I <|phoneme_start|>R EH1 D<|phoneme_end|> it<|phoneme_start|>gong1<|phoneme_end|>."
    assert np.array_equal(reading.text(text), GridBuilder(tokenizer, CODEBOOKS, specials=True).text(text))
    assert (reading.text(text)[0] == tokenizer.token_id("<|phoneme_start|>")).sum() == 2
    refused = ("<|phoneme_start|>a", "a<|phoneme_end|>", "<|phoneme_start|><|im_end|><|phoneme_end|>", "<|im_end|>")
    for each in refused:
        with pytest.raises(TextError, match="control token"):
            reading.text(each)
    with pytest.raises(TextError, match="phoneme_start"):
        plain.text(text)
