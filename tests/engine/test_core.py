"""The engine gives the output of `generate`, independent of batch, memory pressure and scheduling."""

import inspect
import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore, block_count
from shoal.engine.execution.fallback import FallbackRunner
from shoal.engine.kv_cache import PagedKV
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.scheduler import StepOutput
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Event, Turn, Utterance
from shoal.errors import DeadlineExceeded, DeviceFailed, InvalidRequest, TextError
from shoal.speech import FinishReason, SamplingParams
from shoal.voices.voice import Voice
from tests.engine.clock import FakeClock
from tests.engine.oracle import Oracle, Received, StepDriver, assert_nothing_leaked, run_with_lag

# Random weights generate noise, so the speech guard is off.
PLAIN = EngineConfig(slots=8, guard=False)
SHORT = SamplingParams(seed=3, max_frames=7)


@dataclass
class TimedRequest:
    """A request and the step at which it arrives."""

    turns: list[Turn]
    sampling: SamplingParams
    at: int = 0

    def utterance(self, id: int, *, whole: bool = False) -> Utterance:
        return Utterance(id, self.turns, self.sampling, whole=whole)


def timed_requests(checkpoint: Checkpoint, voice: Voice, count: int = 17) -> list[TimedRequest]:
    """Return requests of many lengths and settings, some with a voice; three arrive per step."""
    chosen = random.Random(count)
    return [
        TimedRequest(
            build_turns("word " * chosen.randint(1, 12) + str(number), voice if number % 3 else None, checkpoint),
            SamplingParams(
                temperature=chosen.choice([0.5, 0.8, 1.0]),
                top_p=chosen.choice([0.7, 0.8, 0.95]),
                top_k=chosen.choice([0, 5, 30]),
                repetition_penalty=chosen.choice([1.0, 1.1, 1.5]),
                repetition=chosen.choice(["upstream", "window"]),
                seed=chosen.randrange(2**64),
                max_frames=chosen.choice([1, 2, 5, 9, 18]),
            ),
            at=number // 3,
        )
        for number in range(count)
    ]


def run_requests(core: EngineCore, program: list[TimedRequest]) -> list[Received]:
    """Submit each request at its step, run all to their end and check that nothing leaked."""
    driver = StepDriver(core)
    received: list[Received] = []
    step = 0
    while len(received) < len(program) or not core.idle:
        while len(received) < len(program) and program[len(received)].at <= step:
            number = len(received)
            received.append(driver.add(program[number].utterance(number, whole=number % 2 == 0)))
        driver.step()
        step += 1
    assert_nothing_leaked(core)
    assert [each.ends for each in received] == [1] * len(program)
    return received


def blocks_bytes(checkpoint: Checkpoint, blocks: int, size: int = PLAIN.block_size) -> int:
    return blocks * PagedKV.bytes_per_block(checkpoint.model.config.slow, size, checkpoint.model.dtype)


def check(core: EngineCore, program: list[TimedRequest], oracle: Oracle) -> None:
    wrong = [
        number
        for number, (received, request) in enumerate(zip(run_requests(core, program), program, strict=True))
        if not received.equals(oracle.speak(request.turns, request.sampling))
    ]
    assert not wrong


def test_a_step_fits_on_one_screen() -> None:
    assert len(inspect.getsource(EngineCore.step).splitlines()) <= 12


def test_one_utterance_equals_generate(either: Oracle, voice: Voice) -> None:
    turns = build_turns("hello there", voice, either.checkpoint)
    check(EngineCore(either.checkpoint, PLAIN), [TimedRequest(turns, SamplingParams(seed=1, max_frames=30))], either)


def test_seventeen_concurrent_utterances_equal_generate(either: Oracle, voice: Voice) -> None:
    check(EngineCore(either.checkpoint, PLAIN), timed_requests(either.checkpoint, voice), either)


def test_seventeen_utterances_of_the_golden_models_equal_generate(golden_oracle: Oracle, voice: Voice) -> None:
    checkpoint = golden_oracle.checkpoint
    program = [
        # Frames of the stored codec are long and slow to decode.
        replace(request, sampling=replace(request.sampling, max_frames=1 + number % 6))
        for number, request in enumerate(timed_requests(checkpoint, voice))
    ]
    check(EngineCore(checkpoint, PLAIN), program, golden_oracle)


