"""Shoal: production inference for the Fish-Speech voices."""

__version__ = "0.1.0"
