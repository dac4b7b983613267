"""`shoal bench` and its subcommands: measure speed and quality on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flag_groups import with_groups
from shoal.cli.flags import Device
from shoal.cli.measure.report_output import ReportFlags

if TYPE_CHECKING:
    from shoal.tools.bench.configurations import Configuration
    from shoal.tools.bench.trial import TrialConfig

PANEL = "Measure"

Model = Annotated[
    str,
    typer.Option(help="Model to measure: nano, s1-mini, s2-pro, OWNER/NAME, a directory, or random:tiny, random:…"),
]
Configurations = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME",
        help="Configuration to measure; repeat for several: a preset (bf16, int8, eager, static, …), settings "
        "NAME=VALUE,NAME=VALUE, or all. Default: on a GPU every type of weights and KV cache, else default.",
    ),
]

Voices = Annotated[str, typer.Option(help="Batch sizes to measure: concurrent requests, separated by commas.")]


Samples = Annotated[int, typer.Option(min=1, help="Measured rounds per batch size.")]
Texts = Annotated[int, typer.Option(min=1, help="Texts per round; raised to the batch size where that is larger.")]
Sentences = Annotated[int, typer.Option(min=1, max=100, help="Sentences per text.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Warm-up rounds per batch size, not counted.")]
Repeat = Annotated[
    bool, typer.Option("--repeat", help="Use the same texts in every round, so that caches take effect.")
]
Voice = Annotated[
    str | None, typer.Option(help="Stored voice to speak with. Default: the model's own, or a random one.")
]
EdgeCases = Annotated[bool, typer.Option(help="Also measure a text of one word and one of 5,000 characters.")]
Price = Annotated[
    float | None, typer.Option(min=0, help="Price of one hour of this machine, for the cost per hour of audio.")
]
Currency = Annotated[str, typer.Option(help="Currency of --price, shown in the tables.")]
Cold = Annotated[bool, typer.Option(help="Also measure the start with empty compiler caches.")]
QualitySentences = Annotated[int, typer.Option(min=2, help="Number of sentences, each spoken in every voice.")]
QualityText = Annotated[
    Path | None, typer.Option("--text", help="File with one sentence per line, instead of the built-in sentences.")
]
QualityVoices = Annotated[
    list[str] | None, typer.Option(help="Stored voice to speak with; repeat for several. Default: the model's own.")
]
Clips = Annotated[Path | None, typer.Option("--clips", help="New directory in which to keep the generated clips.")]
Concurrency = Annotated[int, typer.Option(min=1, max=64, help="Sentences to speak at the same time, as one batch.")]
SpeakOnly = Annotated[
    bool,
    typer.Option("--speak-only", help="With --clips: only generate the clips, for judges on another machine."),
]
Within = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        max=100,
        metavar="PERCENT",
        help="Exit with code 12 unless the opinion score of every configuration is within PERCENT of the baseline.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Generate a few frames per request and skip the cold start.")]


@dataclass(frozen=True)
class TextFlags:
    """Texts of a measurement and the batches they are spoken in."""

    voices: Voices = "1,4,16"
    samples: Samples = 5
    texts: Texts = 4
    sentences: Sentences = 1
    warm_up: WarmUp = 1
    repeat: Repeat = False
    voice: Voice = None
    edge_cases: EdgeCases = True

    def trial(self, model: str, device: str, *, quick: bool) -> "TrialConfig":
        """Return the trial of the default configuration; with `quick`, two rounds of a few frames."""
        from shoal.tools.bench.trial import TrialConfig

        return TrialConfig(
            model,
            device,
            {},
            voices=_voices(self.voices),
            samples=2 if quick else self.samples,
            texts=self.texts,
            sentences=self.sentences,
            warm_up=self.warm_up,
            unique=not self.repeat,
            voice=self.voice,
            edges=self.edge_cases,
            max_frames=8 if quick else 0,
        )


def add_to(app: typer.Typer) -> None:
    group = typer.Typer()
    group.callback(invoke_without_command=True)(with_groups(bench))
    group.command()(with_groups(engine))
    group.command()(with_groups(quality))
    group.command()(with_groups(scaling))
    app.add_typer(group, name="bench", rich_help_panel=PANEL)


def bench(
    context: typer.Context,
    model: Model = "nano",
    device: Device = "auto",
    config: Configurations = None,
    *,
    texts: TextFlags,
    price: Price = None,
    currency: Currency = "USD",
    cold: Cold = True,
    quick: Quick = False,
    report: ReportFlags,
) -> None:
    """Measure speed, memory, scaling and speech quality on this machine.

    Without a subcommand: generate the same texts with every configuration, each in its own process, and compare
    speed, latency, start-up time and memory. After Ctrl-C the finished measurements are still reported.

    Example: shoal bench --model random:tiny --config all --html report.html

    Example: shoal bench --model s1-mini -c bf16 -c int8 --voices 1,8,32 --price 3.5 --json run.json
    """
    if context.invoked_subcommand is not None:
        _reject_parent_flags(context)
        return
    report.check_writable()
    from shoal.tools.bench.sweep import Sweep, require_figures, run_sweep

    job = texts.trial(model, device, quick=quick)
    sweep = Sweep(job, _configurations(config, device), cold=cold and not quick, price=price, currency=currency)
    document = run_sweep(sweep, progress=not report.quiet)
    report.write(document)
    require_figures(document)


def _configurations(names: list[str] | None, device: str) -> "list[Configuration]":
    from shoal.engine.load import choose_device
    from shoal.tools.bench.configurations import parse_configurations, recommended

    return parse_configurations(names or recommended(choose_device(device)))


def engine(
    model: Model = "nano",
    device: Device = "auto",
    voices: Voices = "1,4,16",
    quick: Annotated[bool, typer.Option("--quick", help="Generate a few frames per request.")] = False,
    *,
    report: ReportFlags,
) -> None:
    """Measure the engine without a server: admission policies, batch sizes, prefix cache, scheduler.

    The last line of the output is one JSON object. After Ctrl-C the finished measurements are still reported.

    Example: shoal bench engine --model random:tiny --json engine.json
    """
    report.check_writable()
    from shoal.tools.bench.engine import last_line, run_engine_bench

    document = run_engine_bench(model, device=device, batches=_voices(voices), quick=quick, progress=not report.quiet)
    try:
        report.write(document)
    finally:
        typer.echo(last_line(document))


def quality(
    model: Model = "nano",
    device: Device = "auto",
    config: Configurations = None,
    sentences: QualitySentences = 25,
    text: QualityText = None,
    voice: QualityVoices = None,
    concurrency: Concurrency = 1,
    clips: Clips = None,
    speak_only: SpeakOnly = False,
    within: Within = None,
    *,
    report: ReportFlags,
) -> None:
    """Measure word error rate, predicted opinion score and speaker similarity of every configuration.

    The first configuration is the baseline of the comparison. Needs a checkout of the project with the speech judges
    (`make quality` installs them). A machine without them can generate the clips with --speak-only; copy them to one
    that has them and run `python -m training.evaluate CLIPS/manifest.jsonl --reference BASELINE` there.

    Example: shoal bench quality -c default -c bf16 -c int8 --sentences 50
    """
    report.check_writable()
    from shoal.tools.bench.configurations import parse_configurations
    from shoal.tools.bench.quality import QualityPlan, check_within, run_quality, write_clips

    configurations = parse_configurations(config or ())
    plan = QualityPlan(model, device, configurations, sentences, text, tuple(voice or ()), concurrency)
    if speak_only:
        if clips is None or within is not None:
            raise typer.BadParameter("--speak-only needs --clips and judges nothing, so it has no --within")
        for name, reason in write_clips(plan, clips, progress=not report.quiet).items():
            typer.echo(f"{name} is not available: {reason}", err=True)
        return
    document = run_quality(plan, clips, progress=not report.quiet)
    report.write(document)
    if within is not None:
        check_within(document, within)


def scaling(
    model: Model = "nano",
    device: Device = "auto",
    samples: Annotated[int, typer.Option(min=3, help="Measurements per size.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Measure the three smallest sizes only.")] = False,
    *,
    report: ReportFlags,
) -> None:
    """Measure how the time of prefill, decoding, codec and batches grows with length, compared with theory.

    Example: shoal bench scaling --model random:tiny --html scaling.html
    """
    report.check_writable()
    from shoal.tools.bench.scaling import run_scaling

    document = run_scaling(model, device=device, samples=samples, quick=quick, progress=not report.quiet)
    report.write(document)


def _reject_parent_flags(context: typer.Context) -> None:
    """Raise BadParameter for flags before a subcommand: they belong to `shoal bench` itself and would be ignored."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise typer.BadParameter(f"--{given[0]} belongs after {context.invoked_subcommand}, not before it")


def _voices(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = (0,)
    if not all(0 < count <= 4096 for count in found):
        raise typer.BadParameter(
            f"{text!r} is not a list of batch sizes from 1 to 4096, such as 1,4,16", param_hint="--voices"
        )
    return found
