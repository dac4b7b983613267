"""`shoal batch`: speak every line of a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flag_groups import with_groups
from shoal.cli.flags import Json, Quiet
from shoal.cli.serving.serve import EngineFlags, server_extra
from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    from shoal.batch.lines import InputFile
    from shoal.batch.manifest import Manifest
    from shoal.batch.run import BatchPlan
    from shoal.cli.files.batch_progress import BatchProgress
    from shoal.settings import Settings

PANEL = "Speak"


Lines = Annotated[
    Path,
    typer.Argument(metavar="IN.JSONL|IN.TXT", help="Input: one JSON body of /v1/tts per line; in .txt, one text."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory for the audio files and manifest.jsonl.")]
Voice = Annotated[str | None, typer.Option(help="Stored voice for lines without a voice.")]
Format = Annotated[
    str | None,
    typer.Option(help="Audio format for lines without one: wav, flac, mp3, opus, aac, webm, pcm, ulaw or alaw."),
]
Subtitles = Annotated[
    str | None, typer.Option(help="Also write word times, for lines without `subtitles`: srt, vtt or json.")
]
Ray = Annotated[bool, typer.Option("--ray", help="Distribute the lines over several engines with Ray Data.")]
Replicas = Annotated[int, typer.Option(min=1, help="With --ray: number of engines.")]
Gpus = Annotated[
    float | None, typer.Option(min=0, help="With --ray: GPUs per engine. Default: 1 if there is a GPU, else 0.")
]
Cpus = Annotated[float, typer.Option(min=0, help="With --ray: CPUs per engine.")]
Address = Annotated[
    str | None,
    typer.Option(help="With --ray: running Ray cluster, HOST:PORT or auto. Default: start Ray on this machine."),
]


@dataclass(frozen=True)
class RayFlags:
    """Engines of a batch with --ray."""

    replicas: Replicas = 1
    gpus: Gpus = None
    cpus: Cpus = 1.0
    address: Address = None


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(with_groups(batch))


def batch(
    lines: Lines,
    output: Output,
    voice: Voice = None,
    format: Format = None,
    subtitles: Subtitles = None,
    *,
    engine: EngineFlags,
    ray: Ray = False,
    cluster: RayFlags,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Speak every line of a file, many lines at a time. Run the same command again to resume after an interrupt.

    Example of a line: {"text": "Hello.", "id": "greeting", "voice": "narrator", "format": "mp3", "seed": 7}

    A line that fails is reported with its line number and the others continue; the exit code is then 1.

    Example: shoal batch lines.jsonl -o speech/ --model random:tiny
    """
    if cluster != RayFlags() and not ray:
        raise InvalidRequest("--replicas, --gpus, --cpus and --address are for several engines: add --ray")
    settings = engine.settings()
    with server_extra():
        from shoal.batch.lines import InputFile, LineDefaults, is_plain_text
        from shoal.batch.manifest import Manifest
        from shoal.batch.run import plan_batch

    from shoal.cli.files.batch_progress import BatchProgress
    from shoal.text.lexicon import lexicon_hash

    given = (("voice", voice), ("format", format), ("subtitles", subtitles))
    fields = {name: value for name, value in given if value is not None}
    defaults = LineDefaults(settings.model, fields, lexicon_hash(settings.lexicon), is_plain_text(lines))
    source, progress = InputFile(lines, defaults), BatchProgress(shown=not quiet)
    with Manifest.opened(output) as manifest:
        found = plan_batch(source, manifest)
        progress.add_plan(found)
        run = BatchRun(found, source, manifest, settings, progress)
        if found.tasks:
            with progress.shown(lambda: manifest.count([*found.done, *found.tasks])):
                run.distributed(cluster) if ray else run.local()
    _report(progress, output, json=json)


def _report(progress: "BatchProgress", output: Path, *, json: bool) -> None:
    """Print the summary. Exits with code 1 if a line failed."""
    from shoal.cli.tables import print_json

    if json:
        print_json(progress.as_json())
    else:
        progress.print_summary(output)
    if progress.failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class BatchRun:
    """One run of a batch: the planned input, its output and settings."""

    found: "BatchPlan"
    lines: "InputFile"
    manifest: "Manifest"
    settings: "Settings"
    progress: "BatchProgress"

    def local(self) -> None:
        """Run all tasks on one engine in this process."""
        from shoal.api.engine_client import load_engine
        from shoal.batch.run import run

        source = self.settings.source()
        loaded = load_engine(source, self.settings.voice_directory())
        self.progress.begin()
        try:
            # Twice as many requests as slots: a finished sequence is replaced at the next step.
            run(self.found, self.lines, loaded, self.manifest, 2 * source.config.slots, self.progress.record)
        finally:
            loaded.service.close()

    def distributed(self, cluster: RayFlags) -> None:
        """Run all tasks on several engines with Ray Data."""
        from shoal.cluster import lifecycle as life

        with life.connect_ray(cluster.address) if cluster.address else life.local_ray(logs=False):
            from shoal.batch.distribute import WorkerConfig, distribute
            from shoal.cluster.config import split_gpu_memory

            source, gpus = self.settings.source(), cluster.gpus
            if gpus is None:
                gpus = 1.0 if source.device != "cpu" and life.has_gpus() else 0.0
            workers = WorkerConfig(cluster.replicas, cluster.cpus, gpus)
            life.check_resources(cluster.replicas, cluster.cpus, gpus)
            distribute(
                self.found,
                self.lines,
                split_gpu_memory(source, gpus),
                self.settings.voice_directory(),
                self.manifest,
                workers,
                self.progress.record,
            )
