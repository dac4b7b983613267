"""Drawing of charts as inline SVG with matplotlib: grouped bars, distributions and lines.

Colours are drawn as placeholders and become CSS variables of the page, so that one SVG serves light and dark mode.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from shoal.errors import MissingExtra
from shoal.tools.bench.report.tables import duration, duration_in_unit_of, size, size_in_unit_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Format = Callable[[float], str]

WIDTH = 560.0  # points of the view box; the page scales the chart
BAR, GROUP_GAP, STRIP, PLOT = 20.0, 16.0, 44.0, 300.0  # heights in points
TOP, BOTTOM = 30.0, 44.0
MAX_LABEL = 26  # characters

# Variables of style.css: series, ordered steps of one hue, text and lines.
VARIABLES = (*(f"s{n}" for n in range(1, 9)), "q1", "q2", "q3", "q4", "muted", "ink", "soft", "faint", "rule", "axis")
COLOURS = {name: f"#fe{number:04x}" for number, name in enumerate(VARIABLES)}
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
    "text.parse_math": False,
    "font.size": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["axis"],
    "axes.labelcolor": COLOURS["faint"],
    "axes.grid": True,
    "grid.color": COLOURS["rule"],
    "xtick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["faint"],
    "ytick.color": COLOURS["rule"],
    "ytick.labelcolor": COLOURS["faint"],
    "xtick.major.size": 0.0,
    "xtick.major.pad": 7.0,
    "ytick.major.size": 0.0,
    "ytick.major.pad": 7.0,
    "text.color": COLOURS["ink"],
}


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A colour of the page's style and its meaning."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    caption: str
    svg: str
    legend: list[LegendEntry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StackedBar:
    """Segments (colour, value, tooltip) from the axis outwards, and the text at the end."""

    segments: list[tuple[str, float, str]]
    words: str

    @property
    def total(self) -> float:
        return sum(value for _, value, _ in self.segments)


@dataclass(frozen=True, slots=True)
class BarGroup:
    label: str
    bars: list[StackedBar]


@dataclass(frozen=True, slots=True)
class Strip:
    """All measurements of one row, and their percentiles."""

    label: str
    values: list[float]
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class LineSeries:
    """Points (x, y) in the order of x."""

    label: str
    kind: str
    points: list[tuple[float, float]]
    dotted: bool = False
    marks: bool = True


@dataclass(frozen=True, slots=True)
class AxesSpec:
    x_name: str
    y_name: str
    x_form: Format
    y_form: Format
    x_log: bool = False
    y_log: bool = False
    x_whole: bool = False  # x is a count: no ticks at fractions
    mark: tuple[float, str] | None = None  # reference value of y and its name


class Plot:
    """One figure with one set of axes, and the tooltips of its artists."""

    def __init__(self, label: str, height: float) -> None:
        from matplotlib.figure import Figure

        self.label, self._tips = label, dict[str, list[str]]()
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        self.figure.patch.set_visible(False)
        self.axes: Axes = self.figure.add_subplot()
        self.axes.patch.set_visible(False)

    def add_tips(self, artist: "Artist", tips: Sequence[str]) -> None:
        """Attach one tooltip to every mark of an artist, in drawing order."""
        name = f"tip-{len(self._tips)}"
        artist.set_gid(name)
        self._tips[name] = list(tips)

    def svg(self) -> str:
        """Render the figure as an `<svg>` element for a page."""
        output = StringIO()
        with warnings.catch_warnings():
            # The browser draws the text, so a glyph that matplotlib's font lacks does not matter.
            warnings.filterwarnings("ignore", message="Glyph")
            self.figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
        ElementTree.register_namespace("", SVG)
        ElementTree.register_namespace("xlink", XLINK)
        root = ElementTree.fromstring(output.getvalue())
        self._clean(root)
        for element in root.iter(f"{{{SVG}}}g"):
            if (tips := self._tips.get(element.get("id", ""))) is not None:
                self._mark(element, tips)
        return _themed(ElementTree.tostring(root, encoding="unicode"))

    def _clean(self, root: ElementTree.Element) -> None:
        """Drop metadata, global styles and the fixed size: the page's own style decides."""
        for parent in list(root.iter()):
            for child in list(parent):
                if child.tag.rpartition("}")[2] in ("metadata", "style"):
                    parent.remove(child)
        for name in ("width", "height", "version"):
            root.attrib.pop(name, None)
        root.set("role", "img")
        root.set("aria-label", self.label)

    @staticmethod
    def _mark(group: ElementTree.Element, tips: list[str]) -> None:
        """Set class and tooltip of the drawn elements; a line without a tooltip of its own comes before its dots."""
        definitions = {id(each) for part in group.iter(f"{{{SVG}}}defs") for each in part.iter()}
        drawn = [each for each in group.iter() if each.tag in (f"{{{SVG}}}path", f"{{{SVG}}}use")]
        drawn = [each for each in drawn if id(each) not in definitions]
        for each in drawn[: len(drawn) - len(tips)]:
            each.set("class", "curve")
        for each, tip in zip(drawn[len(drawn) - len(tips) :], tips, strict=True):
            each.set("class", "mark")
            if tip:
                each.set("data-tip", tip)


