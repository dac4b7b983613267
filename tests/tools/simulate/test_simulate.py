"""Invariants of the fleet simulation, traffic generation, and the check against load tests."""

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cluster.routing import STRATEGIES
from shoal.config import EngineConfig
from shoal.errors import InvalidRequest
from shoal.tools.bench.document import Document, new_document
from shoal.tools.bench.machine import describe_client
from shoal.tools.simulate import report
from shoal.tools.simulate.check import check
from shoal.tools.simulate.costs import CostCurve, EngineCosts
from shoal.tools.simulate.report import fleet_metrics, percentile, smallest_fleet
from shoal.tools.simulate.run import Outage, Scenario, simulate
from shoal.tools.simulate.server import Fleet, SimulatedRequest
from shoal.tools.simulate.traffic import Arrival, TrafficPattern, read_trace, sample_cell

# 10 ms per step, 1 ms per prompt token, no codec costs, 20 frames per second.
COSTS = EngineCosts(CostCurve(((1, 0.010),)), 0.001, 0.0, 0.0, 0.0, 20.0)
FLEET = Fleet(COSTS, EngineConfig(slots=4), blocks=512, voice_tokens=64, text_tokens=16)


def scenario(*arrivals: Arrival, servers: int = 1, **more: object) -> Scenario:
    return replace(Scenario(FLEET, arrivals, servers), **more)  # type: ignore[arg-type]


def test_latency_of_a_single_request_is_the_sum_of_its_steps() -> None:
    (speech,) = simulate(scenario(Arrival(5.0, 1.0))).requests
    # The first step prefills 16 tokens and generates a frame; the second frame completes the first chunk.
    assert speech.first_audio == pytest.approx(5.0 + (0.010 + 0.016) + 0.010)
    assert speech.ended == pytest.approx(5.0 + 0.016 + 20 * 0.010)


def test_a_request_waits_for_a_slot_when_all_are_occupied() -> None:
    outcome = simulate(scenario(*[Arrival(0.0, 1.0)] * 5))
    first = [speech.first_audio or 0.0 for speech in outcome.requests]
    assert max(first[:4]) < 0.2
    assert first[4] > min(speech.ended or 0.0 for speech in outcome.requests[:4])


