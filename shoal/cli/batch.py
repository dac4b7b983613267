"""The command for many lines at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.flags import Codec, Json, Quiet
from shoal.cli.serve import Device, File, Model, Set, Slots, resolve_settings, server_extra

if TYPE_CHECKING:
    from shoal.batch.lines import InputFile
    from shoal.batch.manifest import Manifest
    from shoal.batch.run import BatchPlan
    from shoal.cli.batch_progress import BatchProgress
    from shoal.settings import Settings

PANEL = "Speak"


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(batch)


def batch(
    lines: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="One JSON object per line, as for /v1/tts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the files and manifest.jsonl.")],
    voice: Annotated[str | None, typer.Option(help="A stored voice, for lines that name none.")] = None,
    format: Annotated[str | None, typer.Option(help="wav, flac, mp3, …, for lines that name none.")] = None,
    model: Model = None,
    codec: Codec = None,
    device: Device = None,
    slots: Slots = None,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the lines over several engines with Ray Data.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Engines, with --ray.")] = 1,
    gpus: Annotated[float | None, typer.Option(min=0, help="GPUs per engine, with --ray; else 1 if there are.")] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs per engine, with --ray.")] = 1.0,
    address: Annotated[str | None, typer.Option(help="A Ray cluster, with --ray: HOST:PORT or auto.")] = None,
    file: File = None,
    set: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Speak every line of a file, many at a time. The same command goes on where it was interrupted.

    A line: {"text": "Hello.", "id": "greeting", "voice": "narrator", "format": "mp3", "seed": 7}

    What cannot be spoken is told with its line number, and the rest goes on; the exit code is then 1.

    Example: shoal batch lines.jsonl -o speech/ --model random:tiny
    """
    settings = resolve_settings({"model": model, "codec": codec, "device": device, "slots": slots}, file, set).settings
    with server_extra():
        from shoal.batch.lines import InputFile, LineDefaults
        from shoal.batch.manifest import Manifest
        from shoal.batch.run import plan_batch

    from shoal.cli.batch_progress import BatchProgress
    from shoal.cli.tables import print_json

    fields = {name: value for name, value in (("voice", voice), ("format", format)) if value is not None}
    source, progress = InputFile(lines, LineDefaults(settings.model, fields)), BatchProgress(shown=not quiet)
    with Manifest.opened(output) as manifest:
        found = plan_batch(source, manifest)
        progress.surveyed(found)
        run_spec = BatchRun(found, source, manifest, settings, progress)
        if found.tasks:
            with progress.drawn(lambda: manifest.count([*found.done, *found.tasks])):
                run_spec.distribute(replicas, cpus, gpus, address) if ray else run_spec.run()
    if json:
        print_json(progress.as_json())
    else:
        progress.sum_up(output)
    if progress.failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class BatchRun:
    """Everything a batch is made of, on its way to the one who does it."""

    found: "BatchPlan"
    lines: "InputFile"
    manifest: "Manifest"
    settings: "Settings"
    progress: "BatchProgress"

    def run(self) -> None:
        from shoal.batch.run import run
        from shoal.server.run import load

        source = self.settings.source()
        loaded = load(source, self.settings.voice_directory())
        self.progress.begin()
        try:
            # As many wait as are spoken: whoever ends is followed at the next frame.
            run(self.found, self.lines, loaded, self.manifest, 2 * source.config.slots, self.progress.heard)
        finally:
            loaded.service.close()

    def distribute(self, replicas: int, cpus: float, gpus: float | None, address: str | None) -> None:
        from shoal.cluster import lifecycle as life

        with life.connect_ray(address) if address else life.local_ray(logs=False):
            from shoal.batch.distribute import WorkerConfig, distribute
            from shoal.cluster.config import split_gpu_memory

            source = self.settings.source()
            if gpus is None:
                gpus = 1.0 if source.device != "cpu" and life.has_gpus() else 0.0
            workers = WorkerConfig(replicas, cpus, gpus)
            life.check_resources(replicas, cpus, gpus)
            distribute(
                self.found,
                self.lines,
                split_gpu_memory(source, gpus),
                self.settings.voice_directory(),
                self.manifest,
                workers,
                self.progress.heard,
            )
