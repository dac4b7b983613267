"""Report of documents as one self-contained HTML file: works offline, in light and dark mode, and in print."""

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from shoal.errors import counted
from shoal.tools.bench.document import Document
from shoal.tools.bench.report.charts import charts
from shoal.tools.bench.report.compare import Change, RunComparison, pairs
from shoal.tools.bench.report.markdown import TITLES, busy_warning, context, headline
from shoal.tools.bench.report.plots import Chart
from shoal.tools.bench.report.profiled import profile_tiles
from shoal.tools.bench.report.tables import ReportTable, changes_table, duration, number, size, tables

FOLDER = Path(__file__).parent
MAX_CHANGES = 12  # changes listed at the top, the largest first
# The page may not load or send anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# Three fish, each a stroke: a shoal.
LOGO = (
    '<svg class="logo" viewBox="0 0 48 32" aria-hidden="true"><path d="M4 9c5-6 13-6 18 0-5 6-13 6-18 0l-3-4m3 4-3 4"/>'
    '<path d="M25 16c5-6 13-6 18 0-5 6-13 6-18 0l-3-4m3 4-3 4"/>'
    '<path d="M9 24c5-6 13-6 18 0-5 6-13 6-18 0l-3-4m3 4-3 4"/></svg>'
)


def page(documents: list[Document]) -> str:
    kinds = list(dict.fromkeys(TITLES[document["kind"]] for document in documents))
    title = headline(documents[0]) if len(kinds) == 1 else " and ".join([kinds[0], *map(str.lower, kinds[1:])])
    body = "".join(_body(documents, title))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Shoal: {escape(title)}</title>\n<style>\n{_file('style.css')}</style>\n</head>\n"
        f"<body>\n{body}<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _body(documents: list[Document], title: str) -> Iterator[str]:
    first = documents[0]
    yield (
        f'<header><div class="brand">{LOGO}<span>Shoal</span></div>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">◐</button>'
        f"<h1>{escape(title)}</h1><p>{escape(context(first))}</p></header>\n<main>\n"
    )
    for comparison in pairs(documents):
        yield _comparison(comparison)
    shown = _latest(documents)
    for document in shown:
        yield from _section(document, alone=len(shown) == 1)
    yield "</main>\n"
    yield "<footer>Created by <code>shoal report</code>. This file is self-contained.</footer>\n"


def _latest(documents: list[Document]) -> list[Document]:
    """Return the last document of each kind: of compared runs, only the last is shown in full."""
    return list({document["kind"]: document for document in documents}.values())


def _section(document: Document, *, alone: bool) -> Iterator[str]:
    yield f'<section class="{document["kind"]}">'
    if not alone:
        yield f"<h2>{escape(headline(document))}</h2><p class='context'>{escape(context(document))}</p>"
    if warning := busy_warning(document):
        yield f'<p class="banner busy" role="note">{escape(warning)}</p>'
    if not document["complete"]:
        yield '<p class="banner">Interrupted: finished measurements only.</p>'
    tiles = list(_TILES[document["kind"]](document))
    if tiles:
        yield f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>'
    yield f'<div class="charts">{"".join(map(_figure, charts(document)))}</div>'
    for sheet in tables(document):
        yield _table(sheet)
    yield _facts(document)
    yield "</section>\n"


def _figure(chart: Chart) -> str:
    legend = "".join(f'<li><i class="{each.kind}"></i>{escape(each.words)}</li>' for each in chart.legend)
    return (
        f"<figure><figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.caption)}</p></figcaption>"
        f"{f'<ul class=legend>{legend}</ul>' if legend else ''}<div class='plot'>{chart.svg}</div></figure>"
    )


