"""Measure the CPU time that a server spends on encoding speech, by output format.

    python -m scripts.encoding_cost docs/samples/*.mp3 --seconds 120

Reads recordings of speech, resamples them to the rate of S1-mini and S2-Pro, and encodes them in chunks as a response
is. Prints a table: CPU milliseconds per second of audio, and the cores that some rates of audio need.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from shoal.api.output import OutputEncoder, OutputOptions
from shoal.audio.decode import read_audio
from shoal.speech import Samples

RATE = 44_100
CHUNK = 8 * 2048  # samples: eight frames
RATES = (100, 613, 834, 1197)  # seconds of audio per second: S1-mini over HTTP, with 64 and with 256 voices in process
# OpenAI's pcm has 24 kHz; the others have the rate of the model, or the nearest that the format supports.
OUTPUTS = {
    "pcm": OutputOptions("pcm"),
    "pcm, 24 kHz": OutputOptions("pcm", 24_000),
    "wav": OutputOptions("wav"),
    "ulaw, 8 kHz": OutputOptions("ulaw", 8_000),
    "flac": OutputOptions("flac"),
    "opus": OutputOptions("opus"),
    "webm": OutputOptions("webm"),
    "aac": OutputOptions("aac"),
    "mp3": OutputOptions("mp3"),
    "mp3, loudness": OutputOptions("mp3", normalize_loudness=True),
    "mp3, speed 1.2": OutputOptions("mp3", speed=1.2),
}


def read_speech(paths: list[Path], seconds: float) -> Samples:
    """Return the recordings end to end, repeated until they last `seconds`."""
    speech = np.concatenate([read_audio(path, RATE).samples for path in paths])
    return np.resize(speech, round(seconds * RATE)).astype(np.float32)


def cpu_seconds(output: OutputOptions, speech: Samples) -> float:
    """Return the CPU time of one streamed response, that of the codec's own threads included."""
    began = time.process_time()
    encoder = OutputEncoder(output, RATE, stream=True)
    for start in range(0, len(speech), CHUNK):
        encoder.feed(speech[start : start + CHUNK])
    encoder.finish()
    return time.process_time() - began


def measure(speech: Samples, repeats: int) -> dict[str, float]:
    """Return CPU milliseconds per second of audio by format: the lowest of `repeats`."""
    seconds = len(speech) / RATE
    return {
        name: min(cpu_seconds(output, speech) for _ in range(repeats)) / seconds * 1e3
        for name, output in OUTPUTS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, help="audio files with speech")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of audio to encode in each format")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    found = measure(read_speech(arguments.recordings, arguments.seconds), arguments.repeats)
    print("| Format | CPU per second of audio |" + "".join(f" {rate:,} audio-s/s |" for rate in RATES))
    print("|---|---|" + "---|" * len(RATES))
    for name, cost in found.items():
        print(f"| {name} | {cost:.2f} ms |" + "".join(f" {cost * rate / 1e3:.1f} cores |" for rate in RATES))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
