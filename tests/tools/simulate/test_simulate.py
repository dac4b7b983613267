"""Fleets on paper: what must hold whatever is simulated, and what the strategies are worth."""

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

# 10 ms a step however many frames, nothing for the codec, 1 ms per column of a prompt, 20 frames a second.
COSTS = EngineCosts(CostCurve(((1, 0.010),)), 0.001, 0.0, 0.0, 0.0, 20.0)
FLEET = Fleet(COSTS, EngineConfig(slots=4), blocks=512, voice_tokens=64, text_tokens=16)


def scenario(*arrivals: Arrival, servers: int = 1, **more: object) -> Scenario:
    return replace(Scenario(FLEET, arrivals, servers), **more)  # type: ignore[arg-type]


def test_a_request_alone_takes_what_its_steps_take() -> None:
    (speech,) = simulate(scenario(Arrival(5.0, 1.0))).requests
    # 16 columns and the first frame in one step, the second frame in the next: two frames are the first chunk.
    assert speech.first_audio == pytest.approx(5.0 + (0.010 + 0.016) + 0.010)
    assert speech.ended == pytest.approx(5.0 + 0.016 + 20 * 0.010)


def test_who_finds_all_slots_taken_waits_for_one() -> None:
    outcome = simulate(scenario(*[Arrival(0.0, 1.0)] * 5))
    first = [speech.first_audio or 0.0 for speech in outcome.requests]
    assert max(first[:4]) < 0.2
    assert first[4] > min(speech.ended or 0.0 for speech in outcome.requests[:4])


