"""Charts for each kind of measurement document."""

from collections.abc import Iterator
from typing import Any

from shoal.errors import counted
from shoal.tools.bench.document import Document
from shoal.tools.bench.report.plots import (
    AxesSpec,
    BarGroup,
    Chart,
    LegendEntry,
    LineSeries,
    StackedBar,
    Strip,
    bars,
    lines,
    strips,
)
from shoal.tools.bench.report.profiled import profile_charts
from shoal.tools.bench.report.tables import duration, number, size

# The style of the page has eight colours for series.
MAX_SERIES = 8
# Steps of one hue for ordered values: batch sizes, percentiles.
STEPS = ("q1", "q2", "q3", "q4")
MAX_TIMELINES = 4
MAX_STRIPS = 12
CLIENTS = "clients"  # name of the axis of a closed loop
AT_ONCE = "requests at once"  # name of the axis of bursts
COUNTS = (CLIENTS, AT_ONCE)  # axes of whole numbers


def charts(document: Document) -> list[Chart]:
    return list(_OF[document["kind"]](document))


def _bench(document: Document) -> Iterator[Chart]:
    runs = [run for run in document["runs"] if run["batches"]]
    if not runs:
        return
    # The page shows two charts per row, so charts of the same height follow each other.
    if any(run["batches"][0]["rtf"] for run in runs):
        yield _rtf(runs)
    yield _memory(runs)
    yield _production(runs)
    yield _starts(runs)
    yield from _distributions(runs)
    if any(len(run["batches"]) > 1 for run in runs):
        yield _batch_latency(runs, "first_audio", "Time to first audio by batch size", "TTFA P95")
        yield _batch_latency(runs, "latency", "Latency by batch size", "request latency P95")


def _rtf(runs: list[dict[str, Any]]) -> Chart:
    few = [(run, run["batches"][0]) for run in runs]
    voices = few[0][1]["voices"]
    rows = [
        BarGroup(
            run["name"],
            [StackedBar([("s1", batch["rtf"], f"{run['name']}: RTF {batch['rtf']:.4f}")], f"{batch['rtf']:.3f}")],
        )
        for run, batch in few
        if batch["rtf"]
    ]
    caption = f"Seconds of work per second of audio at batch size {voices}. Below 1 is faster than real time."
    highest = max(row.bars[0].total for row in rows)
    # Far below 1, a line at real time would squeeze the bars.
    mark = (1.0, "real time") if highest > 0.25 else None
    return Chart(
        "Real-time factor", caption, bars("Real-time factor by configuration", rows, lambda v: f"{v:g}", mark=mark)
    )


def _production(runs: list[dict[str, Any]]) -> Chart:
    sizes = sorted({batch["voices"] for run in runs for batch in run["batches"]})
    kinds = dict(zip(sizes, _steps(len(sizes)), strict=True))
    rows = [
        BarGroup(
            run["name"],
            [
                StackedBar(
                    [(kinds[batch["voices"]], batch["audio_per_second"], _production_tip(run, batch))],
                    number(batch["audio_per_second"], 1),
                )
                for batch in run["batches"]
            ],
        )
        for run in runs
    ]
    legend = [LegendEntry(kind, f"batch size {count}") for count, kind in kinds.items()]
    caption = "Seconds of audio generated per second of wall time."
    return Chart("Throughput", caption, bars("Throughput by configuration", rows, lambda v: f"{v:g}"), legend)


def _production_tip(run: dict[str, Any], batch: dict[str, Any]) -> str:
    cost = batch["cost_per_audio_hour"]
    price = f", {cost:.4f} per hour of audio" if cost is not None else ""
    return f"{run['name']}, batch size {batch['voices']}: {batch['audio_per_second']:.2f} audio-s/s{price}"


def _distributions(runs: list[dict[str, Any]]) -> Iterator[Chart]:
    for key, figure, title in (
        ("first_audio", "first_audio", "Time to first audio"),
        ("seconds", "latency", "Request latency"),
    ):
        rows = []
        for run in runs:
            batch = run["batches"][0]
            values = [each[key] for each in batch["requests"] if each["error"] is None]
            if batch[figure]:
                # Requests without audio store 0 as their time to first audio.
                rows.append(_strip(run["name"], list(filter(None, values)), batch[figure]))
        if rows:
            voices = runs[0]["batches"][0]["voices"]
            caption = f"One dot per request at batch size {voices}."
            yield Chart(title, caption, strips(title, rows, duration), PERCENTILES)


PERCENTILES = [LegendEntry("q1", "P50"), LegendEntry("q2", "P95"), LegendEntry("q3", "P99")]


