"""Which charts a document becomes, and what each of them says."""

from collections.abc import Iterator
from typing import Any

from shoal.tools.bench.document import Document
from shoal.tools.bench.report.plots import Axes, Bar, Chart, Legend, Line, Row, Strip, bars, lines, strips
from shoal.tools.bench.report.tables import duration, number, size

# Series of a line chart keep to the page's eight colours.
COLOURS = 8
# Steps of one hue for things that have an order: batch sizes, percentiles.
STEPS = ("q1", "q2", "q3", "q4")
MOST_TIMELINES = 4
MOST_STRIPS = 12


def charts(document: Document) -> list[Chart]:
    return list(_OF[document["kind"]](document))


def _bench(document: Document) -> Iterator[Chart]:
    runs = [run for run in document["runs"] if run["batches"]]
    if not runs:
        return
    # In pairs of the same height.
    if any(run["batches"][0]["rtf"] for run in runs):
        yield _rtf(runs)
    yield _memory(runs)
    yield _production(runs)
    yield _starts(runs)
    yield from _distributions(runs)
    if any(len(run["batches"]) > 1 for run in runs):
        yield _batch_latency(runs, "first_audio", "Batch size against first audio", "TTFA P95")
        yield _batch_latency(runs, "latency", "Batch size against latency", "whole request, P95")


def _rtf(runs: list[dict[str, Any]]) -> Chart:
    few = [(run, run["batches"][0]) for run in runs]
    voices = few[0][1]["voices"]
    rows = [
        Row(run["name"], [Bar([("s1", batch["rtf"], f"{run['name']}: RTF {batch['rtf']:.4f}")], f"{batch['rtf']:.3f}")])
        for run, batch in few
        if batch["rtf"]
    ]
    caption = f"Seconds of work per second of audio, {voices} at a time. Below 1 it is faster than it is heard."
    most = max(row.bars[0].total for row in rows)
    # Far below real time the line would only push the bars into a corner.
    mark = (1.0, "real time") if most > 0.25 else None
    return Chart(
        "Real-time factor", caption, bars("Real-time factor by configuration", rows, lambda v: f"{v:g}", mark=mark)
    )


def _production(runs: list[dict[str, Any]]) -> Chart:
    sizes = sorted({batch["voices"] for run in runs for batch in run["batches"]})
    kinds = dict(zip(sizes, _steps(len(sizes)), strict=True))
    rows = [
        Row(
            run["name"],
            [
                Bar(
                    [(kinds[batch["voices"]], batch["audio_per_second"], _production_tip(run, batch))],
                    number(batch["audio_per_second"], 1),
                )
                for batch in run["batches"]
            ],
        )
        for run in runs
    ]
    legend = [Legend(kind, f"{count} at a time") for count, kind in kinds.items()]
    caption = "Seconds of audio made per second; the same number is hours of audio per hour."
    return Chart("Audio produced", caption, bars("Audio produced by configuration", rows, lambda v: f"{v:g}"), legend)


def _production_tip(run: dict[str, Any], batch: dict[str, Any]) -> str:
    cost = batch["cost_per_audio_hour"]
    price = f", {cost:.4f} per hour of audio" if cost is not None else ""
    return f"{run['name']}, {batch['voices']} at a time: {batch['audio_per_second']:.2f} audio-s/s{price}"


def _distributions(runs: list[dict[str, Any]]) -> Iterator[Chart]:
    for key, figure, title, words in (
        ("first_audio", "first_audio", "Time to first audio", "Every request"),
        ("seconds", "latency", "Latency of whole requests", "Texts differ in length, and so do requests; every one"),
    ):
        rows = []
        for run in runs:
            batch = run["batches"][0]
            values = [each[key] for each in batch["requests"] if each["error"] is None]
            if batch[figure]:
                # A request without audio has no first audio: 0.
                rows.append(_strip(run["name"], list(filter(None, values)), batch[figure]))
        if rows:
            voices = runs[0]["batches"][0]["voices"]
            caption = f"{words} is a dot, {voices} at a time."
            yield Chart(title, caption, strips(title, rows, duration), PERCENTILES)


PERCENTILES = [Legend("q1", "P50"), Legend("q2", "P95"), Legend("q3", "P99")]


