"""A generated novel: prose with dialogue, numbers and names, of any length, the same for the same seed.

`python -m tests.book.prose 20000 novel.epub` writes one for trials that are too long for the tests.
"""

import random
import sys
import zipfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

NAMES = ["Martha", "Edwin", "Clara", "Silas", "Agnes", "Tobias", "Ruth", "Harold", "Eleanor", "Jonas"]
PLACES = ["the harbour", "the old mill", "the market square", "the lighthouse", "the churchyard", "the upper road"]
THINGS = ["letter", "lantern", "brass key", "map", "silver coin", "ledger", "violin", "weathered chest", "telescope"]
ADJECTIVES = ["quiet", "narrow", "bright", "cold", "distant", "familiar", "heavy", "uncertain", "patient", "sudden"]
WEATHER = ["rain", "fog", "a thin wind", "the evening sun", "snow", "thunder far away"]
VERBS = ["carried", "found", "hid", "remembered", "lost", "opened", "examined", "wrapped", "borrowed", "returned"]
SAID = ["said", "answered", "whispered", "replied", "called", "insisted"]
SPEECH = (
    "I have waited here since morning",
    "You should not have come alone",
    "Nobody has seen the {thing} for years",
    "We leave for {place} before dawn",
    "It was never about the {thing}",
    "Tell {name} that I was wrong",
    "There are only {number} of us left",
)
NARRATION = (
    "{name} {verb} the {thing} and walked towards {place}.",
    "Beyond {place} the {adjective} sea lay under {weather}.",
    "For {number} days there had been nothing but {weather}.",
    "{name} had known {place} long before the {thing} was lost, and still it seemed {adjective}.",
    "When {weather} came over {place}, {name} closed the {adjective} door and lit the lamp.",
    "No one spoke.",
    "In 18{number} the town had bought the {thing} for ${number}.50, which was thought {adjective} at the time.",
    "Mr. {name} counted the {adjective} steps to {place}; there were {number}.",
)


class Prose:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def paragraph(self) -> str:
        count = self._random.randint(3, 6)
        return " ".join(self._dialogue() if self._random.random() < 0.3 else self._narration() for _ in range(count))

    def chapter(self, words: int) -> list[str]:
        """Return paragraphs of at least that many words together."""
        paragraphs: list[str] = []
        while sum(len(each.split()) for each in paragraphs) < words:
            paragraphs.append(self.paragraph())
        return paragraphs

    def _fill(self, template: str) -> str:
        choose = self._random.choice
        return template.format(
            name=choose(NAMES),
            place=choose(PLACES),
            thing=choose(THINGS),
            adjective=choose(ADJECTIVES),
            weather=choose(WEATHER),
            verb=choose(VERBS),
            number=self._random.randint(12, 98),
        )

    def _narration(self) -> str:
        return self._fill(self._random.choice(NARRATION))

    def _dialogue(self) -> str:
        first, second = (self._fill(self._random.choice(SPEECH)) for _ in range(2))
        said = f"{self._random.choice(SAID)} {self._random.choice(NAMES)}"
        return f"“{first},” {said}. “{second}.”"


def novel(words: int, chapters: int, seed: int = 0) -> dict[str, list[str]]:
    """Return paragraphs by title of the chapter."""
    prose = Prose(seed)
    return {f"Chapter {number}": prose.chapter(words // chapters) for number in range(1, chapters + 1)}


CONTAINER = """<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OEBPS/content.opf" media-type="application/oebps-package+xml"/></rootfiles>
</container>"""


def write_epub(path: Path, chapters: dict[str, list[str]], *, cover: bytes | None = None, **extra: str | bytes) -> Path:
    """Write an epub 3 as publishers do: a document per chapter, a navigation document. `extra` replaces entries."""
    entries: dict[str, str | bytes] = {
        "META-INF/container.xml": CONTAINER,
        "OEBPS/content.opf": _package(len(chapters), cover),
        "OEBPS/nav.xhtml": _nav(chapters),
        **{f"OEBPS/text/c{n}.xhtml": page for n, page in enumerate(_pages(chapters), 1)},
    }
    if cover is not None:
        entries["OEBPS/cover.jpg"] = cover
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        for name, content in (entries | extra).items():
            archive.writestr(name, content)
    return path


def _pages(chapters: dict[str, list[str]]) -> Iterator[str]:
    for title, paragraphs in chapters.items():
        body = "".join(f"<p>{escape(text)}</p>" for text in paragraphs)
        yield (
            '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml"><head>'
            f"<title>{escape(title)}</title></head><body><h1>{escape(title)}</h1>{body}</body></html>"
        )


def _package(count: int, cover: bytes | None) -> str:
    items = "".join(
        f'<item id="c{n}" href="text/c{n}.xhtml" media-type="application/xhtml+xml"/>' for n in range(1, count + 1)
    )
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(1, count + 1))
    image = '<item id="i" href="cover.jpg" media-type="image/jpeg" properties="cover-image"/>' if cover else ""
    return f"""<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">x</dc:identifier>
<dc:title>The Harbour &amp; the Key</dc:title><dc:creator>Ann Writer</dc:creator><dc:language>en</dc:language>
<dc:date>1899-05-01</dc:date></metadata><manifest>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>{image}{items}</manifest>
<spine><itemref idref="nav"/>{spine}</spine></package>"""


def _nav(chapters: dict[str, list[str]]) -> str:
    items = "".join(f'<li><a href="text/c{n}.xhtml">{escape(title)}</a></li>' for n, title in enumerate(chapters, 1))
    return f"""<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><head><title>x</title>
</head><body><nav epub:type="toc"><h1>Contents</h1><ol>{items}</ol></nav></body></html>"""


if __name__ == "__main__":
    count = int(sys.argv[1])
    write_epub(Path(sys.argv[2]), novel(count, max(2, count // 2500)))
