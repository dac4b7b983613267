"""Results of a verification as a terminal table and as JSON."""

import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from shoal.errors import VerificationFailed
from shoal.tools.verify.comparison import ParityComparison

if TYPE_CHECKING:
    from rich.table import Table


def as_table(comparisons: Sequence[ParityComparison]) -> "Table":
    """Return a table with one row per group, showing its worst comparison."""
    from rich.table import Table

    table = Table("group", "comparisons", "worst", "difference", "tolerance", "result")
    for group, members in groupby(comparisons, key=lambda each: each.group):
        found = list(members)
        worst = max(found, key=lambda each: (not each.ok, each.strain))
        verdict = "[green]ok[/]" if worst.ok else f"[red]{sum(not each.ok for each in found)} failed[/]"
        table.add_row(group, str(len(found)), _plain(worst.name), *_figures(worst), verdict)
    return table


def as_json(comparisons: Sequence[ParityComparison]) -> str:
    """Return all comparisons as JSON. A difference that is not finite (NaN, different shapes) becomes null."""
    rows = [
        {
            "group": each.group,
            "name": each.name,
            "difference": each.difference if math.isfinite(each.difference) else None,
            "tolerance": each.tolerance,
            "ok": each.ok,
        }
        for each in comparisons
    ]
    return json.dumps({"ok": all(each.ok for each in comparisons), "comparisons": rows}, ensure_ascii=False)


def require_all(comparisons: Sequence[ParityComparison]) -> None:
    """Raise VerificationFailed with the names of the groups that exceed their tolerance."""
    failed = [each for each in comparisons if not each.ok]
    if failed:
        groups = ", ".join(dict.fromkeys(each.group for each in failed))
        raise VerificationFailed(f"{len(failed)} of {len(comparisons)} comparisons failed, in {groups}")


def _figures(worst: ParityComparison) -> tuple[str, str]:
    if worst.tolerance == 0:
        return f"{worst.difference:.0f} unequal", "equal"
    return f"{worst.difference:.1e}", f"{worst.tolerance:.0e}"


def _plain(name: str) -> str:
    from rich.markup import escape

    return escape(name)