def test_a_cached_voice_is_not_recomputed() -> None:
    outcome = simulate(scenario(Arrival(0.0, 1.0, "a"), Arrival(9.0, 1.0, "a"), Arrival(18.0, 1.0, "b")))
    waits = [(speech.first_audio or 0.0) - speech.arrival.at for speech in outcome.requests]
    assert waits[0] - waits[1] == pytest.approx(0.064)
    assert waits[2] == pytest.approx(waits[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_request_completes_exactly_once(strategy: str) -> None:
    arrivals = TrafficPattern(rate=20, seconds=5, speech_seconds=2, voices=10).arrivals()
    outcome = simulate(scenario(*arrivals, servers=3, strategy=strategy))
    assert outcome.failed == 0
    assert all(speech.decoded == speech.frames for speech in outcome.requests)
    assert all(server.scheduler.pool.used == 0 and not server.requests for server in outcome.servers)


def test_voice_affinity_raises_the_prefix_cache_hit_rate() -> None:
    arrivals = TrafficPattern(rate=30, seconds=8, speech_seconds=1, voices=40).arrivals()
    saved = {}
    for strategy in ("round-robin", "voice-affinity"):
        each = scenario(*arrivals, servers=8, strategy=strategy)
        saved[strategy] = fleet_metrics(each, simulate(each), 1.0).prompt_saved
    assert saved["voice-affinity"] > 1.2 * saved["round-robin"]


def test_an_outage_fails_requests_with_audio_and_reroutes_the_others() -> None:
    # 12 requests on 2 GPUs with 4 slots: at the outage, 4 of the 6 requests of the first zone have sent audio.
    outage = Outage(at=0.3, seconds=60.0)
    outcome = simulate(scenario(*[Arrival(0.0, 2.0)] * 12, servers=2, zones=2, strategy="round-robin", outage=outage))
    assert outcome.failed == 4
    assert [speech.moves for speech in outcome.requests].count(1) == 2
    assert len(outcome.latency()) == 8


def test_requests_wait_for_recovery_when_all_zones_are_down() -> None:
    outcome = simulate(scenario(Arrival(1.0, 1.0), outage=Outage(at=0.5, seconds=10.0)))
    assert outcome.failed == 0
    assert (outcome.requests[0].first_audio or 0.0) > 10.5


def test_the_smallest_fleet_meets_the_goal_and_one_gpu_less_does_not() -> None:
    arrivals = TrafficPattern(rate=12, seconds=6, speech_seconds=4, voices=5).arrivals()
    asked = scenario(*arrivals, strategy="least-connections")
    gpus = smallest_fleet(asked, goal=0.25)
    assert gpus > 1
    assert percentile(simulate(replace(asked, servers=gpus)).first_audio(), 0.95) <= 0.25
    assert percentile(simulate(replace(asked, servers=gpus - 1)).first_audio(), 0.95) > 0.25


def test_the_smallest_fleet_has_a_gpu_in_every_zone() -> None:
    assert smallest_fleet(scenario(Arrival(0.0, 1.0), zones=4), goal=5.0) == 4


def test_a_goal_that_no_fleet_meets_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="1 ms"):
        smallest_fleet(scenario(Arrival(0.0, 1.0), Arrival(0.1, 1.0)), goal=0.001)


def test_a_fleet_too_large_for_one_balancer_must_be_divided_into_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_GPUS", 3)
    with pytest.raises(InvalidRequest, match="3 GPUs behind one balancer are too few: divide the fleet with --cells"):
        smallest_fleet(scenario(*[Arrival(0.0, 1.0)] * 50), goal=0.04)


def test_traffic_has_the_given_rate_length_and_popularity() -> None:
    arrivals = TrafficPattern(rate=50, seconds=100, speech_seconds=6, voices=20, swing=0.5).arrivals()
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert sum(arrival.seconds for arrival in arrivals) / len(arrivals) == pytest.approx(6, rel=0.1)
    asked = [arrival.voice for arrival in arrivals]
    assert asked.count("voice-0") > 3 * asked.count("voice-9")
    first, second = (sum(half <= arrival.at < half + 50 for arrival in arrivals) for half in (0, 50))
    assert first > 1.5 * second
    assert arrivals == TrafficPattern(rate=50, seconds=100, speech_seconds=6, voices=20, swing=0.5).arrivals()


def evenness(arrivals: list[Arrival]) -> float:
    """Return the coefficient of variation of the gaps between arrivals; 1 for a Poisson process."""
    gaps = [later.at - sooner.at for sooner, later in itertools.pairwise(arrivals)]
    return statistics.pstdev(gaps) / statistics.mean(gaps)


def test_the_traffic_of_a_cell_is_poisson_too() -> None:
    traffic = TrafficPattern(rate=100, seconds=200)
    arrivals = traffic.arrivals()
    for share_of_it in (sample_cell(arrivals, 20, seed=3), traffic.for_cell(20).arrivals()):
        assert len(share_of_it) == pytest.approx(len(arrivals) / 20, rel=0.1)
        assert evenness(share_of_it) == pytest.approx(1.0, abs=0.1)  # taking every 20th would give 0.22
    assert sample_cell(arrivals, 20, seed=3) == sample_cell(arrivals, 20, seed=3)
    assert sample_cell(arrivals, 20, seed=3) != sample_cell(arrivals, 20, seed=4)
    assert sample_cell(arrivals, 1, seed=3) == arrivals


@pytest.mark.parametrize(("rate", "seconds"), [(1e9, 60.0), (1.0, 1e9), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_too_much_traffic_is_rejected_before_it_is_generated(rate: float, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="lower --rate or --seconds, or raise --cells"):
        TrafficPattern(rate, seconds).arrivals()


def test_a_trace_is_sorted_by_arrival_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 2, "seconds": 1, "voice": "a"}\n\n{"at": 1, "seconds": 3}\n', encoding="utf-8-sig")
    assert read_trace(path) == [Arrival(1, 3), Arrival(2, 1, "a")]
    endless = ('{"at": Infinity, "seconds": 1}', '{"at": 1, "seconds": Infinity}')
    wrongs = ('{"at": -1, "seconds": 1}', '{"at": 1}', "[]", "nothing", '{"at": 1, "seconds": 0}', *endless)
    for wrong in (*wrongs, '{"at": 1, "seconds": 1, "voice": 5}'):
        path.write_text(json.dumps({"at": 1, "seconds": 1}) + "\n" + wrong + "\n")
        with pytest.raises(InvalidRequest, match="line 2"):
            read_trace(path)


def load_document(*stages: list[SimulatedRequest]) -> Document:
    """Return the document that `shoal load` would write for simulated requests, one list per stage."""
    document = new_document("load", dict(describe_client()), {})
    measured = []
    for number, requests in enumerate(stages):
        outcomes = [
            {
                "due": each.arrival.at,
                "audio_seconds": each.frames / COSTS.frame_rate,
                "first_audio": (each.first_audio or 0.0) - each.arrival.at,
                "seconds": (each.ended or 0.0) - each.arrival.at,
                "error": None,
            }
            for each in reversed(requests)  # not in the order of arrival
        ]
        measured.append({"name": f"stage {number}", "outcomes": [*outcomes, {"due": 0.0, "error": "HTTP 429"}]})
    document["runs"].append({"name": "here", "stages": measured})
    return document


def test_a_check_against_simulated_measurements_finds_no_error() -> None:
    arrivals = [
        replace(each, voice=None) for each in TrafficPattern(rate=3, seconds=30, speech_seconds=2, seed=5).arrivals()
    ]
    few, many = scenario(*arrivals[::4]), scenario(*arrivals)
    found = check(load_document(simulate(few).requests, simulate(many).requests), scenario())
    assert [each.figure for each in found] == ["first audio P50", "first audio P95", "speech P50", "speech P95"] * 2
    assert [each.requests for each in found] == [len(few.arrivals)] * 4 + [len(arrivals)] * 4
    assert all(each.off == pytest.approx(0.0, abs=1e-9) for each in found)
    # Wrong costs give a large error.
    slower = replace(FLEET, costs=replace(COSTS, step=CostCurve(((1, 0.013),))))
    off = check(load_document(simulate(few).requests), replace(scenario(), fleet=slower))
    assert all(each.off > 0.2 for each in off if each.figure.startswith("speech"))


def test_only_a_load_test_of_one_server_can_be_checked() -> None:
    for wrong in (new_document("engine", {}, {}), new_document("load", {}, {})):
        with pytest.raises(InvalidRequest, match="shoal load --json"):
            check(wrong, scenario())
