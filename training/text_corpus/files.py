"""Files of sentences, and the lists written by hand that lie beside this module."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def word_lists() -> dict[str, list[str]]:
    """By the name of the file; a list, since a bare string would fill in its letters."""
    return {path.stem: path.read_text(encoding="ascii").splitlines() for path in (HERE / "words").glob("*.txt")}


def own_sentences(name: str) -> str:
    """One sentence or template per line."""
    return (HERE / "sentences" / f"{name}.txt").read_text(encoding="ascii").rstrip("\n")


def read_sentences(path: Path) -> list[str]:
    """One sentence per line; a name that ends in .gz is decompressed."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()


def write_sentences(path: Path, sentences: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{sentence}\n" for sentence in sentences).encode()
    # Without a time stamp the same sentences are the same file.
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