def test_output_is_the_same_without_the_prefix_cache(either: Oracle, voice: Voice) -> None:
    core = EngineCore(either.checkpoint, replace(PLAIN, prefix_cache=False))
    check(core, timed_requests(either.checkpoint, voice), either)
    assert core.pool.stats.hits == 0


def test_output_is_the_same_with_a_prefix_computed_by_another_sequence(either: Oracle, voice: Voice) -> None:
    core = EngineCore(either.checkpoint, PLAIN)
    program = timed_requests(either.checkpoint, voice)
    check(core, program, either)
    before = core.pool.stats.tokens_saved
    check(core, program, either)
    assert core.pool.stats.tokens_saved > before + sum(len(request.turns[0].prompt) - 16 for request in program) / 2


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("backend", ["eager", "native", "plain-graph"])
def test_requests_that_arrive_together_compute_the_prefix_of_their_voice_once(
    either: Oracle, voice: Voice, backend: str, lag: int
) -> None:
    core = EngineCore(either.checkpoint, replace(PLAIN, backend=backend))
    run_with_lag(core, lag)
    program = [
        TimedRequest(build_turns(f"word {number}", voice, either.checkpoint), replace(SHORT, seed=number))
        for number in range(6)
    ]
    check(core, program, either)
    shared = len(program[0].turns[0].prefix) // PLAIN.block_size * PLAIN.block_size  # type: ignore[arg-type]
    assert shared > 0
    assert core.pool.stats.tokens_saved >= 5 * shared


def test_audio_is_emitted_while_the_device_computes_the_next_frames(oracle: Oracle) -> None:
    core = EngineCore(oracle.checkpoint, PLAIN)
    run_with_lag(core, 1)
    turns = build_turns("hello there", None, oracle.checkpoint)
    core.add(utterance := Utterance(0, turns, SamplingParams(seed=1, max_frames=8)))
    order, emitted, wait = list[str](), list[Event](), core.runner.runner.wait

    def waited(*, drain: bool) -> StepOutput:
        order.append("wait")
        return wait(drain=drain)

    def emit(event: Event) -> None:
        order.append("emit")
        emitted.append(event)

    core.runner.runner.wait = waited  # type: ignore[method-assign]
    returned = []
    while not core.idle:
        order.append("step")
        returned += core.step(emit)
    assert returned == []
    assert [event.last for event in emitted] == [False] * (len(emitted) - 1) + [True]
    steps = [step.split() for step in " ".join(order).split("step")]
    both = [step for step in steps if "emit" in step and "wait" in step]
    assert both
    assert all(step.index("emit") < step.index("wait") for step in both)
    received = Received(utterance, [event.chunk_or_raise().samples for event in emitted], FinishReason.LENGTH)
    assert received.equals(oracle.speak(turns, SamplingParams(seed=1, max_frames=8)))


@pytest.mark.parametrize(
    ("backend", "token_seconds", "pauses"),
    [
        *((backend, 1e-5, True) for backend in ("eager", "native", "plain-graph")),
        ("native", 1e-2, False),
        ("native", math.inf, False),
    ],
)
def test_output_is_the_same_while_frames_wait_for_the_prompts_of_a_burst(
    either: Oracle, voice: Voice, monkeypatch: pytest.MonkeyPatch, backend: str, token_seconds: float, pauses: bool
) -> None:
    """Frames wait only where the backend computes the prompts of a step in a quarter of a frame."""
    monkeypatch.setattr(FallbackRunner, "token_seconds", token_seconds)
    core = EngineCore(either.checkpoint, replace(PLAIN, token_budget=7, backend=backend))
    run_with_lag(core, 1)
    waited = list[bool]()
    postpone = core.scheduler._postpone_frames

    def note(eligible: list[Sequence], budget: int) -> bool:
        waited.append(postpone(eligible, budget))
        return waited[-1]

    core.scheduler._postpone_frames = note  # type: ignore[method-assign]
    check(core, timed_requests(either.checkpoint, voice)[:7], either)
    assert any(waited) == pauses
    assert not all(waited)


