"""`shoal bench scaling`."""

import pytest

from shoal.tools.bench.scaling import fit, run_scaling
from tests.tools.bench.documents import check_schema


def test_a_fit_finds_the_asymptotic_exponent() -> None:
    sizes = [16, 32, 64, 128, 256, 512]
    exponent, factor = fit(sizes, [1e-6 * n**2 for n in sizes])
    assert (exponent, factor) == (pytest.approx(2.0), pytest.approx(1e-6))
    late, _ = fit(sizes, [5.0 + 1e-3 * n**2 for n in sizes])
    assert late > 1.3


def test_every_part_of_a_model_is_measured() -> None:
    document = run_scaling("random:tiny", device="cpu", samples=3, quick=True, progress=False)
    check_schema(document)
    assert document["complete"]
    names = [run["name"] for run in document["runs"]]
    assert len(names) == len(set(names)) == 8
    for run in document["runs"]:
        assert len(run["points"]) == 3
        assert all(len(point["seconds"]) == 3 and point["median"] > 0 for point in run["points"])
