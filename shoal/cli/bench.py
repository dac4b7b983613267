"""Commands that measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.flags import Device, Quiet
from shoal.cli.report_output import Html, JsonFile, Markdown, check_writable, report_output

PANEL = "Measure"

Model = Annotated[str, typer.Option(help="nano, s1-mini, s2-pro, OWNER/NAME, a directory or random:tiny.")]
Configurations = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="NAME", help="bf16, int8, eager, static ..., NAME=VALUE,..., or all."),
]

Voices = Annotated[str, typer.Option(help="Batch sizes: how many speak at one time.")]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Measure how fast, and how well, this machine speaks.")
    group.callback(invoke_without_command=True)(bench)
    group.command()(engine)
    group.command()(quality)
    group.command()(scaling)
    app.add_typer(group, name="bench", rich_help_panel=PANEL)


def bench(
    context: typer.Context,
    model: Model = "nano",
    device: Device = "auto",
    config: Configurations = None,
    voices: Voices = "1,4,16",
    samples: Annotated[int, typer.Option(min=1, help="Times every text is said.")] = 5,
    texts: Annotated[int, typer.Option(min=1, help="Texts; at least one for each voice.")] = 4,
    sentences: Annotated[int, typer.Option(min=1, max=100, help="Sentences per text.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before those that count.")] = 1,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="The same texts in every round, so that caches help.")
    ] = False,
    voice: Annotated[str | None, typer.Option(help="A stored voice.")] = None,
    edge_cases: Annotated[bool, typer.Option(help="Also one word, and 5,000 characters.")] = True,
    price: Annotated[float | None, typer.Option(min=0, help="What an hour of this machine costs.")] = None,
    currency: Annotated[str, typer.Option(help="In what.")] = "USD",
    quick: Annotated[bool, typer.Option("--quick", help="A few frames of everything, no cold start.")] = False,
    json: JsonFile = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
) -> None:
    """Measure how fast, and how well, this machine speaks.

    Without a command: the same texts under every configuration, each in a process of its own. Ctrl-C keeps what was
    measured.

    Example: shoal bench --model random:tiny --config all --html report.html

    Example: shoal bench --model s1-mini -c bf16 -c int8 --voices 1,8,32 --price 3.5 --json run.json
    """
    if context.invoked_subcommand is not None:
        _refuse_flags(context)
        return
    check_writable(json, html, markdown)
    from shoal.tools.bench.configurations import parse_configurations
    from shoal.tools.bench.sweep import Sweep, require_figures, run_sweep
    from shoal.tools.bench.trial import TrialConfig

    job = TrialConfig(
        model=model,
        device=device,
        settings={},
        voices=_voices(voices),
        samples=2 if quick else samples,
        texts=texts,
        sentences=sentences,
        warm_up=warm_up,
        unique=not repeat,
        voice=voice,
        edges=edge_cases,
        max_frames=8 if quick else 0,
    )
    sweep = Sweep(job, parse_configurations(config or ()), cold=not quick, price=price, currency=currency)
    document = run_sweep(sweep, progress=not quiet)
    report_output(document, json, html, markdown, quiet=quiet)
    require_figures(document)


def engine(
    model: Model = "nano",
    device: Device = "auto",
    voices: Voices = "1,4,16",
    quick: Annotated[bool, typer.Option("--quick", help="A few frames of everything.")] = False,
    json: JsonFile = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
) -> None:
    """Measure the engine without a server: policies, batch sizes, prefix cache, scheduler.

    The last line is one JSON object. Ctrl-C keeps what was measured.

    Example: shoal bench engine --model random:tiny --json engine.json
    """
    check_writable(json, html, markdown)
    from shoal.tools.bench.engine import last_line, run_engine_bench

    document = run_engine_bench(model, device=device, batches=_voices(voices), quick=quick, progress=not quiet)
    try:
        report_output(document, json, html, markdown, quiet=quiet)
    finally:
        typer.echo(last_line(document))


def quality(
    model: Model = "nano",
    device: Device = "auto",
    config: Configurations = None,
    sentences: Annotated[int, typer.Option(min=2, help="Sentences, each in every voice.")] = 25,
    text: Annotated[
        Path | None, typer.Option("--text", help="File with a sentence per line, instead of our own.")
    ] = None,
    voice: Annotated[list[str] | None, typer.Option(help="A stored voice; may be repeated.")] = None,
    clips: Annotated[Path | None, typer.Option("--clips", help="New folder that keeps what was said.")] = None,
    json: JsonFile = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
) -> None:
    """Word errors, opinion score and likeness of voice, before and after each optimisation.

    The first configuration is what the others are compared with. Needs a checkout of the project with its judges
    (`make quality` installs them).

    Example: shoal bench quality -c default -c bf16 -c int8 --sentences 50
    """
    check_writable(json, html, markdown)
    from shoal.tools.bench.configurations import parse_configurations
    from shoal.tools.bench.quality import QualityPlan, run_quality

    plan = QualityPlan(model, device, parse_configurations(config or ()), sentences, text, tuple(voice or ()))
    report_output(run_quality(plan, clips, progress=not quiet), json, html, markdown, quiet=quiet)


def scaling(
    model: Model = "nano",
    device: Device = "auto",
    samples: Annotated[int, typer.Option(min=3, help="Measurements of every size.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes only.")] = False,
    json: JsonFile = None,
    html: Html = None,
    markdown: Markdown = None,
    quiet: Quiet = False,
) -> None:
    """How time grows with the length of prompt and audio: prefill, decoding, codec, batches; measured against theory.

    Example: shoal bench scaling --model random:tiny --html scaling.html
    """
    check_writable(json, html, markdown)
    from shoal.tools.bench.scaling import run_scaling

    document = run_scaling(model, device=device, samples=samples, quick=quick, progress=not quiet)
    report_output(document, json, html, markdown, quiet=quiet)


def _refuse_flags(context: typer.Context) -> None:
    """Flags before a command would be those of `shoal bench` alone, and silently lost."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise typer.BadParameter(f"--{given[0]} belongs after {context.invoked_subcommand}")


def _voices(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = (0,)
    if not all(0 < count <= 4096 for count in found):
        raise typer.BadParameter(f"{text!r} is not a list of batch sizes such as 1,4,16", param_hint="--voices")
    return found
