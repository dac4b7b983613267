"""Reports: documents, charts, the HTML page, and the comparison of runs."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.cli.measure.report_output import show
from shoal.errors import InvalidRequest, MissingExtra, counted
from shoal.tools.bench.document import Document, new_document, read_document, write_document
from shoal.tools.bench.engine import POLICIES, Throughput, measure_scheduler
from shoal.tools.bench.load.client import parse_target
from shoal.tools.bench.load.run import LoadPlan, run_load
from shoal.tools.bench.load.stage import parse_stages
from shoal.tools.bench.machine import describe_client
from shoal.tools.bench.report.compare import compare, pairs
from shoal.tools.bench.report.markdown import markdown
from shoal.tools.bench.report.metrics import metrics
from shoal.tools.bench.report.page import page
from shoal.tools.bench.report.plots import VARIABLES, AxesSpec, LineSeries, lines
from shoal.tools.bench.report.tables import duration, size, size_in_unit_of, tables
from shoal.tools.bench.sweep import figures as batch_figures
from tests.browser import chromium
from tests.cli.conftest import Shoal, shoal  # noqa: F401
from tests.tools.bench.documents import bench_document, check_schema
from tests.tools.bench.virtual import VirtualLoop, VirtualServer

SILENT = {"text": 0, "seconds": 0.5, "first_audio": 0.0, "audio_seconds": 0.0, "frames": 0, "error": None}


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.events.new_event_loop", VirtualLoop)


def load_document(*, slower: float = 1.0, seed: int = 0, search: bool = False) -> Document:
    server = VirtualServer(first=0.2 * slower, gap=0.05 * slower, jitter=0.2, slots=4, seed=seed)
    plan = LoadPlan(parse_stages("1,2,4", "open", seconds=40.0), search=search, seed=seed)
    document = run_load([parse_target("http://fake:1")], plan, progress=False, http=server)
    check_schema(document)
    return document


def engine_document() -> Document:
    document = new_document("engine", dict(describe_client()), {"model": "made up", "quick": False})
    document["complete"] = True
    figures = {"seconds": 0.09, "best_seconds": 0.08, "cpu_seconds": 0.09, "tokens_saved": 0.0, "waits": [0.08, 0.09]}
    run: dict[str, Any] = {"name": "made up", "engine": {"dtype": "float32", "backend": "eager"}}
    run["throughput"] = [
        Throughput(
            policy,
            voices,
            3 * voices,
            90 * voices,
            120,
            4.0,
            4.0,
            3.0,
            1.0,
            4.5 * voices,
            [0.4] * 10,
            [0.1] * 3,
            [],
            1.2,
        ).figures
        for voices in (1, 4, 16)
        for policy in POLICIES
    ]
    run["first_audio"] = {"voice_seconds": 10.0, "prompt_tokens": 240, "known": figures, "unknown": figures}
    run["scheduler"] = measure_scheduler(20, voices=4, prompt=8, frames=70)
    document["runs"].append(run)
    return document


def quality_document() -> Document:
    document = new_document("quality", dict(describe_client()), {"model": "made up", "sentences": 25})
    document["complete"] = True
    for name, wer in (("fp32", 8.2), ("int8", 8.4)):
        figures: dict[str, Any] = {"name": name, "settings": {}, "reason": None, "clips": 25, "differences": {}}
        figures["metrics"] = {"wer": wer, "cer": 4.0, "mos": 2.8, "similarity": 0.9, "faults": 0.0}
        document["runs"].append(figures)
    document["runs"][1]["differences"]["wer"] = {"difference": 0.2, "low": -0.4, "high": 0.8}
    return document


def scaling_document() -> Document:
    from shoal.tools.bench.scaling import fit

    document = new_document("scaling", dict(describe_client()), {"model": "made up"})
    document["complete"] = True
    points = [{"size": n, "seconds": [n * 1e-3] * 3, "median": n * 1e-3} for n in (16, 64, 256)]
    exponent, factor = fit([16, 64, 256], [0.016, 0.064, 0.256])
    run = {"name": "Prefill", "unit": "columns", "measure": "seconds", "law": "n", "expected": 1.0, "points": points}
    document["runs"].append({**run, "exponent": exponent, "factor": factor})
    return document


ALL = (
    lambda: bench_document(1, names=("bf16", "int8 & <codec>", "a configuration with a very long name indeed")),
    engine_document,
    lambda: load_document(),
    quality_document,
    scaling_document,
)


@pytest.mark.parametrize("make", ALL)
def test_documents_round_trip_and_match_the_schema(make: Any, tmp_path: Path) -> None:
    document = make()
    check_schema(document)
    write_document(tmp_path / "a.json", document)
    assert read_document(tmp_path / "a.json") == json.loads(json.dumps(document))
    assert tables(document)
    assert document["runs"][0]["name"] in markdown([document])


def test_the_load_table_has_rate_and_percentiles_of_whole_requests() -> None:
    document = load_document()
    stage = document["runs"][0]["stages"][0]
    table = next(each for each in tables(document) if each.title == "Load")
    row = dict(zip(table.columns[-4:], table.rows[0][-4:], strict=True))
    latency = stage["latency"]
    assert row["P95"] == duration(latency["p95"])
    assert row["P99"] == duration(latency["p99"])
    assert f"{stage['throughput']:.2f}" in table.rows[0]


def test_the_page_opens_from_disk_without_network_and_every_chart_is_drawn(tmp_path: Path) -> None:
    documents = [make() for make in ALL]
    path = tmp_path / "report.html"
    path.write_text(page(documents), encoding="utf-8")
    complaints: list[str] = []
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1200, "height": 900})
        context.set_offline(True)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: None if request.url == path.as_uri() else complaints.append(request.url))
        tab.goto(path.as_uri())
        drawn = tab.evaluate(
            """() => [...document.querySelectorAll('figure')].map(figure => ({
                title: figure.querySelector('h3').textContent,
                box: figure.querySelector('svg').getBoundingClientRect(),
                marks: [...figure.querySelectorAll('.mark, .curve')].map(mark => mark.getBBox())
                    .filter(box => box.width + box.height > 0).length,
                outside: [...figure.querySelectorAll('svg text')].filter(text => {
                    const own = text.getBoundingClientRect(), all = figure.getBoundingClientRect();
                    return own.left < all.left || own.right > all.right;
                }).map(text => text.textContent),
            }))"""
        )
        titles = {figure["title"] for figure in drawn}
        for wanted in (
            "Real-time factor", "Throughput", "Time to first audio", "Request latency", "Peak RSS",
            "Start-up time", "Latency by batch size", "Time to first audio by load", "Goodput", "Playback stalls",
            "Time to first audio over time", "Word error rate", "Prefill", "Throughput by admission policy",
            "Time to first audio by admission policy", "Time to first audio with the prefix cache", "Scheduler",
        ):  # fmt: skip
            assert wanted in titles
        for figure in drawn:
            assert figure["box"]["width"] > 300, figure
            assert figure["box"]["height"] > 60, figure
            assert figure["marks"] > 0, figure
            assert figure["outside"] == [], figure
        mark = tab.locator("figure .mark").first
        mark.hover()
        assert tab.locator("#tip").inner_text() == mark.get_attribute("data-tip")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = tab.evaluate(ground)
        tab.locator("#theme").click()
        assert tab.evaluate(ground) != light
        # On a phone the page does not scroll horizontally.
        tab.set_viewport_size({"width": 390, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
    assert path.stat().st_size < 2_000_000


def test_charts_use_the_colours_of_the_page_in_light_and_dark() -> None:
    html = page([make() for make in ALL])
    charts = re.findall(r"<div class='plot'>(.*?)</div>", html, re.DOTALL)
    assert len(charts) > 20
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", "".join(charts)))
    assert {colour for colour in colours if not colour.startswith("var(--")} <= {"none"}
    assert {name for colour in colours for name in re.findall(r"var\(--(\w+)\)", colour)} <= set(VARIABLES)


def test_without_matplotlib_an_html_report_names_the_install_command(
    shoal: Shoal,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_document(tmp_path / "a.json", bench_document(1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["report", tmp_path / "a.json"], ["bench"], ["load", "http://127.0.0.1:1"]):
        ran = shoal(*command, "--html", tmp_path / "r.html")
        assert ran.code == MissingExtra.exit_code
        assert "pip install 'shoal-tts[bench]'" in ran.said
    assert shoal("report", tmp_path / "a.json").code == 0


def test_the_page_escapes_what_it_is_given() -> None:
    document = bench_document(1, names=("<script>alert(1)</script>",))
    document["machine"]["device"] = '"><img src=x onerror=alert(1)>'
    html = page([document])
    assert "<script>alert" not in html
    assert "<img" not in html
    assert not re.search(r"(src|href)\s*=\s*[\"']?https?:", html)


@pytest.mark.parametrize("seed", range(8))
def test_a_repeated_run_is_no_change_and_a_slower_one_is(seed: int) -> None:
    before = bench_document(2 * seed)
    assert compare(before, bench_document(2 * seed + 1)).changed == []
    slow = compare(before, bench_document(2 * seed + 1, slower=1.3))
    assert {(change.where, change.metric) for change in slow.worse} == {
        (f"{voices} concurrent", metric)
        for voices in (1, 4, 16)
        for metric in ("latency", "time to first audio", "throughput", "CPU per audio second")
    }
    assert slow.changed == slow.worse
    fast = compare(bench_document(2 * seed + 1, slower=1.3), before)
    assert fast.worse == []
    assert len(fast.changed) == 12


def test_a_repeated_load_test_is_no_change_and_a_slower_server_is() -> None:
    before = load_document(seed=1)
    assert compare(before, load_document(seed=1)).changed == []
    slower = compare(before, load_document(seed=1, slower=1.3))
    assert {"time to first audio", "latency"} <= {change.metric for change in slower.worse}


def test_a_change_within_the_tolerance_is_ignored() -> None:
    before, after = bench_document(1, noise=0.0), bench_document(1, noise=0.0, slower=1.03)
    assert compare(before, after).changed == []


def test_changes_on_a_loaded_machine_are_unsure() -> None:
    before, after = bench_document(1), bench_document(2, slower=1.3)
    after["machine"]["others_cpu"] = 0.5
    found = compare(before, after)
    assert found.worse == []
    assert {change.verdict for change in found.changed} == {"unsure"}
    assert found.in_short.startswith("0 worse, 0 better, 12 unsure")
    assert "unsure" in page([before, after])


def test_a_report_from_a_busy_machine_begins_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    document = bench_document(1)
    assert "was busy" not in markdown([document])
    document["machine"]["others_cpu"] = 0.35
    words = "The machine was busy: other programs used 35 % of its cores meanwhile."
    drawn = page([document])
    assert drawn.index(words) < drawn.index('class="tiles"')
    assert words in markdown([document])
    show([document])
    assert capsys.readouterr().out.startswith(f"warning: {words}")


def test_an_axis_of_counts_has_no_fractions_and_an_axis_of_times_one_unit() -> None:
    spec = AxesSpec("clients", "TTFA", lambda x: f"x {x:g}", duration, x_whole=True)
    drawn = lines("points", [LineSeries("a", "s1", [(1.0, 0.2), (2.0, 1.4)])], spec)
    words = [each.text or "" for each in ElementTree.fromstring(drawn).iter()]
    assert [word for word in words if word.startswith("x ")] == ["x 0", "x 1", "x 2"]
    assert {word.split()[1] for word in words if re.fullmatch(r"[\d.]+ (s|ms)", word)} == {"s"}


def test_counts_and_ticks_are_written_out() -> None:
    assert [counted(count, "row") for count in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert [size_in_unit_of(tick, 2.5e9) for tick in (0, 5e8, 2e9)] == ["0 GB", "0.5 GB", "2 GB"]


def test_differences_of_machine_and_settings_are_noted() -> None:
    before, after = bench_document(1), bench_document(2, names=("int8",))
    after["machine"]["device"] = "another"
    after["settings"]["price"] = 3.0
    after["machine"]["others_cpu"] = 0.6
    found = compare(before, after)
    assert any("another" in remark for remark in found.remarks)
    assert any("price" in remark for remark in found.remarks)
    assert any("60 %" in remark for remark in found.remarks)
    assert any("int8" in name for name in found.only_after)
    assert pairs([before, quality_document()]) == []


def test_the_report_command_compares_and_fails_with_strict(shoal: Shoal, tmp_path: Path) -> None:  # noqa: F811
    paths = [tmp_path / f"{name}.json" for name in ("before", "same", "slow")]
    for path, document in zip(
        paths, (bench_document(1), bench_document(2), bench_document(3, slower=1.3)), strict=True
    ):
        write_document(path, document)
    before, same, slow = paths
    alone = shoal("report", before)
    assert alone.code == 0
    assert "audio-s/s" in alone.text
    assert "no change beyond noise" in shoal("report", before, same, "--strict").text
    html, sheet = tmp_path / "r.html", tmp_path / "r.md"
    worse = shoal("report", before, slow, "--html", html, "--markdown", sheet)
    assert worse.code == 0
    assert "12 worse, 0 better" in worse.text
    assert "12 worse" in html.read_text()
    assert "| worse |" in sheet.read_text()
    assert shoal("report", before, slow, "--strict").code == 12


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "\x00", '{"schema": "shoal.bench/2"}', '{"schema": "shoal.bench/1", "kind": "bench", "runs": 3}',
     '{"schema": "shoal.bench/1", "kind": "bench", "machine": {}, "settings": {}, "runs": [{"name": "a"}]}'],
)  # fmt: skip
def test_invalid_files_are_rejected_by_name(shoal: Shoal, tmp_path: Path, content: str) -> None:  # noqa: F811
    path = tmp_path / "wrong.json"
    path.write_text(content)
    run = shoal("report", path)
    assert run.code == 2
    assert "wrong.json" in run.said


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing"):
        read_document(tmp_path / "nothing.json")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("highest", [0.0007, 0.03, 1.0, 7.3, 999.0, 1e6])
def test_axes_contain_every_point_and_have_a_few_ticks(highest: float, log: bool) -> None:
    points = [(1.0, highest / 90), (4.0, highest / 3), (16.0, highest)]
    spec = AxesSpec("batch size", "y", lambda x: f"{x:g}", lambda y: f"tick {y:g}", x_log=log, y_log=log)
    svg = ElementTree.fromstring(lines("points", [LineSeries("a", "s1", points)], spec))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    marks = [each for each in svg.iter() if each.get("class") == "mark"]
    assert len(marks) == len(points)
    assert all(0 <= float(each.attrib["x"]) <= width and 0 <= float(each.attrib["y"]) <= height for each in marks)
    ticks = [each.text for each in svg.iter() if (each.text or "").startswith("tick ")]
    assert 3 <= len(ticks) <= 9


def test_durations_and_sizes_have_readable_units() -> None:
    assert [duration(each) for each in (None, 0.0, 2e-5, 0.0123, 0.5, 2.345, 75.0)] == [
        "–", "0 s", "20 µs", "12.3 ms", "500 ms", "2.35 s", "75 s"
    ]  # fmt: skip
    assert [size(each) for each in (12, 1_500, 2_340_000, 7.5e9)] == ["12 B", "1.5 kB", "2.34 MB", "7.5 GB"]


def test_a_benchmark_without_audio_can_be_reported() -> None:
    document = bench_document(1)
    for run in document["runs"]:
        rounds = [{"voices": 1, "seconds": 1.0, "cpu_seconds": 1.0, "requests": [SILENT]}]
        run["batches"] = [batch_figures(1, rounds, 1.0)] if run["batches"] else []
    check_schema(document)
    assert "Request latency" in page([document])
    assert "bf16" in markdown([document])
    assert [metric.name for metric in metrics(document) if metric.where == "1 concurrent"] == [
        "latency", "throughput", "errors"
    ]  # fmt: skip
