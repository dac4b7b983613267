"""Codec between frames of codes and audio samples: modified DAC, causal, with exact streaming."""
