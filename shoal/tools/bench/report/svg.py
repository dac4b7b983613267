"""Drawing charts as text: scales, ticks and marks. Colours are names of the page's style: light and dark are its part.

All coordinates are in a box of fixed width; the page lets it grow and shrink.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 560.0
TEXT = 12.0
# Of the page's font, on average: what a label needs can only be guessed without a browser.
LETTER = 7.2

Scale = Callable[[float], float]


@dataclass(slots=True)
class Canvas:
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> None:
        self.parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str, tip: str, *, round: bool = True) -> None:
        """From the axis to the right; only the end that carries the value is rounded."""
        r = min(4.0, width / 2, height / 2) if round else 0.0
        path = (
            f"M{x:.1f} {y:.1f}h{max(0.0, width - r):.1f}q{r:.1f} 0 {r:.1f} {r:.1f}v{height - 2 * r:.1f}"
            f"q0 {r:.1f} {-r:.1f} {r:.1f}h{-max(0.0, width - r):.1f}z"
        )
        self.parts.append(f'<path class="mark {kind}" d="{path}" {_tip(tip)}/>')

    def dot(self, x: float, y: float, kind: str, tip: str, radius: float = 4.0) -> None:
        self.parts.append(f'<circle class="mark dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" {_tip(tip)}/>')

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path class="curve {kind}" d="M{path}"/>')

    def area(self, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], kind: str) -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *reversed(lower)])
        self.parts.append(f'<path class="area {kind}" d="M{path}Z"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def svg(self) -> str:
        box = f'viewBox="0 0 {WIDTH:.0f} {self.height:.0f}"'
        return f'<svg {box} role="img" aria-label="{escape(self.label)}">{"".join(self.parts)}</svg>'


def _tip(words: str) -> str:
    return f'data-tip="{escape(words)}"' if words else ""


def linear(low: float, high: float, begin: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def logarithmic(low: float, high: float, begin: float, end: float) -> Scale:
    scale = linear(math.log(low), math.log(high), begin, end)
    return lambda value: scale(math.log(max(value, low)))


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to a little above `most`."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999)
    return [step * at for at in range(math.ceil(most / step * 0.999) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around a range, with 2 and 5 between them where that leaves few; never less than a decade."""
    if high / low < 10:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if last - first > 3 else (1, 2, 5)
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = max((each for each in found if each <= low * 1.001), default=found[0])
    above = min((each for each in found if each >= high * 0.999), default=found[-1])
    return [each for each in found if below <= each <= above]


def room_for(labels: Sequence[str], least: float = 24.0, most: float = 210.0) -> float:
    """The width of the widest label."""
    return min(most, max([least, *(len(label) * LETTER + 12 for label in labels)]))


def shortened(words: str, width: float) -> str:
    letters = round(width / LETTER)
    return words if len(words) <= letters else words[: letters - 1] + "…"