def bars(label: str, groups: Sequence[BarGroup], form: Format, *, mark: tuple[float, str] | None = None) -> str:
    """Draw horizontal bars in groups; `mark` is a reference value and its name."""
    count = sum(len(group.bars) for group in groups)
    with _plot(label, count * BAR + len(groups) * GROUP_GAP + BOTTOM + (TOP if mark else 8.0)) as plot:
        at, ticks = 0.0, list[float]()
        for group in groups:
            ticks.append(at + (len(group.bars) - 1) * BAR / 2)
            for bar in group.bars:
                _draw_bar(plot, bar, at)
                at += BAR
            at += GROUP_GAP
        plot.axes.set_ylim(at - GROUP_GAP / 2 - BAR / 2, -GROUP_GAP / 2 - BAR / 2)
        _label_rows(plot.axes, ticks, [group.label for group in groups])
        _value_axis(plot.axes.xaxis, form)
        _reference_line(plot.axes, mark)
        plot.axes.set_xlim(left=0.0)
        return plot.svg()


def strips(label: str, rows: Sequence[Strip], form: Format, *, mark: tuple[float, str] | None = None) -> str:
    """Draw every measurement as a dot, with lines at P50, P95 and P99 and the value of P50 at the right."""
    with _plot(label, len(rows) * STRIP + BOTTOM + TOP) as plot:
        for at, row in enumerate(rows):
            _draw_strip(plot, row, at, form)
        _label_rows(plot.axes, list(range(len(rows))), [row.label for row in rows])
        plot.axes.set_ylim(len(rows) - 0.5, -0.5)
        plot.axes.set_xlim(0.0, 1.04 * max([v for row in rows for v in row.values] + ([mark[0]] if mark else [])))
        _text(plot.axes, "P50", (1.0, 1.0), "axes fraction", (8, 7), color=COLOURS["faint"])
        _value_axis(plot.axes.xaxis, form)
        _reference_line(plot.axes, mark)
        return plot.svg()


def lines(label: str, series: Sequence[LineSeries], spec: AxesSpec) -> str:
    """Draw lines over linear or logarithmic axes; linear ones start at 0."""
    with _plot(label, PLOT) as plot:
        _scale_axes(plot.axes, spec, sorted({x for line in series for x, _ in line.points}))
        for line in series:
            _draw_line(plot, line, spec)
        if not spec.y_log:
            top = max([y for line in series for _, y in line.points] + ([spec.mark[0]] if spec.mark else []))
            plot.axes.set_ylim(0.0, 1.08 * top or 1.0)
        if not spec.x_log:
            plot.axes.set_xlim(left=0.0)
        plot.axes.set_xlabel(spec.x_name)
        plot.axes.set_title(spec.y_name, loc="left", fontsize=12, color=COLOURS["faint"])
        if spec.mark is not None:
            plot.axes.axhline(spec.mark[0], color=COLOURS["s6"], linestyle=(0, (4, 4)), linewidth=1)
            where = (0.0, spec.mark[0])
            _text(plot.axes, spec.mark[1], where, ("axes fraction", "data"), (6, 5), color=COLOURS["faint"])
        return plot.svg()


