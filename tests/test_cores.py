"""Threads that the CPU quota of a container allows."""

from pathlib import Path

import pytest
import torch

from shoal import cores
from shoal.cores import cpu_quota, default_threads, usable_cores
from shoal.engine.execution.cpu_threads import limit_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def v2(folder: Path, text: str) -> Path:
    (folder / "cpu.max").write_text(text)
    return folder


def v1(folder: Path, quota: str) -> Path:
    (folder / "cpu").mkdir()
    (folder / "cpu/cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu/cpu.cfs_period_us").write_text("100000\n")
    return folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1), ("1600000 100000\n", 8)],
)
def test_a_quota_limits_the_cores_and_is_rounded_up(tmp_path: Path, content: str, expected: int) -> None:
    assert usable_cores(v2(tmp_path, content)) == expected


@pytest.mark.parametrize("content", ["max 100000\n", "", "0 0\n", "broken"])
def test_without_a_quota_every_core_of_the_affinity_is_used(tmp_path: Path, content: str) -> None:
    assert cpu_quota(v2(tmp_path, content)) is None
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(("quota", "expected"), [("300000\n", 3), ("-1\n", 8)])
def test_the_first_version_of_cgroups_is_read(tmp_path: Path, quota: str, expected: int) -> None:
    assert usable_cores(v1(tmp_path, quota)) == expected


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("5,2", 5), ("0", 2), ("many", 2)])
def test_omp_num_threads_decides_if_it_is_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, expected: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert default_threads(v2(tmp_path, "200000 100000")) == expected


def test_torch_uses_no_more_threads_than_the_quota_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        monkeypatch.setattr("shoal.engine.execution.cpu_threads.default_threads", lambda: 3)
        limit_threads()
        assert torch.get_num_threads() == 3
        monkeypatch.setattr("shoal.engine.execution.cpu_threads.default_threads", lambda: 8)
        limit_threads()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
