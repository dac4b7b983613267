"""Models, voices and configurations the tests of the engine share."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.profile import default_profile
from shoal.model.family import FAMILIES
from shoal.text.prompt import Reference
from shoal.tools.verify.golden import Golden
from shoal.voices.voice import Voice
from tests.engine.solo import Soloist


@pytest.fixture(scope="session")
def voice() -> Voice:
    codes = np.random.default_rng(0).integers(0, 100, (10, 30)).astype(np.int32)
    return Voice("someone", (Reference("a recording of somebody", codes),), frame_rate=25.0)


@pytest.fixture(scope="session")
def soloist(tiny: Checkpoint) -> Soloist:
    return Soloist(tiny)


@pytest.fixture(scope="session")
def soloist_s2(tiny_s2: Checkpoint) -> Soloist:
    return Soloist(tiny_s2)


@pytest.fixture(params=["s1", "s2"])
def either(request: pytest.FixtureRequest, soloist: Soloist, soloist_s2: Soloist) -> Soloist:
    """Both families."""
    return soloist if request.param == "s1" else soloist_s2


@pytest.fixture(scope="session", params=["s1", "s2"])
def golden_soloist(request: pytest.FixtureRequest, golden: Path) -> Soloist:
    """The stored checkpoints of both families, with the stored codec."""
    family: str = request.param
    stored = Golden(golden, "cpu", torch.float32)
    return Soloist(
        Checkpoint(
            family, stored.model(family), stored.codec, stored.tokenizer(family), default_profile(FAMILIES[family])
        )
    )
