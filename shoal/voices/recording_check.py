"""Checks of a recording before it becomes a voice: length, level, noise, clipping, speech, and its transcript.

Errors (a file that cannot be decoded, silence, a length beyond the limits) raise AudioError. Everything else is a
finding: the voice can be made, but would sound worse than it could. The measures are energy and periodicity of short
windows, which distinguish a voice from noise and hum, but not from music.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.audio.decode import DecodedAudio, check_reference, read_audio
from shoal.audio.guard import reading_seconds
from shoal.audio.pcm import Samples
from shoal.voices.voice import VoiceLimits, check_prompt

Levels: TypeAlias = NDArray[np.float32]

WINDOW_SECONDS, HOP_SECONDS = 0.04, 0.02
PITCH_HERTZ = (60.0, 400.0)
PERIODIC = 0.5  # minimum normalised autocorrelation of a voiced window
ANALYSIS_RATE = 8_000  # approximate Hz after decimation; enough to detect the pitch
BATCH_WINDOWS = 512  # bounds the memory of the autocorrelation

FLOOR_DB = -90.0
ACTIVE_DB = 30.0  # windows at most this far below the loud ones count as active
BEST_SECONDS = (6.0, 45.0)
QUIET_DB, NOISY_DB, STEADY_DB = -36.0, 15.0, 2.5
FULL_SCALE, MAX_CLIPPED = 0.985, 0.0005
MIN_VOICED = 0.15  # fraction of the recording
PACE = (0.45, 4.0)  # seconds of recording per second of ordinary reading of the transcript


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem of a recording that can still be used, and how to fix it."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """Measures of a recording. Levels are in decibels below full scale."""

    seconds: float
    sample_rate: int  # sample rate of the file
    channels: int
    level_db: float  # level of the active windows
    noise_db: float  # level of the quietest windows
    clipped: float  # fraction of the samples
    speech_seconds: float  # voiced windows
    findings: tuple[Finding, ...] = ()


def check_recording(audio: bytes, limits: VoiceLimits, transcript: str | None = None) -> RecordingReport:
    """Decode and measure a recording. Raises AudioError for one that cannot become a voice."""
    recording = _decoded(audio, limits)
    check_reference(recording)
    check_prompt(recording.seconds, limits)
    levels = _levels(recording.samples, recording.sample_rate)
    loud = float(np.percentile(levels, 95))
    active = levels > max(loud - ACTIVE_DB, FLOOR_DB)
    voiced = _voiced(recording.samples, recording.sample_rate)[: len(levels)]
    report = RecordingReport(
        seconds=recording.seconds,
        sample_rate=recording.original_rate,
        channels=recording.original_channels,
        level_db=float(10 * np.log10(np.mean(10 ** (levels[active] / 10)))),
        noise_db=float(np.percentile(levels, 5)),
        clipped=_clipped(recording.samples),
        speech_seconds=float(np.count_nonzero(active[: len(voiced)] & voiced)) * HOP_SECONDS,
    )
    findings = tuple(_findings(report, float(levels.std()), transcript))
    return RecordingReport(**{name: getattr(report, name) for name in MEASURES}, findings=findings)


MEASURES = ("seconds", "sample_rate", "channels", "level_db", "noise_db", "clipped", "speech_seconds")


def _decoded(audio: bytes, limits: VoiceLimits) -> DecodedAudio:
    """Decode at the rate of the file: resampling would round off clipped peaks."""
    recording = read_audio(audio, 48_000, limits.audio)
    if recording.original_rate == 48_000:
        return recording
    return read_audio(audio, recording.original_rate, limits.audio)


def _windows(samples: Samples, rate: float) -> Samples:
    """Return overlapping windows [windows, samples per window]; at least one."""
    window, hop = round(WINDOW_SECONDS * rate), round(HOP_SECONDS * rate)
    padded = np.pad(samples, (0, max(0, window - len(samples))))
    return np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]


def _levels(samples: Samples, rate: int) -> Levels:
    """Return the RMS level of each window in dBFS."""
    power = np.array([float(np.dot(window, window)) / len(window) for window in _windows(samples, rate)])
    levels: Levels = (10 * np.log10(np.maximum(power, 10 ** (FLOOR_DB / 10)))).astype(np.float32)
    return levels


def _voiced(samples: Samples, rate: int) -> NDArray[np.bool_]:
    """Return whether each window repeats with the period of a voice."""
    every = max(1, rate // ANALYSIS_RATE)
    low = samples[: len(samples) // every * every].reshape(-1, every).mean(axis=1)
    windows = _windows(low, rate / every)
    batches = range(0, len(windows), BATCH_WINDOWS)
    return np.concatenate([_periodic(windows[at : at + BATCH_WINDOWS], rate / every) for at in batches])


def _periodic(windows: Samples, rate: float) -> NDArray[np.bool_]:
    centred = windows - windows.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * windows.shape[1])
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)
    first, last = int(rate / PITCH_HERTZ[1]), int(rate / PITCH_HERTZ[0])
    lags = np.arange(first, min(last, windows.shape[1] - 1))
    # The overlap shrinks with the lag; without the correction low voices would look aperiodic.
    overlap = (windows.shape[1] - lags) / windows.shape[1]
    peak = (correlation[:, lags] / overlap).max(axis=1)
    voiced: NDArray[np.bool_] = peak > PERIODIC * np.maximum(correlation[:, 0], 1e-9)
    return voiced


def _clipped(samples: Samples) -> float:
    """Return the fraction of samples at full scale followed by another one: a single sample there is not clipping."""
    high = np.abs(samples) >= FULL_SCALE
    return float(np.mean(high[1:] & high[:-1])) if len(samples) > 1 else 0.0


def _findings(report: RecordingReport, spread_db: float, transcript: str | None) -> Iterator[Finding]:
    if report.seconds < BEST_SECONDS[0]:
        yield Finding("short", f"only {report.seconds:.1f} seconds long: 10 to 30 seconds carry more of the voice")
    if report.seconds > BEST_SECONDS[1]:
        yield Finding("long", f"{report.seconds:.0f} seconds long: 10 to 30 are enough, more slows every request")
    if report.level_db < QUIET_DB:
        yield Finding("quiet", "very quiet: come closer to the microphone or raise its level")
    if report.clipped > MAX_CLIPPED:
        yield Finding("clipped", "too loud, the peaks are cut off: lower the level of the microphone and record again")
    yield from _speech_findings(report, spread_db)
    if transcript and transcript.strip():
        yield from _transcript_findings(report.seconds, transcript)


def _speech_findings(report: RecordingReport, spread_db: float) -> Iterator[Finding]:
    if spread_db < STEADY_DB or report.speech_seconds < MIN_VOICED * report.seconds:
        yield Finding("no_speech", "little of it sounds like speech: is it noise, music or the wrong file?")
    elif report.level_db - report.noise_db < NOISY_DB:
        yield Finding("noisy", "noise behind the voice: the model imitates it, so record in a quieter place")


def _transcript_findings(seconds: float, transcript: str) -> Iterator[Finding]:
    pace = seconds / (reading_seconds(transcript) or math.inf)
    if pace and pace < PACE[0]:
        yield Finding("transcript_long", "the transcript is longer than the recording: does it have extra words?")
    elif pace > PACE[1]:
        yield Finding("transcript_short", "the transcript is short for this recording: are words missing?")
