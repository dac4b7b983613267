import re
import subprocess
import sys
from pathlib import Path

# The emulation replaces parts of the engine, so it has a process of its own.
FLAGS = ["--device", "s2-pro", "--voices", "2", "--clients", "2", "--arrivals", "2"]


def test_first_audio_and_throughput_of_an_emulated_device_are_printed() -> None:
    command = [sys.executable, "-m", "scripts.emulated_bursts", *FLAGS]
    root = Path(__file__).parents[3]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout.splitlines()
    burst, clients = lines
    found = re.fullmatch(r"2 at once: first audio P50 (\d+) ms, P95 (\d+) ms, (\d+) audio-s/s, \d+ stalled", burst)
    assert found is not None
    # Two prompts of 146 tokens, 48 of them common: 5.4 ms. The first chunk has one frame: at least 5.2 ms.
    assert int(found[1]) >= 10
    assert re.match(r"2 clients: \d+ audio-s/s; \d+ requests/s at random: first audio P50 \d+ ms", clients)
