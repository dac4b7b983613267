"""Frames <-> samples: the causal codec, whole and as exact streams."""
