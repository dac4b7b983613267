import asyncio

from shoal.cluster.startup_gate import StartupGate


def test_replicas_are_counted_by_rank_and_kept_apart() -> None:
    gate = StartupGate(stagger_seconds=100.0)
    entries = [asyncio.run(gate.enter(rank)) for rank in (0, 1, 2, 1)]
    assert [entry.starts for entry in entries] == [1, 1, 1, 2]
    assert entries[0].wait == 0
    assert [round(entry.wait, -1) for entry in entries[1:]] == [100, 200, 300]


def test_without_a_stagger_no_replica_waits() -> None:
    gate = StartupGate(stagger_seconds=0.0)
    assert [asyncio.run(gate.enter(rank)).wait for rank in (0, 1)] == [0, 0]
