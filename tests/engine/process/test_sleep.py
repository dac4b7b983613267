"""An engine process that ends when it is idle and starts again with the next request."""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine.process import supervisor as supervisor_module
from shoal.engine.process.messages import Close, Command, Failed, GetStats, Ready, Result, Speak
from shoal.engine.process.supervisor import Supervisor, SupervisorConfig
from shoal.engine.process.worker import EngineSource
from shoal.errors import EngineStopped
from shoal.speech import SpeechRequest
from tests.waiting import wait_until

IDLE = SupervisorConfig(sleep_seconds=0.05, longest_pause=0.1)
LONG_AGO = -math.inf  # time of the last job; 0 would be recent on a machine that has just booted


class FakeProcess:
    """Engine process without a process: tests decide when it is ready, answers and exits."""

    made: "list[FakeProcess]"
    starts: threading.Event  # set: new processes become ready at once
    broken = False  # new processes exit instead of becoming ready

    def __init__(self, source: EngineSource, on_reply: Callable[..., None]) -> None:
        self.process = SimpleNamespace(pid=len(self.made) + 1)
        self.jobs: dict[int, Any] = {}
        self.model_info: Any = None
        self.start_error: EngineStopped | None = None
        self.blamed = None
        self.progress = self.last_reply = self.busy = time.monotonic()
        self.exited, self.commands, self._on_reply = threading.Event(), [], on_reply
        self.made.append(self)
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        self.starts.wait()
        if self.broken:
            self.exit()
        else:
            self._on_reply(self, 0, Ready(SimpleNamespace(backends=None)))  # type: ignore[arg-type]

    @property
    def alive(self) -> bool:
        return not self.exited.is_set()

    def send(self, job: int, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, Close):
            threading.Thread(target=self.exit, daemon=True).start()
        elif isinstance(command, GetStats):
            threading.Thread(target=self.answer, args=(job, {"live": 0}), daemon=True).start()

    def answer(self, job: int, value: object) -> None:
        self._on_reply(self, job, Result(value))

    def answer_all(self) -> None:
        for job in list(self.jobs):
            self.answer(job, "done")

    def exit(self) -> None:
        self.exited.set()
        self._on_reply(self, 0, Failed(EngineStopped("the engine process exited")))

    kill = exit

    def join(self, timeout: float | None = None) -> bool:
        return self.exited.wait(timeout)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    made: list[FakeProcess] = []
    monkeypatch.setattr(FakeProcess, "made", made, raising=False)
    monkeypatch.setattr(FakeProcess, "starts", threading.Event(), raising=False)
    monkeypatch.setattr(FakeProcess, "broken", False)
    monkeypatch.setattr(supervisor_module, "EngineProcess", FakeProcess)
    FakeProcess.starts.set()
    return made


@contextmanager
def supervising(config: SupervisorConfig = IDLE) -> Iterator[Supervisor]:
    supervisor = Supervisor(EngineSource("random:tiny"), config)
    supervisor.start()
    try:
        yield supervisor
    finally:
        FakeProcess.starts.set()
        supervisor.close()


