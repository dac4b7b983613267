"""The choice of an instruction set: by measurement among equal bits, stored per CPU and library."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.native import choice
from shoal.native.choice import IsaChoice, candidates, choose_isa, measure, open_context
from shoal.native.library import Context, Matrix, NativeUnavailable

SECONDS = {"avx512_vnni": 2.0, "avx512": 2.0, "avx2": 1.0}  # of a round, made up


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return the file of stored choices, in an empty directory, while three instruction sets are present."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    present = (*SECONDS, "baseline")
    monkeypatch.setattr(choice, "supported_sets", lambda names: [name for name in names if name in ("amx", *present)])
    choice._measured_choice.cache_clear()
    yield tmp_path / "shoal" / "native" / "isa.json"
    choice._measured_choice.cache_clear()


@pytest.fixture
def measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the candidates of every measurement, whose times are made up."""
    calls = list[list[str]]()

    def fake(names: list[str], *, int8_activations: bool) -> IsaChoice:
        calls.append(names)
        return IsaChoice(names[-1], {name: SECONDS[name] for name in names})

    monkeypatch.setattr(choice, "measure", fake)
    return calls


def test_only_instruction_sets_with_equal_bits_that_have_been_tested_compete(file: Path) -> None:
    assert candidates(int8_activations=False) == ["avx512", "avx2"]
    assert candidates(int8_activations=True) == ["avx512_vnni", "avx512", "avx2"]


def test_the_baseline_is_used_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "supported_sets", lambda names: ["baseline"])
    assert candidates(int8_activations=False) == candidates(int8_activations=True) == ["baseline"]


def test_a_choice_is_measured_once_per_type_of_activations_and_stored(file: Path, measured: list[list[str]]) -> None:
    for _ in range(2):
        assert choose_isa("auto").isa == choose_isa("auto", int8_activations=True).isa == "avx2"
        choice._measured_choice.cache_clear()  # as in a new process
    assert measured == [["avx512", "avx2"], ["avx512_vnni", "avx512", "avx2"]]
    assert len(json.loads(file.read_text())) == 2
    assert str(choose_isa("auto")) == "avx2; measured: avx512 2.00 ms, avx2 1.00 ms"


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "null", '{"KEY": 3}', '{"KEY": {"isa": "mmx", "milliseconds": {}}}']
)
def test_a_broken_file_is_replaced(file: Path, measured: list[list[str]], content: str) -> None:
    choose_isa("auto")
    (key,) = json.loads(file.read_text())
    file.write_text(content.replace("KEY", key))
    choice._measured_choice.cache_clear()
    assert choose_isa("auto").isa == "avx2"
    assert len(measured) == 2
    assert json.loads(file.read_text())[key]["isa"] == "avx2"


def test_another_library_is_measured_again_and_forgets_the_old_one(
    file: Path, measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_isa("auto")
    monkeypatch.setattr(choice, "library_name", lambda: "another.so")
    choice._measured_choice.cache_clear()
    choose_isa("auto")
    assert len(measured) == 2
    (key,) = json.loads(file.read_text())
    assert key.endswith("another.so")


def test_a_directory_that_cannot_be_written_costs_only_the_next_measurement(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no-directory").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-directory"))
    assert choose_isa("auto").isa == "avx2"


@pytest.mark.parametrize(
    ("narrow", "chosen", "wrong"),
    [(1.0, "avx2", ""), (1.95, "avx512", ""), (3.0, "avx512", ""), (3.0, "avx2", "avx512")],
)
def test_a_narrower_instruction_set_has_to_be_clearly_faster_or_the_other_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, narrow: float, chosen: str, wrong: str
) -> None:
    seconds = {"avx512": iter([9.0, 2.0, 2.1, 2.0, 7.0]), "avx2": iter([narrow + 5, narrow, 8.0, 9.0, narrow])}

    class Fake:
        def __init__(self, isa: str, threads: int) -> None:
            self.isa = isa

        def product(self, matrix: Matrix, x: np.ndarray) -> np.ndarray:
            return np.full(3, self.isa == wrong)

    def elapsed(context: Context, matrices: list[Matrix]) -> float:
        return next(seconds[context.isa])

    monkeypatch.setattr(choice, "Context", Fake)
    monkeypatch.setattr(choice, "_time_round", elapsed)
    found = measure(["avx512", "avx2"], int8_activations=False)
    assert found.isa == chosen
    times = {"avx512": 2000.0, "avx2": 1000 * narrow}
    assert found.milliseconds == {name: times[name] for name in times if name != wrong}
    assert ("avx512 gives other results" in caplog.text) == bool(wrong)


@pytest.mark.parametrize("int8_activations", [False, True])
def test_the_candidates_of_this_cpu_are_measured(instruction_sets: list[str], int8_activations: bool) -> None:
    names = candidates(int8_activations=int8_activations)
    found = measure(names, int8_activations=int8_activations)
    assert found.isa in names
    assert list(found.milliseconds) == names
    assert all(0 < each < 1000 for each in found.milliseconds.values())


def test_a_named_instruction_set_is_used_without_a_measurement(
    instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_measured_choice", pytest.fail)
    assert [open_context(name, 1).isa for name in instruction_sets] == instruction_sets


def test_an_unknown_instruction_set_is_refused_with_those_that_work(instruction_sets: list[str]) -> None:
    with pytest.raises(NativeUnavailable, match=r"no mmx: use .*baseline"):
        choose_isa("mmx")