@pytest.mark.parametrize("host_blocks", [0, 400])
def test_output_is_the_same_after_preemption(either: Oracle, voice: Voice, host_blocks: int) -> None:
    checkpoint = either.checkpoint
    program = [
        replace(request, sampling=replace(request.sampling, max_frames=14))
        for request in timed_requests(checkpoint, voice)[:6]
    ]
    size = 4
    longest = max(len(request.turns[0].prompt) for request in program) + 14
    few = blocks_bytes(checkpoint, -(-longest // size) + 8, size)
    config = replace(PLAIN, block_size=size, kv_bytes=few, host_kv_bytes=blocks_bytes(checkpoint, host_blocks, size))
    core = EngineCore(checkpoint, config)
    for _ in range(2):
        check(core, program, either)
    assert core.scheduler.stats.preempted > 0
    assert core.pool.stats.evictions > 0
    assert (core.pool.stats.host_hits > 0) == (host_blocks > 0)


@pytest.mark.parametrize("budget", [1, 3, 7, 37])
def test_output_is_the_same_for_every_token_budget(either: Oracle, voice: Voice, budget: int) -> None:
    program = timed_requests(either.checkpoint, voice)[:5]
    check(EngineCore(either.checkpoint, replace(PLAIN, token_budget=budget)), program, either)


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_output_is_the_same_under_every_policy(oracle: Oracle, voice: Voice, policy: str) -> None:
    config = replace(PLAIN, policy=policy, batch_seconds=0.0)  # type: ignore[arg-type]
    check(EngineCore(oracle.checkpoint, config), timed_requests(oracle.checkpoint, voice)[:7], oracle)


def test_output_is_the_same_for_other_block_and_chunk_sizes(oracle: Oracle, voice: Voice) -> None:
    config = replace(PLAIN, block_size=5, slots=3, first_chunk_frames=1, max_chunk_frames=3)
    check(EngineCore(oracle.checkpoint, config), timed_requests(oracle.checkpoint, voice)[:7], oracle)


def test_a_new_engine_gives_the_same_output(either: Oracle, voice: Voice) -> None:
    program = timed_requests(either.checkpoint, voice)[:4]
    core = EngineCore(either.checkpoint, PLAIN)
    driver = StepDriver(core)
    for number, request in enumerate(program):
        driver.add(request.utterance(number))
    for _ in range(3):
        driver.step()
    # The first engine is dropped in the middle; another one runs the requests.
    check(EngineCore(either.checkpoint, PLAIN), program, either)


def test_every_turn_of_a_long_text_continues_the_ones_before(either: Oracle, voice: Voice) -> None:
    turns = build_turns("One thing. Another thing. A third thing.", voice, either.checkpoint, chunk_bytes=16)
    assert len(turns) == 3
    program = [TimedRequest(turns, SamplingParams(seed=seed, max_frames=5 + seed), at=seed) for seed in range(3)]
    check(EngineCore(either.checkpoint, PLAIN), program, either)


def test_preempted_turns_are_recomputed_to_the_same_result(oracle: Oracle, voice: Voice) -> None:
    turns = build_turns("One thing. Another thing. A third thing.", voice, oracle.checkpoint, chunk_bytes=16)
    program = [TimedRequest(turns, SamplingParams(seed=seed, max_frames=5 + seed)) for seed in range(3)]
    config = replace(PLAIN, kv_bytes=blocks_bytes(oracle.checkpoint, 17), token_budget=31)
    core = EngineCore(oracle.checkpoint, config)
    check(core, program, oracle)
    assert core.scheduler.stats.preempted > 0


def test_earlier_turns_that_no_longer_fit_are_dropped(either: Oracle, voice: Voice) -> None:
    turns = build_turns("One thing. Another thing. A third thing.", voice, either.checkpoint, chunk_bytes=16)
    carried = len(turns[0].prompt) + len(turns[1].continuation) + 8
    config = replace(PLAIN, context_tokens=carried)
    oracle = Oracle(either.checkpoint, carried)
    request = TimedRequest(turns, SamplingParams(seed=1, max_frames=6))
    check(EngineCore(either.checkpoint, config), [request, replace(request, at=2)], oracle)
    assert not np.array_equal(
        oracle.speak(turns, request.sampling).codes[:, -1], either.speak(turns, request.sampling).codes[:, -1]
    )


def test_a_turn_that_does_not_fit_the_kv_cache_restarts_from_the_voice(oracle: Oracle) -> None:
    checkpoint = oracle.checkpoint
    turns = build_turns("One thing. Another thing.", None, checkpoint, chunk_bytes=16)
    most = len(turns[1].prompt) + 20
    core = EngineCore(checkpoint, replace(PLAIN, kv_bytes=blocks_bytes(checkpoint, -(-most // 16))))
    received = run_requests(core, [TimedRequest(turns, SamplingParams(seed=1, max_frames=20))])[0]
    fresh = oracle.speak([turns[1]], Utterance(0, turns, SamplingParams(seed=1, max_frames=20), turn=1).turn_sampling())
    assert np.array_equal(received.codes[:, -fresh.codes.shape[1] :], fresh.codes)


def test_max_frames_1_gives_one_frame(either: Oracle) -> None:
    turns = build_turns("hello", None, either.checkpoint)
    [received] = run_requests(
        EngineCore(either.checkpoint, PLAIN), [TimedRequest(turns, SamplingParams(seed=4, max_frames=1))]
    )
    assert received.codes.shape[1] == 1
    assert received.finish is FinishReason.LENGTH
    assert received.equals(either.speak(turns, SamplingParams(seed=4, max_frames=1)))


def short_context(checkpoint: Checkpoint, tokens: int) -> Checkpoint:
    """Return the same model with a shorter context."""
    model = checkpoint.model
    slow = replace(model.config.slow, max_seq_len=tokens)
    smaller = type(model)(replace(model.config, slow=slow))
    smaller.load_state_dict(model.state_dict())
    return replace(checkpoint, model=smaller.eval())


def test_without_a_limit_the_context_is_filled_and_not_overrun(tiny: Checkpoint) -> None:
    checkpoint = short_context(tiny, 32)
    oracle = Oracle(checkpoint)
    turns = build_turns("hi", None, checkpoint)
    program = [TimedRequest(turns, SamplingParams(seed=seed, max_frames=0)) for seed in range(2)]
    core = EngineCore(checkpoint, PLAIN)
    check(core, program, oracle)
    assert oracle.speak(turns, program[0].sampling).codes.shape[1] == 32 - len(turns[0].prompt)


def louder_stop(checkpoint: Checkpoint, times: float) -> Checkpoint:
    """Return the same model with a more likely stop token."""
    model = type(checkpoint.model)(checkpoint.model.config)
    model.load_state_dict(checkpoint.model.state_dict())
    model.slow.output.weight.requires_grad_(False)[model.config.stop_id] *= times
    return replace(checkpoint, model=model.eval())


def test_a_stop_at_the_very_first_token_is_an_empty_speech(tiny: Checkpoint) -> None:
    checkpoint = louder_stop(tiny, 50.0)
    oracle = Oracle(checkpoint)
    program = [
        TimedRequest(build_turns(word, None, checkpoint), SamplingParams(max_frames=4)) for word in ("a", "b", "c", "d")
    ]
    program = [request for request in program if not oracle.speak(request.turns, request.sampling).codes.size]
    assert program
    for received in run_requests(EngineCore(checkpoint, PLAIN), program):
        assert (received.finish, received.codes.shape, len(received.samples)) == (FinishReason.STOP, (10, 0), 0)


def test_a_stop_token_ends_the_turn_and_starts_the_next(tiny: Checkpoint) -> None:
    checkpoint = louder_stop(tiny, 3.0)
    oracle = Oracle(checkpoint)
    turns = build_turns("One thing. Another thing.", None, checkpoint, chunk_bytes=16)
    program = [
        TimedRequest(turns, SamplingParams(seed=seed, temperature=1.5, top_p=0.98, max_frames=8)) for seed in range(6)
    ]
    check(EngineCore(checkpoint, PLAIN), program, oracle)
    frames = [oracle.speak(request.turns, request.sampling).codes.shape[1] for request in program]
    assert min(frames) < 16


def test_streamed_and_whole_utterances_have_the_same_samples(oracle: Oracle) -> None:
    turns = build_turns("hello there", None, oracle.checkpoint)
    driver = StepDriver(EngineCore(oracle.checkpoint, PLAIN))
    sampling = SamplingParams(seed=5, max_frames=20)
    streamed, whole = (
        driver.add(Utterance(id, turns, sampling, whole=whole)) for id, whole in enumerate((False, True))
    )
    driver.run()
    assert len(streamed.chunks) > 3
    assert len(whole.chunks) == 1
    assert np.allclose(streamed.samples, whole.samples, atol=1e-6)


def test_a_prompt_longer_than_the_model_takes_is_refused(tiny: Checkpoint) -> None:
    core = EngineCore(tiny, PLAIN)
    with pytest.raises(TextError, match="shorten the text"):
        core.add(Utterance(0, build_turns("word " * 400, None, tiny, chunk_bytes=4000), SHORT))
    assert_nothing_leaked(core)


def test_a_request_larger_than_the_kv_cache_is_refused(tiny: Checkpoint) -> None:
    core = EngineCore(
        tiny, replace(PLAIN, kv_bytes=4 * PagedKV.bytes_per_block(tiny.model.config.slow, 16, tiny.model.dtype))
    )
    with pytest.raises(InvalidRequest, match="do not fit the KV cache"):
        core.add(Utterance(0, build_turns("hello", None, tiny), SamplingParams(max_frames=100)))
    assert_nothing_leaked(core)


def test_a_cancelled_utterance_is_released_within_one_step(oracle: Oracle, voice: Voice) -> None:
    core = EngineCore(oracle.checkpoint, replace(PLAIN, prefix_cache=False))
    turns = build_turns("hello", voice, oracle.checkpoint)
    driver = StepDriver(core)
    stays = driver.add(Utterance(0, turns, SHORT))
    leaves = driver.add(Utterance(1, turns, SHORT))
    for _ in range(3):
        driver.step()
    used = core.pool.used
    core.cancel(leaves.utterance)
    core.cancel(leaves.utterance)
    assert core.pool.used == used // 2
    assert len(core.scheduler._free_slots) == 7
    driver.run()
    assert stays.equals(oracle.speak(turns, SHORT))
    assert leaves.ends == 0


def test_waiting_and_running_utterances_expire_at_their_deadline(oracle: Oracle) -> None:
    clock = FakeClock()
    core = EngineCore(oracle.checkpoint, replace(PLAIN, slots=1), clock)
    turns = build_turns("hello", None, oracle.checkpoint)
    driver = StepDriver(core)
    first = driver.add(Utterance(0, turns, SHORT, deadline=clock.now + 5))
    second = driver.add(Utterance(1, turns, SHORT, deadline=clock.now + 5))
    third = driver.add(Utterance(2, turns, SHORT))
    driver.step()
    clock.now += 6
    driver.step()
    for late in (first, second):
        assert isinstance(late.error, DeadlineExceeded)
        assert late.ends == 1
    driver.run()
    assert third.equals(oracle.speak(turns, SHORT))
    assert_nothing_leaked(core)


def test_the_kv_cache_is_at_most_what_all_slots_can_fill(tiny: Checkpoint) -> None:
    assert block_count(tiny, replace(PLAIN, slots=2)) == 2 * 2048 // 16


def test_a_kv_cache_smaller_than_one_block_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match="does not hold one block"):
        block_count(tiny, replace(PLAIN, kv_bytes=100))


def test_warm_up_resets_caches_and_stats(tiny: Checkpoint) -> None:
    core = EngineCore(tiny, EngineConfig(slots=2, guard=True))
    core.warm_up()
    assert core.idle
    assert core.pool.available == core.pool.count
    assert core.pool.cached == 0
    assert (core.stats.steps, core.tracker.stats.frames, core.scheduler.stats.admitted, core.pool.stats.hits) == (
        0,
        0,
        0,
        0,
    )


def test_warm_up_raises_if_the_model_does_not_run(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(tiny, EngineConfig(slots=2, guard=False))

    def refuse(batch: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(core.runner, "launch", refuse)
    with pytest.raises(DeviceFailed):
        core.warm_up()
