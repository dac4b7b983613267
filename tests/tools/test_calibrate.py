import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from shoal.checkpoint.format.profile import PROFILE_FILE, Alignment, read_profile
from shoal.model.family import S1
from shoal.tools.calibrate import MIN_QUALITY, Calibration, SpokenSentence, calibrate, choose_heads, store
from tests.cli.conftest import Shoal, shoal

__all__ = ["shoal"]
PAIRS = list(product(range(2), range(3)))
WORDS = ((0, 3), (4, 8), (9, 12))
TOKENS, FRAMES = 13, 30


def sentence(heads: dict[int, np.ndarray]) -> SpokenSentence:
    """Return a sentence in which some heads attend to given tokens and the others to everything alike."""
    weights = np.full((len(PAIRS), FRAMES, TOKENS), 1 / TOKENS, np.float32)
    for head, path in heads.items():
        weights[head] *= 0.1
        weights[head, np.arange(FRAMES), path] += 0.9
    return SpokenSentence(weights, WORDS)


STEADY = np.linspace(0, TOKENS - 1, FRAMES).astype(int)


def test_the_head_that_follows_the_text_is_chosen() -> None:
    constant, backwards = np.zeros(FRAMES, int), STEADY[::-1]
    found = choose_heads([sentence({4: STEADY, 0: constant, 2: backwards})], PAIRS, 1.5)
    assert found.alignment.heads == ((1, 1),)
    assert found.alignment.quality > 0.85
    assert found.alignment.lead_frames == 1.5
    assert found.best[0].quality == found.alignment.quality


def test_heads_that_know_different_words_are_chosen_together() -> None:
    spoken = sentence({1: STEADY, 5: STEADY})
    spoken.weights[1, STEADY >= 9] = spoken.weights[5, STEADY < 4] = 1 / TOKENS
    assert choose_heads([spoken], PAIRS, 1.0).alignment.heads == ((0, 1), (1, 2))


def test_a_model_whose_heads_do_not_follow_the_text_is_refused() -> None:
    found = choose_heads([sentence({0: np.zeros(FRAMES, int)})], PAIRS, 1.0)
    assert not found.accepted
    assert found.alignment.heads == ()
    assert found.alignment.quality < MIN_QUALITY


def test_random_weights_are_spoken_and_refused(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.calibrate.MAX_FRAMES", 20)
    ran = shoal("align", "calibrate", "random:tiny", "--sentences", 4, "--dry-run", "--json")
    assert ran.code == 12
    assert json.loads(ran.text)["sentences"] == 4
    assert "the attention of no head follows the text" in ran.said
    assert shoal("align", "calibrate", "random:tiny").code == 2


def test_the_result_is_stored_beside_the_other_defaults(tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).write_text(json.dumps({"chunk_bytes": 90}))
    alignment = Alignment(((1, 1), (2, 0)), 0.9, 1.0)
    assert store(Calibration(alignment, (), 4), tmp_path) == tmp_path / PROFILE_FILE
    profile = read_profile(tmp_path, S1)
    assert (profile.alignment, profile.chunk_bytes) == (alignment, 90)
    (tmp_path / PROFILE_FILE).unlink()
    store(Calibration(alignment, (), 4), tmp_path)
    assert json.loads((tmp_path / PROFILE_FILE).read_text()) == {"alignment": json.loads(json.dumps(asdict(alignment)))}


def test_a_model_that_speaks_nothing_cannot_be_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tools.calibrate._speak", lambda engine, count: [])
    with pytest.raises(Exception, match="no sentence could be spoken"):
        calibrate("random:tiny")
