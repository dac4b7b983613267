"""Smaller weights: which kinds there are, which this machine can use, and how far they are from the original."""
