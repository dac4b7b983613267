"""Gates: thresholds on the metrics of a system, absolute or relative to another system."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.errors import InvalidRequest
from training.evaluate.metrics import METRICS, measure
from training.evaluate.pairs import paired
from training.evaluate.scores import Score

NAME = r"[A-Za-z_]\w*(?:-[A-Za-z]\w*)*"
NUMBER = r"-?\d+(?:\.\d+)?"
GATE = re.compile(
    rf"(?P<metric>\w+):(?P<system>{NAME})(?P<test><=|>=)"
    rf"(?:(?P<limit>{NUMBER})|(?P<other>{NAME})(?:(?P<change>[+*-])(?P<amount>\d+(?:\.\d+)?))?)"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """`wer:tts<=20`, or against another system on the sentences both spoke: `mos:tts>=teacher-0.5`, `cer:a<=b*1.05`."""

    text: str
    metric: str
    system: str
    test: str
    other: str | None
    change: str
    amount: float

    def limit(self, other: float) -> float:
        return other * self.amount if self.change == "*" else other + float(f"{self.change}{self.amount}")


@dataclass(frozen=True, slots=True)
class GateResult:
    gate: str
    value: float | None
    limit: float | None
    passed: bool


def parse_gates(text: str) -> list[Gate]:
    return [_gate(part) for part in re.sub(r"\s", "", text).split(",") if part]


def _gate(text: str) -> Gate:
    match = GATE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"gate {text!r}: write METRIC:SYSTEM<=NUMBER or METRIC:SYSTEM>=SYSTEM-NUMBER")
    if match["metric"] not in METRICS:
        raise InvalidRequest(f"gate {text!r}: the metrics are {', '.join(METRICS)}")
    amount = float(match["limit"] or match["amount"] or 0)
    return Gate(text, match["metric"], match["system"], match["test"], match["other"], match["change"] or "+", amount)


def check_gate(gate: Gate, scores: Sequence[Score]) -> GateResult:
    """Return the result of a gate; a metric that could not be measured fails."""
    limit: float | None = gate.amount
    own = [score for score in scores if score.clip.system == gate.system]
    if gate.other is not None:
        others, own = paired(scores, gate.other, gate.system)
        base = measure(gate.metric, others)
        limit = None if base is None else gate.limit(base)
    value = measure(gate.metric, own)
    if value is None or limit is None:
        return GateResult(gate.text, value, limit, False)
    # Rounding of the sums must not fail a gate.
    slack = 1e-9
    passed = value <= limit + slack if gate.test == "<=" else value >= limit - slack
    return GateResult(gate.text, value, limit, passed)


def check_gate_systems(gates: Iterable[Gate], systems: set[str]) -> None:
    for gate in gates:
        for system in filter(None, (gate.system, gate.other)):
            if system not in systems:
                raise InvalidRequest(f"gate {gate.text!r}: no system {system!r} among {', '.join(sorted(systems))}")