def _strip(label: str, values: list[float], stats: dict[str, Any]) -> Strip:
    # More than 400 dots overlap and only make the file larger.
    shown = values if len(values) <= 400 else [*sorted(values)[:: len(values) // 400 + 1], max(values)]
    return Strip(label, shown, stats["p50"], stats["p95"], stats["p99"])


def _batch_latency(runs: list[dict[str, Any]], figure: str, title: str, y_name: str) -> Chart:
    series = [
        LineSeries(run["name"], f"s{at + 1}", [(b["voices"], b[figure]["p95"]) for b in run["batches"] if b[figure]])
        for at, run in enumerate(runs[:MAX_SERIES])
    ]
    axes = AxesSpec("batch size", y_name, lambda v: f"{v:g}", duration, x_log=True)
    return _line_chart(
        title, f"Latency of a request against the number of concurrent ones.{_omitted(runs)}", series, axes
    )


def _line_chart(title: str, caption: str, series: list[LineSeries], axes: AxesSpec) -> Chart:
    legend = [LegendEntry(line.kind, line.label) for line in series] if len(series) > 1 else []
    return Chart(title, caption, lines(title, series, axes), legend)


def _memory(runs: list[dict[str, Any]]) -> Chart:
    kind = runs[0]["memory"]["kind"]
    rows = []
    for run in runs:
        memory = run["memory"]
        before, model, work = (
            memory["baseline"],
            max(0, memory["loaded"] - memory["baseline"]),
            max(0, memory["peak"] - max(memory["loaded"], memory["baseline"])),
        )
        segments = [
            ("muted", before, f"before loading: {size(before)}"),
            ("s1", model, f"model: {size(model)}"),
            ("s2", work, f"peak while generating: {size(work)}"),
        ]
        rows.append(
            BarGroup(run["name"], [StackedBar([(k, float(v), tip) for k, v, tip in segments], size(memory["peak"]))])
        )
    legend = [
        LegendEntry("muted", "before loading"),
        LegendEntry("s1", "model loaded"),
        LegendEntry("s2", "peak while generating"),
    ]
    caption = "Memory of the GPU." if kind == "VRAM" else "Resident memory of the process, including Python and torch."
    return Chart(f"Peak {kind}", caption, bars("Memory by configuration", rows, size), legend)


def _starts(runs: list[dict[str, Any]]) -> Chart:
    rows = []
    for run in runs:
        found = [(name, start) for name, start in run["startup"].items() if start is not None]
        rows.append(
            BarGroup(
                run["name"],
                [
                    StackedBar(
                        [
                            ("s1", start["load"], f"{name} start: load {duration(start['load'])}"),
                            ("s3", start["warm_up"], f"{name} start: warm-up {duration(start['warm_up'])}"),
                        ],
                        f"{duration(start['load'] + start['warm_up'])} {name}",
                    )
                    for name, start in found
                ],
            )
        )
    legend = [LegendEntry("s1", "load the model"), LegendEntry("s3", "warm-up")]
    caption = "Cold: with empty compiler caches. Warm: with the caches of the cold start."
    return Chart("Start-up time", caption, bars("Start-up time by configuration", rows, duration), legend)


def _engine(document: Document) -> Iterator[Chart]:
    for run in document["runs"]:
        rows = run["throughput"]
        if rows:
            yield _policies(rows)
            yield _policies_first_audio(rows)
        if "first_audio" in run:
            yield _prefix_cache(run["first_audio"])
        if "scheduler" in run:
            yield _scheduler(run["scheduler"])


def _policies(rows: list[dict[str, Any]]) -> Chart:
    title, kinds = "Throughput by admission policy", _policy_kinds(rows)
    groups = [
        BarGroup(
            f"batch size {voices}",
            [
                StackedBar([(kinds[row["policy"]], pace := row["audio_per_second"], _pace_tip(row))], number(pace, 1))
                for row in rows
                if row["voices"] == voices
            ],
        )
        for voices in dict.fromkeys(row["voices"] for row in rows)
    ]
    legend = [LegendEntry(kind, policy) for policy, kind in kinds.items()]
    caption = "Seconds of audio generated per second of wall time, by batch size and admission policy."
    return Chart(title, caption, bars(title, groups, lambda v: f"{v:g}"), legend)


def _pace_tip(row: dict[str, Any]) -> str:
    return f"{row['policy']}: {row['frames_per_second']:,.1f} frames/s, RTF {row['rtf']:.3f}"


def _policies_first_audio(rows: list[dict[str, Any]]) -> Chart:
    title = "Time to first audio by admission policy"
    series = [
        LineSeries(
            policy, kind, [(row["voices"], row["first_audio"]["p50"]) for row in rows if row["policy"] == policy]
        )
        for policy, kind in _policy_kinds(rows).items()
    ]
    axes = AxesSpec("batch size", "TTFA P50", lambda v: f"{v:g}", duration, x_log=True)
    caption = "From the request to the first chunk, including the time in the queue."
    return _line_chart(title, caption, series, axes)


def _policy_kinds(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {policy: f"s{at}" for at, policy in enumerate(dict.fromkeys(row["policy"] for row in rows), 1)}


def _prefix_cache(figures: dict[str, Any]) -> Chart:
    title = "Time to first audio with the prefix cache"
    rows = []
    for label, key in (("voice not cached", "unknown"), ("voice cached", "known")):
        run = figures[key]
        tip = f"{label}: {run['tokens_saved']:,.0f} tokens cached, best {duration(run['best_seconds'])}"
        rows.append(BarGroup(label, [StackedBar([("s1", run["seconds"], tip)], duration(run["seconds"]))]))
    caption = f"A voice of {figures['voice_seconds']:.0f} s; the prompt has {figures['prompt_tokens']:,} tokens."
    return Chart(title, caption, bars(title, rows, duration))


def _scheduler(figures: dict[str, Any]) -> Chart:
    title, rate = "Scheduler", figures["sequence_steps_per_second"]
    words = f"{rate:,.0f} /s"
    row = BarGroup(
        counted(figures["voices"], "sequence"),
        [StackedBar([("s1", rate, f"{words}, {figures['steps']:,} steps")], words)],
    )
    caption = "Sequence-steps per second without a model: the CPU cost of scheduling."
    mark = (float(figures["target"]), "target")
    return Chart(title, caption, bars(title, [row], lambda v: f"{v / 1000:g} k" if v else "0", mark=mark))


def _load(document: Document) -> Iterator[Chart]:
    runs = [run for run in document["runs"] if run["stages"]]
    target = document["settings"]["objective"]
    for arrivals, x_name in (("open", "requests/s offered"), ("closed", CLIENTS), ("burst", AT_ONCE)):
        steady = [(run, _steady(run, arrivals)) for run in runs]
        if any(len(stages) > 1 for _, stages in steady):
            yield _against_load(steady, x_name, target["first_audio"])
            yield _goodput(steady, x_name, ideal=arrivals == "open")
            yield _starvation(steady, x_name)
    stages = [(run, stage) for run in runs for stage in run["stages"] if stage["first_audio"]]
    if stages:
        yield _first_audio_strips(stages[:MAX_STRIPS], target["first_audio"], alone=len(runs) == 1)
    # A timeline of a few requests shows nothing.
    timed = [(run, stage) for run, stage in stages if stage["requests"] >= 20 and len(stage["timeline"]) >= 8]
    for run, stage in timed[-MAX_TIMELINES:]:
        yield _timeline(run, stage, target["first_audio"])


def _steady(run: dict[str, Any], arrivals: str) -> list[dict[str, Any]]:
    stages = [each for each in run["stages"] if each["arrivals"] == arrivals and each["ramp_from"] is None]
    return sorted((each for each in stages if each["first_audio"]), key=lambda each: each["load"])


Steady = list[tuple[dict[str, Any], list[dict[str, Any]]]]


def _against_load(steady: Steady, x_name: str, target: float) -> Chart:
    mark = (target, f"objective {duration(target)}")
    axes = AxesSpec(x_name, "TTFA", lambda v: f"{v:.3g}", duration, mark=mark, x_whole=x_name in COUNTS)
    if len(steady) == 1:
        stages = steady[0][1]
        series = [
            LineSeries(name.upper(), kind, [(each["load"], each["first_audio"][name]) for each in stages])
            for name, kind in (("p50", "q1"), ("p95", "q2"), ("p99", "q3"))
        ]
        words = "P50, P95 and P99 of time to first audio."
    else:
        series = [
            LineSeries(run["name"], f"s{at + 1}", [(each["load"], each["first_audio"]["p95"]) for each in stages])
            for at, (run, stages) in enumerate(steady[:MAX_SERIES])
        ]
        words = "P95 of time to first audio."
    return _line_chart("Time to first audio by load", words, series, axes)


def _goodput(steady: Steady, x_name: str, *, ideal: bool) -> Chart:
    series = []
    for at, (run, stages) in enumerate(steady[:MAX_SERIES]):
        label = run["name"] if len(steady) > 1 else "goodput"
        series.append(LineSeries(label, f"s{at + 1}", [(each["load"], each["goodput"]) for each in stages]))
    if ideal:
        highest = max(each["load"] for _, stages in steady for each in stages)
        series.append(LineSeries("all requests", "muted", [(0.0, 0.0), (highest, highest)], dotted=True, marks=False))
    forms = lambda v: f"{v:.3g}", lambda v: f"{v:.3g}"
    axes = AxesSpec(x_name, "good requests per second", *forms, x_whole=x_name in COUNTS)
    caption = "Requests that met the objective: audio started in time and playback never stalled."
    return _line_chart("Goodput", caption, series, axes)


def _starvation(steady: Steady, x_name: str) -> Chart:
    """Draw one server with every buffer size, or several servers with the middle one."""
    series = []
    if len(steady) == 1:
        stages = steady[0][1]
        for at, kind in enumerate(STEPS[: len(stages[0]["starved"])]):
            label = f"{1000 * stages[0]['starved'][at]['buffer']:.0f} ms"
            series.append(LineSeries(label, kind, [(each["load"], each["starved"][at]["share"]) for each in stages]))
        words = "Share of requests whose playback stalled, by the buffer of the player."
    else:
        for number_of, (run, stages) in enumerate(steady[:MAX_SERIES]):
            points = [(each["load"], each["starved"][1]["share"]) for each in stages]
            series.append(LineSeries(run["name"], f"s{number_of + 1}", points))
        words = "Share of requests whose playback stalled with a buffer of 100 ms."
    forms = lambda v: f"{v:.3g}", lambda v: f"{100 * v:.3g} %"
    axes = AxesSpec(x_name, "stalled requests", *forms, x_whole=x_name in COUNTS)
    return _line_chart("Playback stalls", words, series, axes)


def _first_audio_strips(stages: list[tuple[dict[str, Any], dict[str, Any]]], target: float, *, alone: bool) -> Chart:
    rows = []
    for run, stage in stages:
        label = stage["name"] if alone else f"{run['name']}, {stage['name']}"
        values = [each["first_audio"] for each in stage["outcomes"] if each["error"] is None]
        rows.append(_strip(label, values, stage["first_audio"]))
    highest = max(value for row in rows for value in row.values)
    mark = (target, "objective") if highest > target / 3 else None
    caption = "One dot per completed request."
    svg = strips("Time to first audio by load", rows, duration, mark=mark)
    return Chart("Time to first audio", caption, svg, PERCENTILES)


def _timeline(run: dict[str, Any], stage: dict[str, Any], target: float) -> Chart:
    rows = [each for each in stage["timeline"] if each["first_audio_p50"] is not None]
    series = [
        LineSeries(name, kind, [(each["at"], each[key]) for each in rows])
        for name, kind, key in (("P50", "q1", "first_audio_p50"), ("P95", "q3", "first_audio_p95"))
    ]
    highest = max(y for line in series for _, y in line.points)
    mark = (target, "objective") if highest > target / 3 else None
    axes = AxesSpec("seconds", "TTFA", lambda v: f"{v:.3g}", duration, mark=mark)
    errors = sum(each["errors"] for each in stage["timeline"])
    caption = f"{run['name']}, {stage['name']}: {counted(stage['requests'], 'request')}, {counted(errors, 'error')}."
    return _line_chart("Time to first audio over time", caption, series, axes)


def _quality(document: Document) -> Iterator[Chart]:
    for key, title, caption, digits in (
        ("wer", "Word error rate", "Percent, by a speech recogniser that makes errors of its own.", 1),
        ("mos", "Opinion score", "Predicted mean opinion score, 1 to 5.", 2),
        ("similarity", "Speaker similarity", "Cosine similarity to the same voice in the first configuration.", 3),
    ):
        rows = [
            BarGroup(run["name"], [StackedBar([("s1", run["metrics"][key], "")], number(run["metrics"][key], digits))])
            for run in document["runs"]
            if run["metrics"].get(key) is not None
        ]
        if rows:
            yield Chart(title, caption, bars(title, rows, lambda v: f"{v:g}"))


def _scaling(document: Document) -> Iterator[Chart]:
    for run in document["runs"]:
        measured = [(point["size"], point["median"]) for point in run["points"]]
        fitted = [(at, run["factor"] * at ** run["exponent"]) for at, _ in measured]
        series = [
            LineSeries("measured", "s1", measured),
            LineSeries(f"n^{run['exponent']:.2f}", "muted", fitted, dotted=True, marks=False),
        ]
        axes = AxesSpec(run["unit"], run["measure"], lambda v: f"{v:g}", duration, x_log=True, y_log=True)
        yield _line_chart(run["name"], f"Expected growth: {run['law']}.", series, axes)


def _steps(count: int) -> list[str]:
    return [STEPS[min(at, len(STEPS) - 1)] for at in range(count)]


def _omitted(runs: list[dict[str, Any]]) -> str:
    more = len(runs) - MAX_SERIES
    return f" {counted(more, 'more configuration')} in the table." if more > 0 else ""


_OF = {
    "bench": _bench,
    "engine": _engine,
    "load": _load,
    "profile": profile_charts,
    "quality": _quality,
    "scaling": _scaling,
}
