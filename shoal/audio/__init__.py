"""Samples <-> bytes: read recordings, write speech whole or as a stream, and notice what is not speech.

Samples are numpy float32, mono, in [-1, 1]. `ffmpeg.py` alone touches PyAV and `resample.py` alone touches soxr;
without them wav and pcm still work at their own rate.
"""