def _strip(label: str, values: list[float], told: dict[str, Any]) -> Strip:
    # More dots than a strip can show are only weight on the page.
    shown = values if len(values) <= 400 else [*sorted(values)[:: len(values) // 400 + 1], max(values)]
    return Strip(label, shown, told["p50"], told["p95"], told["p99"])


def _batch_latency(runs: list[dict[str, Any]], figure: str, title: str, y_name: str) -> Chart:
    series = [
        Line(run["name"], f"s{at + 1}", [(b["voices"], b[figure]["p95"]) for b in run["batches"] if b[figure]])
        for at, run in enumerate(runs[:COLOURS])
    ]
    axes = Axes("voices at a time", y_name, lambda v: f"{v:g}", duration, x_log=True)
    return Chart(title, f"What sharing the machine costs each listener.{_left_out(runs)}", lines(title, series, axes))


def _memory(runs: list[dict[str, Any]]) -> Chart:
    kind = runs[0]["memory"]["kind"]
    rows = []
    for run in runs:
        told = run["memory"]
        before, model, work = (
            told["baseline"],
            max(0, told["loaded"] - told["baseline"]),
            max(0, told["peak"] - max(told["loaded"], told["baseline"])),
        )
        segments = [
            ("muted", before, f"before: {size(before)}"),
            ("s1", model, f"model: {size(model)}"),
            ("s2", work, f"at work: {size(work)}"),
        ]
        rows.append(Row(run["name"], [Bar([(k, float(v), tip) for k, v, tip in segments], size(told["peak"]))]))
    legend = [Legend("muted", "before loading"), Legend("s1", "model loaded"), Legend("s2", "while speaking, at most")]
    caption = (
        "Memory of the device." if kind == "VRAM" else "Resident memory of the process, Python and torch included."
    )
    return Chart(f"Peak {kind}", caption, bars("Memory by configuration", rows, size), legend)


def _starts(runs: list[dict[str, Any]]) -> Chart:
    rows = []
    for run in runs:
        found = [(name, start) for name, start in run["startup"].items() if start is not None]
        rows.append(
            Row(
                run["name"],
                [
                    Bar(
                        [
                            ("s1", start["load"], f"{name}: read in {duration(start['load'])}"),
                            ("s3", start["warm_up"], f"{name}: warm-up {duration(start['warm_up'])}"),
                        ],
                        f"{duration(start['load'] + start['warm_up'])} {name}",
                    )
                    for name, start in found
                ],
            )
        )
    legend = [Legend("s1", "reading the model"), Legend("s3", "warm-up")]
    caption = "Cold: nothing compiled yet. Warm: what the cold start left is there."
    return Chart("Start", caption, bars("Start by configuration", rows, duration), legend)


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
    title, kinds = "Audio produced by policy", _policy_kinds(rows)
    groups = [
        Row(
            f"{voices} at a time",
            [
                Bar([(kinds[row["policy"]], pace := row["audio_per_second"], _pace_tip(row))], number(pace, 1))
                for row in rows
                if row["voices"] == voices
            ],
        )
        for voices in dict.fromkeys(row["voices"] for row in rows)
    ]
    legend = [Legend(kind, policy) for policy, kind in kinds.items()]
    caption = "Seconds of audio made per second, by voices at a time and by who may join when."
    return Chart(title, caption, bars(title, groups, lambda v: f"{v:g}"), legend)


def _pace_tip(row: dict[str, Any]) -> str:
    return f"{row['policy']}: {row['frames_per_second']:,.1f} frames/s, RTF {row['rtf']:.3f}"


def _policies_first_audio(rows: list[dict[str, Any]]) -> Chart:
    title = "First audio by policy"
    series = [
        Line(policy, kind, [(row["voices"], row["first_audio"]["p50"]) for row in rows if row["policy"] == policy])
        for policy, kind in _policy_kinds(rows).items()
    ]
    axes = Axes("voices at a time", "TTFA P50", lambda v: f"{v:g}", duration, x_log=True)
    caption = "From asking to the first chunk; who has to wait for a batch hears later."
    return Chart(title, caption, lines(title, series, axes))


def _policy_kinds(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {policy: f"s{at}" for at, policy in enumerate(dict.fromkeys(row["policy"] for row in rows), 1)}


def _prefix_cache(told: dict[str, Any]) -> Chart:
    title = "First audio and the prefix cache"
    rows = []
    for label, key in (("a new voice", "unknown"), ("a known voice", "known")):
        tip = f"{label}: {told[key]['columns_saved']:,.0f} columns saved, best {duration(told[key]['best_seconds'])}"
        rows.append(Row(label, [Bar([("s1", told[key]["seconds"], tip)], duration(told[key]["seconds"]))]))
    caption = f"A voice of {told['voice_seconds']:.0f} s; its prompt has {told['prompt_columns']:,} columns."
    return Chart(title, caption, bars(title, rows, duration))


def _scheduler(told: dict[str, Any]) -> Chart:
    title, rate = "The scheduler alone", told["sequence_steps_per_second"]
    words = f"{rate:,.0f} /s"
    row = Row(f"{told['voices']} voices", [Bar([("s1", rate, f"{words}, {told['steps']:,} steps")], words)])
    caption = "Sequence-steps per second with a model that takes no time: what Python costs."
    mark = (float(told["target"]), "wanted")
    return Chart(title, caption, bars(title, [row], lambda v: f"{v / 1000:g} k" if v else "0", mark=mark))


def _load(document: Document) -> Iterator[Chart]:
    runs = [run for run in document["runs"] if run["stages"]]
    target = document["settings"]["objective"]
    for arrivals, x_name in (("open", "requests/s available_settings"), ("closed", "clients")):
        steady = [(run, _steady(run, arrivals)) for run in runs]
        if any(len(stages) > 1 for _, stages in steady):
            yield _against_load(steady, x_name, target["first_audio"])
            yield _goodput(steady, x_name, ideal=arrivals == "open")
            yield _starvation(steady, x_name)
    stages = [(run, stage) for run in runs for stage in run["stages"] if stage["first_audio"]]
    if stages:
        yield _first_audio_strips(stages[:MOST_STRIPS], target["first_audio"], alone=len(runs) == 1)
    # A line through a handful of requests would show nothing but their order.
    timed = [(run, stage) for run, stage in stages if stage["requests"] >= 20 and len(stage["timeline"]) >= 8]
    for run, stage in timed[-MOST_TIMELINES:]:
        yield _timeline(run, stage, target["first_audio"])


def _steady(run: dict[str, Any], arrivals: str) -> list[dict[str, Any]]:
    stages = [each for each in run["stages"] if each["arrivals"] == arrivals and each["ramp_from"] is None]
    return sorted((each for each in stages if each["first_audio"]), key=lambda each: each["load"])


Steady = list[tuple[dict[str, Any], list[dict[str, Any]]]]


def _against_load(steady: Steady, x_name: str, target: float) -> Chart:
    mark = (target, f"objective {duration(target)}")
    axes = Axes(x_name, "TTFA", lambda v: f"{v:.3g}", duration, mark=mark)
    if len(steady) == 1:
        stages = steady[0][1]
        series = [
            Line(name.upper(), kind, [(each["load"], each["first_audio"][name]) for each in stages])
            for name, kind in (("p50", "q1"), ("p95", "q2"), ("p99", "q3"))
        ]
        words = "P50, P95 and P99 of time to first audio."
    else:
        series = [
            Line(run["name"], f"s{at + 1}", [(each["load"], each["first_audio"]["p95"]) for each in stages])
            for at, (run, stages) in enumerate(steady[:COLOURS])
        ]
        words = "P95 of time to first audio."
    return Chart("Latency against load", words, lines("Latency against load", series, axes))


def _goodput(steady: Steady, x_name: str, *, ideal: bool) -> Chart:
    series = []
    for at, (run, stages) in enumerate(steady[:COLOURS]):
        label = run["name"] if len(steady) > 1 else "goodput"
        series.append(Line(label, f"s{at + 1}", [(each["load"], each["goodput"]) for each in stages]))
    if ideal:
        most = max(each["load"] for _, stages in steady for each in stages)
        series.append(Line("all of them", "muted", [(0.0, 0.0), (most, most)], dotted=True, marks=False))
    axes = Axes(x_name, "good requests per second", lambda v: f"{v:.3g}", lambda v: f"{v:.3g}")
    caption = "Requests whose audio began in time and never ran out."
    return Chart("Goodput", caption, lines("Goodput against load", series, axes))


def _starvation(steady: Steady, x_name: str) -> Chart:
    """Of one server with every buffer; of several with the middle one."""
    series = []
    if len(steady) == 1:
        stages = steady[0][1]
        for at, kind in enumerate(STEPS[: len(stages[0]["starved"])]):
            label = f"{1000 * stages[0]['starved'][at]['buffer']:.0f} ms"
            series.append(Line(label, kind, [(each["load"], each["starved"][at]["share"]) for each in stages]))
        words = "Share of requests whose audio ran out while it was played, by the player's buffer."
    else:
        for number_of, (run, stages) in enumerate(steady[:COLOURS]):
            points = [(each["load"], each["starved"][1]["share"]) for each in stages]
            series.append(Line(run["name"], f"s{number_of + 1}", points))
        words = "Share of requests whose audio ran out while it was played, with a buffer of 100 ms."
    axes = Axes(x_name, "starved", lambda v: f"{v:.3g}", lambda v: f"{100 * v:.3g} %")
    return Chart("Playback starvation", words, lines("Starvation against load", series, axes))


def _first_audio_strips(stages: list[tuple[dict[str, Any], dict[str, Any]]], target: float, *, alone: bool) -> Chart:
    rows = []
    for run, stage in stages:
        label = stage["name"] if alone else f"{run['name']}, {stage['name']}"
        values = [each["first_audio"] for each in stage["outcomes"] if each["error"] is None]
        rows.append(_strip(label, values, stage["first_audio"]))
    most = max(value for row in rows for value in row.values)
    mark = (target, "objective") if most > target / 3 else None
    caption = "Every answered request is a dot."
    svg = strips("Time to first audio by load", rows, duration, mark=mark)
    return Chart("Time to first audio", caption, svg, PERCENTILES)


def _timeline(run: dict[str, Any], stage: dict[str, Any], target: float) -> Chart:
    rows = [each for each in stage["timeline"] if each["first_audio_p50"] is not None]
    series = [
        Line(name, kind, [(each["at"], each[key]) for each in rows])
        for name, kind, key in (("P50", "q1", "first_audio_p50"), ("P95", "q3", "first_audio_p95"))
    ]
    most = max(y for line in series for _, y in line.points)
    mark = (target, "objective") if most > target / 3 else None
    axes = Axes("seconds", "TTFA", lambda v: f"{v:.3g}", duration, mark=mark)
    errors = sum(each["errors"] for each in stage["timeline"])
    caption = f"{run['name']}, {stage['name']}: {stage['requests']} requests, {errors} errors."
    return Chart("Over time", caption, lines("Time to first audio over time", series, axes))


def _quality(document: Document) -> Iterator[Chart]:
    for key, title, caption, digits in (
        ("wer", "Word errors", "Percent of words misheard by a recogniser, which has a floor of its own.", 1),
        ("mos", "Opinion score", "Predicted mean opinion score, 1 to 5.", 2),
        ("similarity", "Likeness of voice", "Cosine to other clips of the voice in the first configuration.", 3),
    ):
        rows = [
            Row(run["name"], [Bar([("s1", run["metrics"][key], "")], number(run["metrics"][key], digits))])
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
            Line("measured", "s1", measured),
            Line(f"n^{run['exponent']:.2f}", "muted", fitted, dotted=True, marks=False),
        ]
        axes = Axes(run["unit"], run["measure"], lambda v: f"{v:g}", duration, x_log=True, y_log=True)
        yield Chart(run["name"], f"{run['law']}.", lines(run["name"], series, axes))


def _steps(count: int) -> list[str]:
    return [STEPS[min(at, len(STEPS) - 1)] for at in range(count)]


def _left_out(runs: list[dict[str, Any]]) -> str:
    more = len(runs) - COLOURS
    return f" {more} more configurations are in the table." if more > 0 else ""


_OF = {"bench": _bench, "engine": _engine, "load": _load, "quality": _quality, "scaling": _scaling}
