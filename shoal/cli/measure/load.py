"""`shoal load`: load test of a running server."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flag_groups import with_groups
from shoal.cli.measure.report_output import ReportFlags

if TYPE_CHECKING:
    from shoal.tools.bench.load.stage import Arrivals, LoadStage
    from shoal.tools.bench.load.summary import Objective

PANEL = "Measure"
DEFAULT_SECONDS = 20.0
NO_LIMIT_SECONDS = 86_400.0  # duration of a stage that ends after a number of requests

Urls = Annotated[
    list[str], typer.Argument(metavar="URL...", help="Server to test: http://HOST:PORT, with or without the route.")
]
Api = Annotated[
    str | None,
    typer.Option(help="API of the server: openai or fish. Default: the API of the route in the URL, else openai."),
]
FindRate = Annotated[
    bool, typer.Option("--find-rate", help="Search for the highest request rate that meets the objective.")
]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds without receiving data after which a request counts as failed.")
]


Compare = Annotated[bool, typer.Option("--compare", help="Compare two or more servers.")]
Rate = Annotated[
    str | None,
    typer.Option(help="Open loop: requests per second (Poisson), such as 2, or 1,2,4 (stages), or 1..8 (a ramp)."),
]
Clients = Annotated[
    str | None,
    typer.Option(help="Closed loop: clients that send one request after another, such as 8, or 1,4,16, or 1..16."),
]
Burst = Annotated[
    str | None,
    typer.Option(
        help="Bursts: requests that start together; the next burst starts when all have ended. Such as 64, or 4,16,64."
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(min=0.1, help="Duration of every stage in seconds; use hours for a soak test. Default: 20."),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="End every stage after this many requests, or after --seconds if given.")
]
SloFirstAudio = Annotated[float, typer.Option(min=1, help="Objective: maximum time to first audio in milliseconds.")]
SloBuffer = Annotated[
    int,
    typer.Option(help="Objective: playback must not stall with a buffer of this many ms: 50, 100 or 200."),
]
SloShare = Annotated[
    float, typer.Option(min=0.01, max=1, help="Objective: share of requests that must meet both limits.")
]
Sentences = Annotated[int, typer.Option(min=1, max=100, help="Sentences per text.")]
Voice = Annotated[str | None, typer.Option(help="Voice to request from the server.")]
Model = Annotated[str | None, typer.Option(help="Model to request from an OpenAI server. Default: tts-1.")]
Key = Annotated[str | None, typer.Option(envvar="SHOAL_API_KEY", help="API key of the server.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Warm-up requests per server, not counted.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the arrival times.")]


@dataclass(frozen=True)
class LoadFlags:
    """Traffic of a load test."""

    rate: Rate = None
    clients: Clients = None
    burst: Burst = None
    seconds: Seconds = None
    requests: Requests = None
    find_rate: FindRate = False

    def stages(self) -> "list[LoadStage]":
        """Return the stages: closed loop, bursts, then open loop; one request per second if none was given."""
        from shoal.tools.bench.load.stage import parse_stages

        self._check()
        limit = self.seconds or (DEFAULT_SECONDS if self.requests is None else NO_LIMIT_SECONDS)
        given: list[tuple[Arrivals, str | None]] = [
            ("closed", self.clients),
            ("burst", self.burst),
            ("open", self.rate),
        ]
        stages: list[LoadStage] = []
        for arrivals, text in given:
            if text:
                stages += parse_stages(text, arrivals, seconds=limit, requests=self.requests)
        return stages or parse_stages("1", "open", seconds=limit, requests=self.requests)

    def _check(self) -> None:
        if self.find_rate and (self.clients or self.burst) is not None:
            raise typer.BadParameter(
                "the search is open-loop: give --rate as the starting rate, not --clients or --burst",
                param_hint="--find-rate",
            )
        endless_ramp = self.seconds is None and ".." in f"{self.rate} {self.clients}"
        if self.requests is not None and (self.find_rate or endless_ramp):
            raise typer.BadParameter(
                "the search, and a ramp without --seconds, need a duration", param_hint="--requests"
            )


@dataclass(frozen=True)
class ObjectiveFlags:
    """Service level objective of a load test."""

    slo_first_audio: SloFirstAudio = 500.0
    slo_buffer: SloBuffer = 100
    slo_share: SloShare = 0.99

    def objective(self) -> "Objective":
        from shoal.tools.bench.load.playback import BUFFERS
        from shoal.tools.bench.load.summary import Objective

        if self.slo_buffer / 1000 not in BUFFERS:
            raise typer.BadParameter(f"{self.slo_buffer} is not one of 50, 100 and 200", param_hint="--slo-buffer")
        return Objective(self.slo_first_audio / 1000, self.slo_buffer / 1000, self.slo_share)


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(with_groups(load))


def load(
    urls: Urls,
    compare: Compare = False,
    api: Api = None,
    *,
    traffic: LoadFlags,
    slo: ObjectiveFlags,
    sentences: Sentences = 1,
    voice: Voice = None,
    model: Model = None,
    key: Key = None,
    timeout: Timeout = 60.0,
    warm_up: WarmUp = 2,
    seed: Seed = 0,
    report: ReportFlags,
) -> None:
    """Load-test a running server with an OpenAI or Fish API and report latency, throughput and playback stalls.

    After Ctrl-C the finished measurements are still reported.

    Example: shoal load http://127.0.0.1:8080 --clients 1,4,16

    Example: shoal load http://127.0.0.1:8080 --burst 16,64 --requests 640

    Example: shoal load http://127.0.0.1:8080 --find-rate --slo-first-audio 300 --html load.html

    Example: shoal load --compare http://127.0.0.1:8080 http://127.0.0.1:8081/v1/tts --rate 1,2,4
    """
    report.check_writable()
    from shoal.tools.bench.load.client import parse_target
    from shoal.tools.bench.load.run import LoadPlan, run_load

    _check_servers(urls, compare)
    plan = LoadPlan(
        objective=slo.objective(),
        stages=traffic.stages(),
        search=traffic.find_rate,
        warm_up=warm_up,
        sentences=sentences,
        timeout=timeout,
        seed=seed,
    )
    targets = [parse_target(url, api, model=model, voice=voice, key=key) for url in urls]
    report.write(run_load(targets, plan, progress=not report.quiet))


def _check_servers(urls: list[str], compare: bool) -> None:
    if len(urls) > 1 and not compare:
        raise typer.BadParameter("more than one server needs --compare")
    if compare and len(urls) < 2:
        raise typer.BadParameter("--compare takes two servers or more")
