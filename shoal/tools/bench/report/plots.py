"""The few forms all charts take: rows of bars, rows of spreads, and lines over a scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.tools.bench.report.svg import (
    LETTER,
    TEXT,
    WIDTH,
    Canvas,
    Scale,
    decades,
    linear,
    logarithmic,
    room_for,
    shortened,
    ticks,
)

Format = Callable[[float], str]

BAR, GAP, ROW_GAP, AXIS = 16.0, 3.0, 14.0, 30.0
PLOT_HEIGHT = 230.0


@dataclass(frozen=True, slots=True)
class Legend:
    """A swatch of the page's style and what it stands for."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    caption: str
    svg: str
    legend: list[Legend] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bar:
    """Segments (style, value, tip) from the axis outwards, and the words at its end."""

    segments: list[tuple[str, float, str]]
    words: str

    @property
    def total(self) -> float:
        return sum(value for _, value, _ in self.segments)


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    bars: list[Bar]


def bars(label: str, rows: Sequence[Row], form: Format, *, mark: tuple[float, str] | None = None) -> str:
    """Horizontal bars in groups; `mark` is a value with a name to measure them by."""
    left = room_for([row.label for row in rows])
    right = max([24.0, *(len(bar.words) * LETTER + 10 for row in rows for bar in row.bars)])
    most = max([bar.total for row in rows for bar in row.bars] + ([mark[0]] if mark else []))
    scale = ticks(most)
    x = linear(0.0, scale[-1], left, WIDTH - right)
    heights = [len(row.bars) * (BAR + GAP) - GAP for row in rows]
    top = 20.0 if mark else 6.0
    bottom = top + sum(heights) + ROW_GAP * len(rows)
    canvas = Canvas(bottom + AXIS, label)
    _vertical_grid(canvas, scale, x, form, top - 4, bottom)
    at = top + ROW_GAP / 2
    for row, height in zip(rows, heights, strict=True):
        canvas.text(left - 10, at + height / 2 + 4, shortened(row.label, left - 12), "name", "end")
        for bar in row.bars:
            _bar(canvas, bar, x, at)
            at += BAR + GAP
        at += ROW_GAP - GAP
    canvas.line(left, top - 4, left, bottom, "axis")
    if mark is not None:
        canvas.line(x(mark[0]), top - 6, x(mark[0]), bottom, "mark-line")
        canvas.text(x(mark[0]), top - 9, mark[1], "note", "middle")
    return canvas.svg()


def _bar(canvas: Canvas, bar: Bar, x: Scale, at: float) -> None:
    done = 0.0
    for number, (kind, value, tip) in enumerate(bar.segments):
        # Two pixels of the ground between neighbours keep them apart without an outline.
        gap = 2.0 if number and value else 0.0
        width = max(0.0, x(done + value) - x(done) - gap)
        canvas.bar(x(done) + gap, at, width, BAR, kind, tip, round=number == len(bar.segments) - 1)
        done += value
    canvas.text(x(done) + 7, at + BAR / 2 + 4, bar.words, "value")


@dataclass(frozen=True, slots=True)
class Strip:
    """Measurements of one thing, and their percentiles."""

    label: str
    values: list[float]
    p50: float
    p95: float
    p99: float
    note: str = ""


