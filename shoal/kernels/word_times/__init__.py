"""Attention over the text of a turn and the path through it, from which word times are computed."""
