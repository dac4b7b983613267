"""Normalization by language, for models that read many: numbers and symbols of a text become words."""

from collections.abc import Callable

from shoal.text.normalize import normalize

NORMALIZERS: dict[str, Callable[[str], str]] = {"en": normalize}
