"""Report of documents as Markdown."""

from shoal.errors import counted
from shoal.tools.bench.document import Document
from shoal.tools.bench.report.compare import BUSY, pairs
from shoal.tools.bench.report.tables import changes_table, tables

TITLES = {
    "bench": "Benchmark",
    "engine": "Engine",
    "load": "Load test",
    "profile": "Profile",
    "quality": "Quality",
    "scaling": "Scaling",
}


def markdown(documents: list[Document]) -> str:
    parts = ["# Shoal measurements\n"]
    for comparison in pairs(documents):
        remarks = "".join(f"- {remark}\n" for remark in comparison.remarks)
        parts += [changes_table(comparison).markdown(), f"{comparison.in_short}\n", remarks]
    for document in documents:
        parts += [f"## {headline(document)}\n", f"{context(document)}\n"]
        parts += [f"**{warning}**\n"] if (warning := busy_warning(document)) else []
        parts += [] if document["complete"] else ["Interrupted: finished measurements only.\n"]
        parts += [sheet.markdown() for sheet in tables(document)]
    return "\n".join(part for part in parts if part)


def busy_warning(document: Document) -> str | None:
    """Return a warning for a measurement that other programs disturbed; None for a quiet machine."""
    share = document["machine"].get("others_cpu")
    if not isinstance(share, float) or share <= BUSY:
        return None
    return (
        f"The machine was busy: other programs used {share:.0%} of its cores meanwhile. "
        "An idle machine is faster, and two busy runs cannot be compared."
    ).replace("%", " %")


def headline(document: Document) -> str:
    model = document["settings"].get("model")
    return f"{TITLES[document['kind']]}{f' of {model}' if model else ''}"


def context(document: Document) -> str:
    """Return machine, build and date of a document as one sentence."""
    machine = document["machine"]
    cores = f", {counted(machine['cores'], 'core')}" if "cores" in machine else ""
    threads = f", {counted(machine['threads'], 'thread')}" if "threads" in machine else ""
    build = f"shoal {machine.get('shoal', '?')}" + (f" at {document['commit']}" if document["commit"] else "")
    torch = f", torch {machine['torch']}" if "torch" in machine else ""
    when = document["created"].replace("T", " ").replace("Z", " UTC")
    return f"{machine.get('device', '?')}{cores}{threads}; {build}{torch}; {when}."
