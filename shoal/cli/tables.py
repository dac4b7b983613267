"""Terminal output shared by commands: tables on standard output, progress on standard error."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from shoal.checkpoint.inspect import Inspection
    from shoal.engine.memory.capacity import CardCapacity
    from shoal.tools.doctor import DoctorReport
    from shoal.tools.predicted_speed import PredictedSpeed

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[red]missing[/]"}


def print_json(document: Mapping[str, object]) -> None:
    typer.echo(json.dumps(document, ensure_ascii=False, indent=2))


def show_table(table: Table) -> None:
    Console().print(table)


def show_report(report: "DoctorReport") -> None:
    table = _plain_table()
    for finding in report.findings:
        advice = f"\n[yellow]{escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(MARKS[finding.mark], finding.subject, escape(finding.value) + advice)
    show_table(table)
    if report.choice is not None:
        chosen = report.choice
        same = chosen.backend == chosen.codec_backend
        backend = chosen.backend if same else f"{chosen.backend}, codec {chosen.codec_backend}"
        Console().print(f"\nwill be used: [bold]{chosen.device}, {chosen.dtype}, {backend}[/] ({chosen.why})")


def show_plan(holdings: "Sequence[CardCapacity]") -> None:
    contexts = list(holdings[0].voices)
    table = Table("GPU memory", "model", "weights", "GB", *(f"sequences of {count:,} tokens" for count in contexts))
    for holding in holdings:
        voices = (" / ".join(map(str, holding.voices[columns].values())) for columns in contexts)
        row = (f"{holding.card} GB", holding.model, holding.weights, f"{holding.weight_bytes / 1e9:.1f}")
        table.add_row(*row, *voices)
    show_table(table)
    kinds = " / ".join(holdings[0].voices[contexts[0]])
    Console().print(
        f"Concurrent sequences with a {kinds} KV cache, in 90 % of the GPU memory, weights as `--quantize auto`."
    )


def show_predictions(speeds: "Sequence[PredictedSpeed]") -> None:
    table = Table(
        "GPU", "model", "weights", "backend", "frame, ms", "RTF", "voices in real time", title="Predicted speed"
    )
    for each in speeds:
        figures = f"{each.frame_ms:.1f}", f"{each.rtf:.3f}", "-" if each.voices is None else str(each.voices)
        table.add_row(each.card, each.model, each.weights, each.backend, *figures)
    show_table(table)
    Console().print(
        "Predicted from the bytes read per frame and the bandwidth on the data sheet, scaled to what an H200 reached; "
        "no other card was measured. Voices: sequences in real time that fit into memory with 1,024 tokens each."
    )


def show_inspection(found: "Inspection") -> None:
    console = Console()
    console.print(_summary(found))
    if found.parts:
        console.print(_parts(found))
    for note in found.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for problem in found.problems[1:]:  # the first one is raised as the error of the command
        console.print(f"[red]problem:[/] {escape(str(problem))}", highlight=False)


@contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that sets the text of a status line; it does nothing if `quiet` or not on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))


def _summary(found: "Inspection") -> Table:
    table = _plain_table()
    table.add_row("model", escape(found.name))
    if found.language is not None:
        language = found.language
        table.add_row("family", language.family)
        table.add_row("context", f"{language.context:,} tokens, at most {language.max_prompt:,} of them for the prompt")
        table.add_row("codebooks", f"{language.codebooks} of up to {language.codebook_size:,} codes")
        table.add_row("KV cache", f"{language.kv_bytes_per_token:,} bytes per token at 16 bit")
        table.add_row("quantized", language.quantization or "no")
    if found.tokenizer_size is not None:
        table.add_row("tokenizer", f"{found.tokenizer_size:,} tokens")
    if found.sound is not None:
        codec = found.sound
        table.add_row("audio", f"{codec.sample_rate:,} Hz, {codec.frame_rate:.2f} frames/s")
    if found.files:
        table.add_row("files", f"{len(found.files)}, {_size(sum(found.files.values()))}")
    return table


def _parts(found: "Inspection") -> Table:
    table = Table("part", "parameters", "dtype", "memory")
    for column in (1, 3):
        table.columns[column].justify = "right"
    for part in found.parts:
        table.add_row(part.name, f"{part.parameters:,}", ", ".join(part.dtypes), _size(part.bytes))
    table.add_section()
    table.add_row("all", f"{found.parameters:,}", "", _size(found.bytes))
    return table


def _plain_table() -> Table:
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
