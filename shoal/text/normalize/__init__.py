"""Written text -> spoken words: English (`english.py` and its parts), and symbols and numbers of other languages."""

from shoal.text.normalize.english import normalize

__all__ = ["normalize"]
