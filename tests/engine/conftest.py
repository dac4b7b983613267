"""Models, voices and configurations shared by the engine tests."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.checkpoint.format.profile import default_profile
from shoal.checkpoint.load import Checkpoint
from shoal.model.family import FAMILIES
from shoal.text.prompt import Reference
from shoal.tools.verify.golden import Golden
from shoal.voices.voice import Voice
from tests.engine.oracle import Oracle


@pytest.fixture(scope="session")
def voice() -> Voice:
    codes = np.random.default_rng(0).integers(0, 100, (10, 30)).astype(np.int32)
    return Voice("someone", (Reference("a short recording", codes),), frame_rate=25.0)


@pytest.fixture(scope="session")
def oracle(tiny: Checkpoint) -> Oracle:
    return Oracle(tiny)


@pytest.fixture(scope="session")
def oracle_s2(tiny_s2: Checkpoint) -> Oracle:
    return Oracle(tiny_s2)


@pytest.fixture(params=["s1", "s2"])
def either(request: pytest.FixtureRequest, oracle: Oracle, oracle_s2: Oracle) -> Oracle:
    """Return the oracle of each family in turn."""
    return oracle if request.param == "s1" else oracle_s2


@pytest.fixture(scope="session", params=["s1", "s2"])
def golden_oracle(request: pytest.FixtureRequest, golden: Path) -> Oracle:
    """The stored checkpoints of both families, with the stored codec."""
    family: str = request.param
    stored = Golden(golden, "cpu", torch.float32)
    return Oracle(
        Checkpoint(
            family, stored.model(family), stored.codec, stored.tokenizer(family), default_profile(FAMILIES[family])
        )
    )
