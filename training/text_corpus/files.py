"""Read and write files of sentences, and read the word lists beside this module."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def word_lists() -> dict[str, list[str]]:
    """Return the word lists by file name."""
    return {path.stem: path.read_text(encoding="ascii").splitlines() for path in (HERE / "words").glob("*.txt")}


def own_sentences(name: str) -> str:
    """Return the sentences and templates of a file, one per line."""
    return (HERE / "sentences" / f"{name}.txt").read_text(encoding="ascii").rstrip("\n")


def read_sentences(path: Path) -> list[str]:
    """Return the sentences of a file, one per line; a name that ends in .gz is decompressed."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()


def write_sentences(path: Path, sentences: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{sentence}\n" for sentence in sentences).encode()
    # Without a time stamp, so that the same sentences give the same bytes.
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
