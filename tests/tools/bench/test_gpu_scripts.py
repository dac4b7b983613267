"""Scripts behind the GPU tables of the docs, run with a small model on a CPU."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from scripts import card_memory, many_voices, shared_memory, word_times
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.kernels import jit
from shoal.kernels.linear import linear
from shoal.tools.bench.engine import random_voice


@pytest.fixture(scope="module")
def core(tiny: Checkpoint) -> EngineCore:
    return EngineCore(tiny, EngineConfig(slots=4, guard=False))


def test_requests_of_a_batch_are_compared_with_the_same_ones_alone(core: EngineCore) -> None:
    found = many_voices.measure(core, 4, frames=3, each=2, singles={})
    assert (found["requests"], found["first_audio"]["count"]) == (8, 8)
    assert found["exact"] == dict.fromkeys((0, 1, 2, 3), True)


def test_a_request_with_other_codes_than_alone_is_not_exact(core: EngineCore) -> None:
    other = many_voices.alone(core, 5, 3)
    assert many_voices.measure(core, 2, frames=3, each=1, singles={0: other})["exact"] == {0: False, 1: True}


def test_clients_that_start_one_after_the_other_are_counted_while_all_are_live(core: EngineCore) -> None:
    found = many_voices.measure(core, 4, frames=8, each=2, singles={}, stagger=True)
    assert (found["requests"], found["steps"] >= 8 + 8 + 6) == (8, True)
    assert found["live_audio_per_second"] > 0
    assert found["exact"] == dict.fromkeys((0, 1, 2, 3), True)


def test_requests_with_one_new_voice_compute_it_once(core: EngineCore) -> None:
    voice = random_voice(core.checkpoint, 2.0)
    found = many_voices.measure(core, 4, 3, 1, {}, partial(many_voices.utterance, voice=voice))
    assert found["prompt_tokens_shared"] >= 3 * voice.references[0].codes.shape[1] // 16 * 16
    assert found["exact"] == dict.fromkeys((0, 1, 2, 3), True)


def test_kernels_choose_tiles_for_the_forced_limit() -> None:
    cpu = torch.device("cpu")
    with shared_memory.limited(101_376):
        assert linear.shared_memory_limit(cpu) == jit.shared_memory_limit(cpu) == 101_376
    assert linear.shared_memory_limit(cpu) == jit.HOPPER_SHARED_MEMORY


def test_codes_that_differ_from_those_without_a_limit_fail(
    tmp_path: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", "random:tiny", "--device", "cpu", "--slots", "2", "--frames", "2", "--limits", "65536"]
    monkeypatch.setattr(sys, "argv", ["shared_memory", *flags, "--json", str(tmp_path / "out.json")])
    monkeypatch.setattr(shared_memory, "resolve_model", lambda *_, **__: tiny)
    assert shared_memory.main() == 0
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["limit"], run["equal"]) for run in runs] == [(None, 2), (65_536, 2)]
    codes = iter([[np.zeros(1)] * 2, [np.zeros(1), np.ones(1)]])
    monkeypatch.setattr(shared_memory, "spoken", lambda *_: next(codes))
    assert shared_memory.main() == 1


def test_an_engine_in_the_memory_of_a_card_is_described(tmp_path: Path) -> None:
    save_random(tmp_path / "model", random_checkpoint("tiny"))
    found = card_memory.run_engine(str(tmp_path / "model"), "cpu", 8)
    assert found["weights"] == "none"
    assert [run["voices"] for run in found["runs"]] == [1, found["slots"]]
    assert card_memory.run_engine(str(tmp_path / "none"), "cpu", 8)["error"].startswith("ModelNotFound: ")


def test_the_cost_of_word_times_is_measured_by_engines_that_take_turns(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_times, "resolve_model", lambda *_, **__: tiny)
    flags = ["--model", "random:tiny", "--device", "cpu", "--voices", "2", "--frames", "3", "--rounds", "2"]
    ran = CliRunner().invoke(word_times.app, ["cost", *flags])
    found = json.loads(ran.stdout)
    assert list(found) == ["no heads", "unused", "all requests"]
    assert all(len(rates) == 2 and min(rates) > 0 for rates in found.values())
