"""Samples <-> bytes: decode recordings, encode speech as files or streams, and detect output that is not speech.

Samples are numpy float32, mono, in [-1, 1]. PyAV (`ffmpeg.py`, `tempo.py`) and soxr (`resample.py`) are optional:
without them wav and pcm work at their own rate.
"""