def _tile(name: str, value: str, note: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><p>{escape(note)}</p></div>"


def _bench_tiles(document: Document) -> Iterator[tuple[str, str, str]]:
    runs = [run for run in document["runs"] if run["batches"]]
    batches = [(run, batch) for run in runs for batch in run["batches"] if batch["rtf"]]
    if not batches:
        return
    alone = [(run, batch) for run, batch in batches if batch["voices"] == batches[0][1]["voices"]]
    run, batch = min(alone, key=lambda each: each[1]["rtf"])
    yield "Real-time factor", f"{batch['rtf']:.3f}", f"{run['name']}, {_voices(batch)}"
    run, batch = min(alone, key=lambda each: each[1]["first_audio"]["p50"])
    yield "First audio, P50", duration(batch["first_audio"]["p50"]), f"{run['name']}, {_voices(batch)}"
    run, batch = max(batches, key=lambda each: each[1]["audio_per_second"])
    yield "Throughput", _speed(batch), f"{run['name']}, {_voices(batch)}"
    if batch["cost_per_audio_hour"] is not None:
        currency = document["settings"]["currency"]
        yield (
            "Cost per audio hour",
            f"{batch['cost_per_audio_hour']:.3f} {currency}",
            f"{run['name']}, {_voices(batch)}",
        )
    run = min(runs, key=lambda each: each["memory"]["peak"])
    yield f"Peak {run['memory']['kind']}", size(run["memory"]["peak"]), f"{run['name']}, all batch sizes"


def _speed(figures: dict[str, Any]) -> str:
    """Return seconds of audio per second of wall time as a multiple of real time."""
    return f"{figures['audio_per_second']:.1f}× real time"


def _voices(batch: dict[str, Any]) -> str:
    return f"batch size {batch['voices']}"


def _engine_tiles(document: Document) -> Iterator[tuple[str, str, str]]:
    for run in document["runs"]:
        rows = [row for row in run["throughput"] if row["policy"] == "continuous"]
        if rows:
            few, best = rows[0], max(rows, key=lambda row: row["audio_per_second"])
            yield "Real-time factor", f"{few['rtf']:.3f}", _voices(few)
            yield "First audio, P50", duration(few["first_audio"]["p50"]), _voices(few)
            yield "Throughput", _speed(best), _voices(best)
        if "scheduler" in run:
            figures = run["scheduler"]
            rate = f"{number(figures['sequence_steps_per_second'], 0)} /s"
            yield "Scheduler", rate, f"sequence-steps, {counted(figures['voices'], 'sequence')}"


def _load_tiles(document: Document) -> Iterator[tuple[str, str, str]]:
    for run in document["runs"]:
        if run["highest_rate"] is not None:
            yield "Highest rate", f"{run['highest_rate']:.2f} /s", f"{run['name']}, objective met"
    stages = [(run, stage) for run in document["runs"] for stage in run["stages"] if stage["first_audio"]]
    if not stages:
        return
    run, stage = min(stages, key=lambda each: each[1]["first_audio"]["p50"])
    yield "First audio, P50", duration(stage["first_audio"]["p50"]), f"{run['name']}, {stage['name']}"
    run, stage = max(stages, key=lambda each: each[1]["goodput"])
    yield "Best goodput", f"{stage['goodput']:.2f} /s", f"{run['name']}, {stage['name']}"
    run, stage = max(stages, key=lambda each: each[1]["audio_per_second"])
    yield "Throughput", _speed(stage), f"{run['name']}, {stage['name']}"
    requests = sum(stage["requests"] for _, stage in stages)
    failed = sum(sum(stage["errors"].values()) for _, stage in stages)
    yield "Errors", f"{failed:,}", f"of {counted(requests, 'request')}"


def _quality_tiles(document: Document) -> Iterator[tuple[str, str, str]]:
    for run in document["runs"][:1]:
        yield "WER", f"{number(run['metrics'].get('wer'), 1)} %", run["name"]
        yield "MOS", number(run["metrics"].get("mos"), 2), run["name"]


def _no_tiles(document: Document) -> Iterator[tuple[str, str, str]]:
    return iter(())


_TILES = {
    "bench": _bench_tiles,
    "engine": _engine_tiles,
    "load": _load_tiles,
    "profile": profile_tiles,
    "quality": _quality_tiles,
    "scaling": _no_tiles,
}


def _table(sheet: ReportTable) -> str:
    head = "".join(f"<th{_side(at, sheet)}>{escape(name)}</th>" for at, name in enumerate(sheet.columns))
    rows = "".join(
        "<tr>" + "".join(f"<td{_side(at, sheet)}>{escape(cell)}</td>" for at, cell in enumerate(row)) + "</tr>"
        for row in sheet.rows
    )
    return (
        f"<details class='sheet'><summary>{escape(sheet.title)}<span>{counted(len(sheet.rows), 'row')}</span></summary>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _side(at: int, sheet: ReportTable) -> str:
    return "" if at < sheet.words else ' class="figure"'


def _facts(document: Document) -> str:
    machine = {**document["machine"], "commit": document["commit"], "measured": document["created"]}
    blocks = ""
    for title, facts in (("Machine", machine), ("Settings", document["settings"])):
        items = "".join(
            f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd></div>"
            for name, value in facts.items()
            if value is not None
        )
        blocks += f"<h3>{title}</h3><dl class='facts'>{items}</dl>"
    return (
        f"<details class='sheet' open><summary>Machine and settings</summary><div class='pad'>{blocks}</div></details>"
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _comparison(comparison: RunComparison) -> str:
    kind = "worse" if comparison.worse else "better" if comparison.better else "same"
    largest = sorted(comparison.changed, key=lambda change: -abs(math.log(change.ratio or 1e-9)))[:MAX_CHANGES]
    rows = "".join(map(_change, largest))
    more = len(comparison.changed) - len(largest)
    rows += f"<li><span>and {more} more in the table</span></li>" if more else ""
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in comparison.remarks)
    notes = f"<p class=context>The runs also differ in:</p><ul class=remarks>{remarks}</ul>" if remarks else ""
    missing = [*comparison.only_before, *comparison.only_after]
    left = f"<p class='context'>Only in one of the runs: {escape('; '.join(missing))}.</p>" if missing else ""
    return (
        f'<section class="comparison {kind}"><h2>{escape(comparison.in_short.capitalize())}</h2>'
        f"{f'<ul class=changes>{rows}</ul>' if rows else ''}"
        f"{notes}{left}"
        f"{_table(changes_table(comparison))}</section>\n"
    )


def _change(change: Change) -> str:
    arrow = {"worse": "▼", "better": "▲", "unsure": "?"}[change.verdict]
    ratio = "" if change.ratio is None else f"{100 * (change.ratio - 1):+.1f} %"
    where = f", {change.where}" if change.where else ""
    return (
        f'<li class="{change.verdict}"><b>{arrow} {change.verdict}</b> '
        f"{escape(change.metric)} <span>{escape(change.run + where)}</span> <em>{ratio}</em></li>"
    )


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