def strips(label: str, rows: Sequence[Strip], form: Format, *, mark: tuple[float, str] | None = None) -> str:
    """Every measurement as a dot, with P50, P95 and P99 above them."""
    height, left = 40.0, room_for([row.label for row in rows])
    right = room_for([form(row.p50) for row in rows], 50.0) + 8
    most = max([value for row in rows for value in row.values] + ([mark[0]] if mark else []))
    scale = ticks(most)
    x = linear(0.0, scale[-1], left, WIDTH - right)
    top = 22.0
    bottom = top + height * len(rows)
    canvas = Canvas(bottom + AXIS, label)
    _vertical_grid(canvas, scale, x, form, top, bottom)
    for at, row in enumerate(rows):
        middle = top + height * (at + 0.5)
        canvas.text(left - 10, middle + 4, shortened(row.label, left - 12), "name", "end")
        canvas.line(x(min(row.values)), middle, x(max(row.values)), middle, "range")
        for number, value in enumerate(row.values):
            # Five heights in turn keep dots of equal values apart, the same way every time.
            canvas.dot(x(value), middle + (number * 2 % 5 - 2) * 4.0, "faint s1", form(value), 3.0)
        for name, value, kind in (("P50", row.p50, "q1"), ("P95", row.p95, "q2"), ("P99", row.p99, "q3")):
            canvas.bar(x(value) - 1.5, middle - 13, 3.0, 26.0, kind, f"{name} {form(value)}", round=False)
        canvas.text(WIDTH - right + 10, middle + 4, form(row.p50), "value")
    canvas.line(left, top, left, bottom, "axis")
    canvas.text(WIDTH - right + 10, top - 8, "P50", "note")
    if mark is not None:
        canvas.line(x(mark[0]), top - 6, x(mark[0]), bottom, "mark-line")
        canvas.text(x(mark[0]), top - 9, mark[1], "note", "middle")
    return canvas.svg()


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of their x; `tip` gives the words of a point."""

    label: str
    kind: str
    points: list[tuple[float, float]]
    dotted: bool = False
    marks: bool = True


@dataclass(frozen=True, slots=True)
class Axes:
    x_name: str
    y_name: str
    x_form: Format
    y_form: Format
    x_log: bool = False
    y_log: bool = False
    x_ticks: list[float] | None = None  # else round numbers
    mark: tuple[float, str] | None = None  # a value of y with a name


def lines(label: str, series: Sequence[Line], axes: Axes, *, named: bool = True) -> str:
    """Lines over a scale; each has its name at its end, where there is room."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points] + ([axes.mark[0]] if axes.mark else [])
    y_scale = decades(min(y for y in ys if y > 0), max(ys)) if axes.y_log else ticks(max(ys))
    left = room_for([axes.y_form(tick) for tick in y_scale], 30.0) + 2
    right = room_for([line.label for line in series], 20.0, 130.0) if named else 20.0
    top, bottom = 28.0, 28.0 + PLOT_HEIGHT
    kind = logarithmic if axes.y_log else linear
    y = kind(y_scale[0], y_scale[-1], bottom, top)
    x = _across(axes, xs, left, WIDTH - right)
    canvas = Canvas(bottom + AXIS + 18, label)
    for tick in y_scale:
        canvas.line(left, y(tick), WIDTH - right, y(tick))
        canvas.text(left - 8, y(tick) + 4, axes.y_form(tick), "tick", "end")
    for tick in _x_ticks(axes, xs):
        canvas.text(x(tick), bottom + 18, axes.x_form(tick), "tick", "middle")
    canvas.line(left, bottom, WIDTH - right, bottom, "axis")
    canvas.text(left - 8, 13, axes.y_name, "note", "start")
    canvas.text((left + WIDTH - right) / 2, bottom + 38, axes.x_name, "note", "middle")
    if axes.mark is not None:
        canvas.line(left, y(axes.mark[0]), WIDTH - right, y(axes.mark[0]), "mark-line")
        canvas.text(left + 6, y(axes.mark[0]) - 6, axes.mark[1], "note")
    for line in series:
        _line(canvas, line, x, y, axes)
    if named:
        _names(canvas, series, x, y, right, bottom)
    return canvas.svg()


def _line(canvas: Canvas, line: Line, x: Scale, y: Scale, axes: Axes) -> None:
    points = [(x(at), y(value)) for at, value in line.points]
    canvas.curve(points, f"{line.kind}{' dotted' if line.dotted else ''}")
    if line.marks:
        for (at, value), (left, top) in zip(line.points, points, strict=True):
            tip = f"{line.label}: {axes.y_form(value)} at {axes.x_form(at)} {axes.x_name}"
            canvas.dot(left, top, line.kind, tip)


def _names(canvas: Canvas, series: Sequence[Line], x: Scale, y: Scale, right: float, bottom: float) -> None:
    """At the ends of the lines, pushed apart where they would lie over each other."""
    ends = [(y(line.points[-1][1]), x(line.points[-1][0]), line) for line in series]
    ends.sort(key=lambda end: end[0])
    heights = [height for height, _, _ in ends]
    for at in range(1, len(heights)):
        heights[at] = max(heights[at], heights[at - 1] + TEXT + 2)
    # None below the axis: the lowest moves up, and whoever is in its way with it.
    heights[-1] = min(heights[-1], bottom)
    for at in reversed(range(len(heights) - 1)):
        heights[at] = min(heights[at], heights[at + 1] - TEXT - 2)
    for height, (_, left, line) in zip(heights, ends, strict=True):
        canvas.text(left + 10, height + 4, shortened(line.label, right - 12), "name")


def _across(axes: Axes, xs: Sequence[float], left: float, right: float) -> Scale:
    if axes.x_log:
        return logarithmic(min(xs), max(max(xs), min(xs) * 1.001), left + 14, right - 14)
    scale = axes.x_ticks or ticks(max(xs))
    return linear(min(0.0, scale[0]), scale[-1], left + 6, right - 10)


def _x_ticks(axes: Axes, xs: Sequence[float]) -> list[float]:
    if axes.x_ticks is not None:
        return axes.x_ticks
    return sorted(set(xs)) if axes.x_log else ticks(max(xs), 6)


def _vertical_grid(canvas: Canvas, scale: Sequence[float], x: Scale, form: Format, top: float, bottom: float) -> None:
    for tick in scale:
        canvas.line(x(tick), top, x(tick), bottom)
        canvas.text(x(tick), bottom + 18, form(tick), "tick", "middle")
