from collections.abc import Iterator

import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.engine.execution import cpu_threads as threads
from shoal.engine.execution.cpu_threads import FEW_TOKENS, CPUThreads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_few_tokens_of_a_small_model_use_one_thread(tiny: Checkpoint) -> None:
    chosen = CPUThreads(tiny.model)
    for tokens, expected in ((1, 1), (FEW_TOKENS, 1), (FEW_TOKENS + 1, 2), (2, 1), (300, 2)):
        chosen.choose(tokens)
        assert torch.get_num_threads() == expected


@pytest.mark.usefixtures("two_threads")
def test_large_models_keep_all_threads(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SMALL_MODEL", 10)
    CPUThreads(tiny.model).choose(1)
    assert torch.get_num_threads() == 2
