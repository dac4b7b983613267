"""The command that puts a server under load."""

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Quiet
from shoal.cli.report_output import Html, JsonFile, Markdown, check_writable, report_output

if TYPE_CHECKING:
    from shoal.tools.bench.load.stage import LoadStage
    from shoal.tools.bench.load.summary import Objective

PANEL = "Measure"

Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="http://HOST:PORT, with or without the route.")]
Api = Annotated[str | None, typer.Option(help="openai or fish; by default what the route says, else openai.")]
FindRate = Annotated[bool, typer.Option("--find-rate", help="Search the highest rate that keeps the objective.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds without a byte after which a request failed.")]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(load)


def load(
    urls: Urls,
    compare: Annotated[bool, typer.Option("--compare", help="Two or more servers, side by side.")] = False,
    api: Api = None,
    rate: Annotated[str | None, typer.Option(help="Open loop, requests/s: 2, 1,2,4 (stages) or 1..8 (a ramp).")] = None,
    clients: Annotated[str | None, typer.Option(help="Closed loop, clients: 8, 1,4,16 or 1..16.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of every stage; hours for a soak.")] = 20.0,
    find_rate: FindRate = False,
    slo_first_audio: Annotated[float, typer.Option(min=1, help="Objective: first audio within so many ms,")] = 500.0,
    slo_buffer: Annotated[int, typer.Option(help="then none missing with a buffer of 50, 100 or 200 ms,")] = 100,
    slo_share: Annotated[float, typer.Option(min=0.01, max=1, help="for this share of requests.")] = 0.99,
    sentences: Annotated[int, typer.Option(min=1, max=100, help="Sentences per text.")] = 1,
    voice: Annotated[str | None, typer.Option(help="A voice the server knows.")] = None,
    model: Annotated[str | None, typer.Option(help="The model an OpenAI server is asked for.")] = None,
    key: Annotated[str | None, typer.Option(envvar="SHOAL_API_KEY", help="API key.")] = None,
    timeout: Timeout = 60.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before those that count.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same arrivals.")] = 0,
    json: JsonFile = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
) -> None:
    """Put a running server under load and report what its listeners hear: ours, or any with an OpenAI or Fish API.

    Ctrl-C keeps what was measured.

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
        stages=_stages(rate, clients, seconds, search=find_rate),
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
        raise typer.BadParameter("50, 100 or 200", param_hint="--slo-buffer")
    return Objective(first_audio / 1000, buffer / 1000, share)


def _stages(rate: str | None, clients: str | None, seconds: float, *, search: bool) -> "list[LoadStage]":
    """Those of a closed loop first; one request a second if nothing was said."""
    from shoal.tools.bench.load.stage import parse_stages

    if search and clients is not None:
        raise typer.BadParameter(
            "a rate is searched in open loop; --rate says where to begin", param_hint="--find-rate"
        )
    stages = parse_stages(clients, open=False, seconds=seconds) if clients else []
    if rate or not stages:
        stages += parse_stages(rate or "1", open=True, seconds=seconds)
    return stages
