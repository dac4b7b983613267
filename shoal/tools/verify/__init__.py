"""Does this build compute what upstream computes? What the reference read and gave, run again and compared."""

from shoal.tools.verify.comparison import ParityComparison
from shoal.tools.verify.groups import GROUPS, verify
from shoal.tools.verify.report import as_json, as_table, require_all

__all__ = ["GROUPS", "ParityComparison", "as_json", "as_table", "require_all", "verify"]