def require_matplotlib() -> None:
    """Raise MissingExtra with the install command if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("HTML reports need matplotlib: pip install 'shoal-tts[bench]'") from None


@contextmanager
def _plot(label: str, height: float) -> Iterator[Plot]:
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield Plot(label, height)


def _draw_bar(plot: Plot, bar: StackedBar, at: float) -> None:
    start = 0.0
    for kind, value, tip in bar.segments:
        (patch,) = plot.axes.barh(at, value, BAR - 4.0, left=start, color=COLOURS[kind])
        plot.add_tips(patch, [tip])
        start += value
    _text(plot.axes, bar.words, (start, at), "data", (6, 0), va="center_baseline")


def _draw_strip(plot: Plot, row: Strip, at: int, form: Format) -> None:
    plot.axes.hlines(at, min(row.values), max(row.values), color=COLOURS["axis"], linewidth=1.5)
    # Cycle through five heights, so that equal values do not overlap, deterministically.
    heights = [at + (number * 2 % 5 - 2) * 0.1 for number in range(len(row.values))]
    dots = plot.axes.scatter(row.values, heights, 28.0, color=COLOURS["s1"], alpha=0.35, linewidth=0.0, zorder=2)
    plot.add_tips(dots, [form(value) for value in row.values])
    for name, value, kind in (("P50", row.p50, "q1"), ("P95", row.p95, "q2"), ("P99", row.p99, "q3")):
        line = plot.axes.vlines(value, at - 0.34, at + 0.34, color=COLOURS[kind], linewidth=3.0, zorder=3)
        plot.add_tips(line, [f"{name} {form(value)}"])
    _text(plot.axes, form(row.p50), (1.0, at), ("axes fraction", "data"), (8, 0), va="center_baseline")


def _draw_line(plot: Plot, line: LineSeries, spec: AxesSpec) -> None:
    xs, ys = zip(*line.points, strict=True)
    style = (0, (1, 3)) if line.dotted else "-"
    marker = "o" if line.marks else ""
    (drawn,) = plot.axes.plot(
        xs, ys, color=COLOURS[line.kind], linestyle=style, linewidth=2.0, marker=marker, markersize=6, clip_on=False
    )
    tips = [f"{line.label}: {spec.y_form(y)} at {spec.x_form(x)} {spec.x_name}" for x, y in line.points]
    plot.add_tips(drawn, tips if line.marks else [])


def _scale_axes(axes: "Axes", spec: AxesSpec, xs: list[float]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    _value_axis(axes.xaxis, spec.x_form, whole=spec.x_whole)
    _value_axis(axes.yaxis, spec.y_form)
    axes.grid(visible=False, axis="x")
    if spec.x_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(xs))
    if spec.y_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    for axis, form, log in ((axes.xaxis, spec.x_form, spec.x_log), (axes.yaxis, spec.y_form, spec.y_log)):
        axis.set_minor_locator(NullLocator())
        # The ticks of a logarithmic axis span several units.
        axis.set_major_formatter(_plain_formatter(form) if log else _formatter(axis, form))


def _value_axis(axis: "Axis", form: Format, *, whole: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10], integer=whole))
    axis.set_major_formatter(_formatter(axis, form))


# Formats with a unit, and the same in the one unit that suits an axis up to its end.
AXIS_FORMATS: dict[Format, Callable[[float, float], str]] = {duration: duration_in_unit_of, size: size_in_unit_of}


def _plain_formatter(form: Format) -> Callable[[float, float], str]:
    return lambda value, _: form(value)


def _formatter(axis: "Axis", form: Format) -> Callable[[float, float], str]:
    in_unit_of = AXIS_FORMATS.get(form)
    if in_unit_of is None:
        return _plain_formatter(form)
    return lambda value, _: in_unit_of(value, axis.get_view_interval()[1])


def _label_rows(axes: "Axes", ticks: Sequence[float], labels: Sequence[str]) -> None:
    shortened = [label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…" for label in labels]
    axes.set_yticks(ticks, shortened)
    axes.tick_params(axis="y", labelcolor=COLOURS["ink"])
    axes.grid(visible=False, axis="y")
    axes.spines.bottom.set_visible(False)


def _reference_line(axes: "Axes", mark: tuple[float, str] | None) -> None:
    if mark is None:
        return
    axes.axvline(mark[0], color=COLOURS["s6"], linestyle=(0, (4, 4)), linewidth=1)
    _text(axes, mark[1], (mark[0], 1.0), ("data", "axes fraction"), (0, 7), ha="center", color=COLOURS["faint"])


def _text(
    axes: "Axes", words: str, at: tuple[float, float], coordinates: Any, offset: tuple[int, int], **style: Any
) -> None:
    axes.annotate(words, at, xycoords=coordinates, xytext=offset, textcoords="offset points", **style)


def _themed(svg: str) -> str:
    """Replace placeholder colours by CSS variables, use the page's font, and drop ids that nothing refers to."""
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"font: [^;\"]*", "font-size: 12px", svg)
    referenced = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", svg))
    return re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referenced else "", svg)