def test_a_voice_used_before_is_not_computed_again() -> None:
    outcome = simulate(scenario(Arrival(0.0, 1.0, "a"), Arrival(9.0, 1.0, "a"), Arrival(18.0, 1.0, "b")))
    waits = [(speech.first_audio or 0.0) - speech.arrival.at for speech in outcome.requests]
    assert waits[0] - waits[1] == pytest.approx(0.064)
    assert waits[2] == pytest.approx(waits[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_request_is_spoken_to_its_end_once(strategy: str) -> None:
    arrivals = TrafficPattern(rate=20, seconds=5, speech_seconds=2, voices=10).arrivals()
    outcome = simulate(scenario(*arrivals, servers=3, strategy=strategy))
    assert outcome.failed == 0
    assert all(speech.decoded == speech.frames for speech in outcome.requests)
    assert all(server.scheduler.pool.used == 0 and not server.requests for server in outcome.servers)


def test_affinity_saves_prompts() -> None:
    arrivals = TrafficPattern(rate=30, seconds=8, speech_seconds=1, voices=40).arrivals()
    saved = {}
    for strategy in ("round-robin", "voice-affinity"):
        each = scenario(*arrivals, servers=8, strategy=strategy)
        saved[strategy] = fleet_metrics(each, simulate(each), 1.0).prompt_saved
    assert saved["voice-affinity"] > 1.2 * saved["round-robin"]


def test_a_zone_that_is_gone_fails_who_was_heard_and_moves_who_was_not() -> None:
    # 12 requests on 2 GPUs of 4 slots: when the first zone goes, 4 of its 6 have been heard.
    outage = Outage(at=0.3, seconds=60.0)
    outcome = simulate(scenario(*[Arrival(0.0, 2.0)] * 12, servers=2, zones=2, strategy="round-robin", outage=outage))
    assert outcome.failed == 4
    assert [speech.moves for speech in outcome.requests].count(1) == 2
    assert len(outcome.latency()) == 8


def test_when_all_zones_are_gone_requests_wait_for_one_to_come_back() -> None:
    outcome = simulate(scenario(Arrival(1.0, 1.0), outage=Outage(at=0.5, seconds=10.0)))
    assert outcome.failed == 0
    assert (outcome.requests[0].first_audio or 0.0) > 10.5


def test_the_smallest_fleet_keeps_the_goal_and_one_gpu_less_does_not() -> None:
    arrivals = TrafficPattern(rate=12, seconds=6, speech_seconds=4, voices=5).arrivals()
    asked = scenario(*arrivals, strategy="least-connections")
    gpus = smallest_fleet(asked, goal=0.25)
    assert gpus > 1
    assert percentile(simulate(replace(asked, servers=gpus)).first_audio(), 0.95) <= 0.25
    assert percentile(simulate(replace(asked, servers=gpus - 1)).first_audio(), 0.95) > 0.25


def test_the_smallest_fleet_has_a_gpu_in_every_zone() -> None:
    assert smallest_fleet(scenario(Arrival(0.0, 1.0), zones=4), goal=5.0) == 4


def test_a_goal_that_no_fleet_keeps_is_told() -> None:
    with pytest.raises(InvalidRequest, match="1 ms"):
        smallest_fleet(scenario(Arrival(0.0, 1.0), Arrival(0.1, 1.0)), goal=0.001)


def test_a_fleet_too_large_for_one_balancer_is_to_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_GPUS", 3)
    with pytest.raises(InvalidRequest, match="3 GPUs behind one balancer are too few: divide the fleet with --cells"):
        smallest_fleet(scenario(*[Arrival(0.0, 1.0)] * 50), goal=0.04)


def test_traffic_has_its_rate_its_lengths_and_its_favourites() -> None:
    arrivals = TrafficPattern(rate=50, seconds=100, speech_seconds=6, voices=20, swing=0.5).arrivals()
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert sum(arrival.seconds for arrival in arrivals) / len(arrivals) == pytest.approx(6, rel=0.1)
    asked = [arrival.voice for arrival in arrivals]
    assert asked.count("voice-0") > 3 * asked.count("voice-9")
    first, second = (sum(half <= arrival.at < half + 50 for arrival in arrivals) for half in (0, 50))
    assert first > 1.5 * second
    assert arrivals == TrafficPattern(rate=50, seconds=100, speech_seconds=6, voices=20, swing=0.5).arrivals()


def evenness(arrivals: list[Arrival]) -> float:
    """Spread of the gaps between arrivals over their mean: 1 for those that know nothing of each other."""
    gaps = [later.at - sooner.at for sooner, later in itertools.pairwise(arrivals)]
    return statistics.pstdev(gaps) / statistics.mean(gaps)


def test_a_cell_gets_its_share_as_unevenly_as_all_of_it_comes() -> None:
    traffic = TrafficPattern(rate=100, seconds=200)
    arrivals = traffic.arrivals()
    for share_of_it in (sample_cell(arrivals, 20, seed=3), traffic.for_cell(20).arrivals()):
        assert len(share_of_it) == pytest.approx(len(arrivals) / 20, rel=0.1)
        assert evenness(share_of_it) == pytest.approx(1.0, abs=0.1)  # every twentieth would have 0.22
    assert sample_cell(arrivals, 20, seed=3) == sample_cell(arrivals, 20, seed=3)
    assert sample_cell(arrivals, 20, seed=3) != sample_cell(arrivals, 20, seed=4)
    assert sample_cell(arrivals, 1, seed=3) == arrivals


@pytest.mark.parametrize(("rate", "seconds"), [(1e9, 60.0), (1.0, 1e9), (float("inf"), 1.0), (float("nan"), 1.0)])
def test_traffic_that_cannot_be_simulated_is_refused_before_it_is_drawn(rate: float, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="lower --rate or --seconds, or raise --cells"):
        TrafficPattern(rate, seconds).arrivals()


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
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
    """As `shoal load` would have measured what became of those."""
    document = new_document("load", dict(describe_client()), {})
    told = []
    for number, speeches in enumerate(stages):
        outcomes = [
            {
                "due": each.arrival.at,
                "audio_seconds": each.frames / COSTS.frame_rate,
                "first_audio": (each.first_audio or 0.0) - each.arrival.at,
                "seconds": (each.ended or 0.0) - each.arrival.at,
                "error": None,
            }
            for each in reversed(speeches)  # as they end, not as they come
        ]
        told.append({"name": f"stage {number}", "outcomes": [*outcomes, {"due": 0.0, "error": "HTTP 429"}]})
    document["runs"].append({"name": "here", "stages": told})
    return document


def test_a_check_of_what_the_simulator_itself_would_measure_finds_nothing_off() -> None:
    arrivals = [
        replace(each, voice=None) for each in TrafficPattern(rate=3, seconds=30, speech_seconds=2, seed=5).arrivals()
    ]
    few, many = scenario(*arrivals[::4]), scenario(*arrivals)
    found = check(load_document(simulate(few).requests, simulate(many).requests), scenario())
    assert [each.figure for each in found] == ["first audio P50", "first audio P95", "speech P50", "speech P95"] * 2
    assert [each.requests for each in found] == [len(few.arrivals)] * 4 + [len(arrivals)] * 4
    assert all(each.off == pytest.approx(0.0, abs=1e-9) for each in found)
    # EngineCosts that are not those of the machine show.
    slower = replace(FLEET, costs=replace(COSTS, step=CostCurve(((1, 0.013),))))
    off = check(load_document(simulate(few).requests), replace(scenario(), fleet=slower))
    assert all(each.off > 0.2 for each in off if each.figure.startswith("speech"))


def test_only_a_load_test_of_one_server_can_be_checked() -> None:
    for wrong in (new_document("engine", {}, {}), new_document("load", {}, {})):
        with pytest.raises(InvalidRequest, match="shoal load --json"):
            check(wrong, scenario())
