"""Parity with upstream: recompute stored inputs of the reference implementation and compare the outputs."""

from shoal.tools.verify.comparison import ParityComparison
from shoal.tools.verify.groups import GROUPS, verify
from shoal.tools.verify.report import as_json, as_table, require_all

__all__ = ["GROUPS", "ParityComparison", "as_json", "as_table", "require_all", "verify"]
