"""Paths of the documentation pages, and the code blocks of them that the tests run."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
RUNS = re.compile(r"<!-- runs -->\n```(\w+)\n(.*?)```", re.DOTALL)
ADDRESS = "http://localhost:8080"


@dataclass(frozen=True)
class Snippet:
    page: str
    number: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}-{self.language}"

    def at(self, address: str) -> str:
        """Return the code with requests to the server at this address."""
        return self.code.replace(ADDRESS, address)


def snippets() -> list[Snippet]:
    return [
        Snippet(page.stem, number, language, code)
        for page in PAGES
        for number, (language, code) in enumerate(RUNS.findall(page.read_text(encoding="utf-8")), 1)
    ]
