"""Interrupt speech over the live WebSocket and measure the silence: python interrupt.py [ADDRESS [TIMES]]"""

import os
import statistics
import sys
import time

import ormsgpack
from websockets.sync.client import ClientConnection, connect

address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
times = int(sys.argv[2]) if len(sys.argv) > 2 else 1
headers = {"Authorization": f"Bearer {os.environ['SHOAL_KEY']}"} if "SHOAL_KEY" in os.environ else {}
RATE = 24_000  # Hz; pcm has two bytes per sample
TEXT = "The tide is coming in, and the boats that went out in the morning are on their way home. " * 4


def interrupt(socket: ClientConnection) -> tuple[float, float]:
    """Cancel after the third chunk; return the seconds to `finish`, and the seconds of audio that arrived meanwhile."""
    request = {"text": TEXT, "format": "pcm", "sample_rate": RATE, "latency": "low"}
    socket.send(ormsgpack.packb({"event": "start", "request": request}))
    socket.send(ormsgpack.packb({"event": "flush"}))
    for _ in range(3):
        ormsgpack.unpackb(socket.recv())
    began, late = time.perf_counter(), 0
    socket.send(ormsgpack.packb({"event": "cancel"}))
    while (event := ormsgpack.unpackb(socket.recv()))["event"] == "audio":
        late += len(event["audio"])
    assert event["reason"] == "cancel", event
    return time.perf_counter() - began, late / 2 / RATE


with connect(address.replace("http", "ws", 1) + "/v1/tts/live", additional_headers=headers) as socket:
    measured = [interrupt(socket) for _ in range(times)]
waited, heard = ([1000 * each for each in column] for column in zip(*measured, strict=True))
print(f"silent after {statistics.median(waited):.1f} ms (median), {max(waited):.1f} ms (maximum) of {times}")
print(f"audio after the interruption: {statistics.median(heard):.0f} ms (median), {max(heard):.0f} ms (maximum)")
