"""Comparisons of tokenizers, prompts and the splitting of text into turns."""

from collections.abc import Iterator, Mapping

import torch

from shoal.model.family import FAMILIES
from shoal.text.prompt import PROMPT_BUILDERS, Grid, GridBuilder, PromptBuilder, Reference, build_prompt
from shoal.text.split import split_dialogue
from shoal.tools.verify.comparison import ParityComparison, equal, equal_lists
from shoal.tools.verify.golden import Case, Golden, codes_of


def tokenizer(golden: Golden, family: str) -> Iterator[ParityComparison]:
    ours = golden.tokenizer(family)
    for case in golden.cases(f"{family}/tokenizer_cases.json"):
        ids = ours.encode(case["text"], specials=True)
        yield equal_lists(f"{family}/tokenizer", repr(case["text"][:24]), ids, case["ids"])


def s1_prompts(golden: Golden) -> Iterator[ParityComparison]:
    stored = golden.grids("prompts/s1.npz")
    builder = _builder(golden, "s1", stored)
    for case in golden.cases("prompts/cases.json"):
        grid = build_prompt(builder, [case["text"]], _references(case))
        yield _same_grid("s1/prompts", case["name"], grid, stored[case["name"]])


def s2_prompts(golden: Golden) -> Iterator[ParityComparison]:
    """Compare the prompt of every turn of a request, given stored frames for the earlier turns."""
    stored = golden.grids("prompts/s2.npz")
    builder = _builder(golden, "s2", stored)
    for case in golden.cases("prompts/cases.json"):
        texts, generated = case["s2_batches"], codes_of(case.get("generated", []))
        for turn in range(len(texts)):
            name = f"{case['name']}.{turn}"
            grid = build_prompt(builder, texts, _references(case), generated[:turn])
            yield _same_grid("s2/prompts", name, grid, stored[name])


def s2_batches(golden: Golden) -> Iterator[ParityComparison]:
    for case in golden.cases("prompts/cases.json"):
        ours, stored = split_dialogue(case["text"], case["chunk_length"], drop_lead_in=True), case["s2_batches"]
        unequal = sum(a != b for a, b in zip(ours, stored, strict=False)) + abs(len(ours) - len(stored))
        yield ParityComparison("s2/batches", case["name"], float(unequal), 0.0)


def _builder(golden: Golden, family: str, stored: Mapping[str, Grid]) -> PromptBuilder:
    codebooks = max((len(grid) - 1 for grid in stored.values()), default=0)
    # One stored prompt contains control tokens as text, which upstream interprets.
    grid = GridBuilder(golden.tokenizer(family), codebooks, specials=True)
    return PROMPT_BUILDERS[FAMILIES[family].prompt_format](grid)


def _references(case: Case) -> list[Reference]:
    codes = codes_of([each["codes"] for each in case["references"]])
    return [Reference(each["text"], matrix) for each, matrix in zip(case["references"], codes, strict=True)]


def _same_grid(group: str, name: str, ours: Grid, stored: Grid) -> ParityComparison:
    return equal(group, name, torch.from_numpy(ours), torch.from_numpy(stored))