def ask(supervisor: Supervisor) -> "tuple[threading.Thread, list[object]]":
    """Submit a job from a thread; its answer or error is put into the list."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(supervisor._ask(Speak(SpeechRequest("Hello."), None)))
        except EngineStopped as problem:
            answers.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def fall_asleep(supervisor: Supervisor) -> None:
    wait_until(lambda: supervisor.activity == "asleep")


def test_an_idle_engine_sleeps_and_the_next_request_wakes_it(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        fall_asleep(supervisor)
        wait_until(lambda: not processes[0].alive)
        assert supervisor.ready
        assert supervisor.statistics() == {"restarts": 0, "wakes": 0, "asleep": 1}
        thread, answers = ask(supervisor)
        wait_until(lambda: len(processes) == 2 and processes[1].jobs)
        assert (supervisor.activity, supervisor.wakes, supervisor.restarts) == ("awake", 1, 0)
        assert supervisor.statistics()["live"] == 0
        processes[1].answer_all()
        thread.join(240)
        assert answers == ["done"]
        fall_asleep(supervisor)


def test_requests_that_arrive_while_it_wakes_wait(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        fall_asleep(supervisor)
        FakeProcess.starts.clear()
        first = ask(supervisor)
        wait_until(lambda: supervisor.activity == "waking")
        second = ask(supervisor)
        wait_until(lambda: len(supervisor._queued) == 2)
        assert supervisor.ready
        FakeProcess.starts.set()
        wait_until(lambda: len(processes[1].jobs) == 2)
        processes[1].answer_all()
        for thread, answers in (first, second):
            thread.join(240)
            assert answers == ["done"]
        assert supervisor.wakes == 1


def test_an_engine_with_a_job_does_not_sleep(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        thread, _ = ask(supervisor)
        wait_until(lambda: any(process.jobs for process in processes))
        busy = processes[-1]
        supervisor._used = LONG_AGO
        assert not supervisor._fall_asleep()
        busy.answer_all()
        thread.join(240)
        fall_asleep(supervisor)


def test_an_engine_is_not_put_to_sleep_during_a_reload(processes: list[FakeProcess]) -> None:
    with supervising(SupervisorConfig(sleep_seconds=1000.0)) as supervisor:
        FakeProcess.starts.clear()
        reload = threading.Thread(target=supervisor.reload, args=(supervisor.source,))
        reload.start()
        wait_until(lambda: len(processes) == 2)
        wait_until(lambda: supervisor._starting)
        supervisor._used = LONG_AGO
        assert not supervisor._fall_asleep()
        FakeProcess.starts.set()
        reload.join(240)
        assert supervisor.process_id == 2
        assert not supervisor._fall_asleep()  # a new engine has its time


def test_a_reload_wakes_a_sleeping_engine(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        fall_asleep(supervisor)
        supervisor.config = SupervisorConfig(sleep_seconds=1000.0)
        supervisor.reload(supervisor.source)
        assert (supervisor.activity, supervisor.process_id, supervisor.wakes) == ("awake", 2, 0)


def test_an_engine_that_a_reload_replaced_is_not_restarted(
    processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[None] = []
    monkeypatch.setattr(Supervisor, "_kill_hanging", lambda self, checked: rounds.append(None))
    with supervising(SupervisorConfig(sleep_seconds=1000.0)) as supervisor:
        supervisor.reload(supervisor.source)
        wait_until(lambda: not processes[0].alive)
        begun = len(rounds)
        wait_until(lambda: len(rounds) >= begun + 3)  # the monitor has seen that the first process exited
        assert (supervisor.restarts, supervisor.process_id, len(processes)) == (0, 2, 2)


def test_a_sleeping_engine_is_not_restarted_and_a_dead_one_is(processes: list[FakeProcess]) -> None:
    with supervising(SupervisorConfig(sleep_seconds=1000.0)) as supervisor:
        processes[0].exit()
        wait_until(lambda: len(processes) == 2 and supervisor.ready)
        assert supervisor.restarts == 1
        supervisor._used = LONG_AGO
        fall_asleep(supervisor)
        wait_until(lambda: not processes[1].alive)
        assert (len(processes), supervisor.restarts) == (2, 1)


def test_statistics_keep_no_engine_awake_and_wake_none(processes: list[FakeProcess]) -> None:
    with supervising(SupervisorConfig(sleep_seconds=1000.0)) as supervisor:
        used = supervisor._used
        assert supervisor.statistics() == {"live": 0, "restarts": 0, "wakes": 0, "asleep": 0}
        assert supervisor._used == used


def test_an_engine_that_cannot_wake_fails_its_requests_and_is_tried_again(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        fall_asleep(supervisor)
        FakeProcess.broken = True
        thread, answers = ask(supervisor)
        thread.join(240)
        assert isinstance(answers[0], EngineStopped)
        FakeProcess.broken = False
        wait_until(lambda: supervisor.restarts > 0 and supervisor.ready)


def test_a_sleeping_supervisor_closes_and_refuses_jobs(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        fall_asleep(supervisor)
        supervisor.close()
        assert not supervisor.ready
        with pytest.raises(EngineStopped, match="closed"):
            asyncio.run(supervisor.aencode(b""))
        supervisor._monitor_thread.join(240)
        assert not supervisor._monitor_thread.is_alive()


def test_closing_while_it_wakes_fails_the_waiting_request(processes: list[FakeProcess]) -> None:
    with supervising() as supervisor:
        fall_asleep(supervisor)
        FakeProcess.starts.clear()
        thread, answers = ask(supervisor)
        wait_until(lambda: supervisor.activity == "waking" and bool(supervisor._starting))
        supervisor.close()
        thread.join(240)
        assert isinstance(answers[0], EngineStopped)


def test_without_the_setting_an_engine_never_sleeps(processes: list[FakeProcess]) -> None:
    with supervising(SupervisorConfig()) as supervisor:
        supervisor._used = LONG_AGO
        assert not supervisor._fall_asleep()
        assert supervisor.activity == "awake"


def test_an_engine_that_was_stopped_together_with_the_server_is_not_killed(
    processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-Z, or by pausing the container: the clock goes on, and the engine has had no chance to report."""
    paused, checks = [0.0], Counter[str]()

    def monotonic() -> float:
        checks[threading.current_thread().name] += 1
        return time.monotonic() + paused[0]

    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with supervising(SupervisorConfig(hang_seconds=60.0)) as supervisor:
        thread, answers = ask(supervisor)
        wait_until(lambda: processes[0].jobs)
        paused[0] = 3600.0
        before = checks["shoal-monitor"]
        wait_until(lambda: checks["shoal-monitor"] > before + 20)
        assert processes[0].alive
        processes[0].answer_all()
        thread.join(240)
        assert (answers, supervisor.restarts) == (["done"], 0)
