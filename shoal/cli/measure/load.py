"""`shoal load`: load test of a running server."""

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Quiet
from shoal.cli.measure.report_output import Html, JsonFile, Markdown, check_writable, report_output

if TYPE_CHECKING:
    from shoal.tools.bench.load.stage import LoadStage
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
    typer.Option(help="Open loop: requests per second (Poisson), as 2, 1,2,4 (stages) or 1..8 (a ramp)."),
]
Clients = Annotated[
    str | None,
    typer.Option(help="Closed loop: clients that send one request after another, as 8, 1,4,16 or 1..16."),
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


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(load)


def load(
    urls: Urls,
    compare: Compare = False,
    api: Api = None,
    rate: Rate = None,
    clients: Clients = None,
    seconds: Seconds = None,
    requests: Requests = None,
    find_rate: FindRate = False,
    slo_first_audio: SloFirstAudio = 500.0,
    slo_buffer: SloBuffer = 100,
    slo_share: SloShare = 0.99,
    sentences: Sentences = 1,
    voice: Voice = None,
    model: Model = None,
    key: Key = None,
    timeout: Timeout = 60.0,
    warm_up: WarmUp = 2,
    seed: Seed = 0,
    json: JsonFile = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
) -> None:
    """Load-test a running server with an OpenAI or Fish API and report latency, throughput and playback stalls.

    After Ctrl-C the finished measurements are still reported.

    Example: shoal load http://127.0.0.1:8080 --clients 1,4,16

    Example: shoal load http://127.0.0.1:8080 --find-rate --slo-first-audio 300 --html load.html

    Example: shoal load --compare http://127.0.0.1:8080 http://127.0.0.1:8081/v1/tts --rate 1,2,4
    """
    check_writable(json, html, markdown)
    from shoal.tools.bench.load.client import parse_target
    from shoal.tools.bench.load.run import LoadPlan, run_load

    _check_servers(urls, compare)
    plan = LoadPlan(
        objective=_objective(slo_first_audio, slo_buffer, slo_share),
        stages=_stages(rate, clients, seconds, requests, search=find_rate),
        search=find_rate,
        warm_up=warm_up,
        sentences=sentences,
        timeout=timeout,
        seed=seed,
    )
    targets = [parse_target(url, api, model=model, voice=voice, key=key) for url in urls]
    report_output(run_load(targets, plan, progress=not quiet), json, html, markdown, quiet=quiet)


def _check_servers(urls: list[str], compare: bool) -> None:
    if len(urls) > 1 and not compare:
        raise typer.BadParameter("more than one server needs --compare")
    if compare and len(urls) < 2:
        raise typer.BadParameter("--compare takes two servers or more")


def _objective(first_audio: float, buffer: int, share: float) -> "Objective":
    from shoal.tools.bench.load.playback import BUFFERS
    from shoal.tools.bench.load.summary import Objective

    if buffer / 1000 not in BUFFERS:
        raise typer.BadParameter(f"{buffer} is not one of 50, 100 and 200", param_hint="--slo-buffer")
    return Objective(first_audio / 1000, buffer / 1000, share)


def _stages(
    rate: str | None, clients: str | None, seconds: float | None, requests: int | None, *, search: bool
) -> "list[LoadStage]":
    """Return the closed-loop stages, then the open-loop ones; one request per second if neither was given."""
    from shoal.tools.bench.load.stage import parse_stages

    if search and clients is not None:
        raise typer.BadParameter(
            "the search is open-loop: give --rate as the starting rate, not --clients", param_hint="--find-rate"
        )
    if requests is not None and (search or (seconds is None and ".." in f"{rate} {clients}")):
        raise typer.BadParameter("the search, and a ramp without --seconds, need a duration", param_hint="--requests")
    limit = seconds or (DEFAULT_SECONDS if requests is None else NO_LIMIT_SECONDS)
    stages = parse_stages(clients, open=False, seconds=limit, requests=requests) if clients else []
    if rate or not stages:
        stages += parse_stages(rate or "1", open=True, seconds=limit, requests=requests)
    return stages
