"""Send text while audio streams back, as with a language model that is still writing: python live_text.py [ADDRESS]"""

import os
import sys
from collections.abc import Iterator

import ormsgpack
from websockets.sync.client import connect


def words() -> Iterator[str]:
    yield from ("The tide ", "is coming in. ", "The boats ", "are going out.")


address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
headers = {"Authorization": f"Bearer {os.environ['SHOAL_KEY']}"} if "SHOAL_KEY" in os.environ else {}

with connect(address.replace("http", "ws", 1) + "/v1/tts/live", additional_headers=headers) as socket:
    socket.send(ormsgpack.packb({"event": "start", "request": {"text": "", "format": "pcm"}}))
    for piece in words():
        socket.send(ormsgpack.packb({"event": "text", "text": piece}))
    socket.send(ormsgpack.packb({"event": "stop"}))
    received = 0
    for message in socket:
        event = ormsgpack.unpackb(message)
        if event["event"] == "finish":
            break
        received += len(event["audio"])
print(f"{received:,} bytes of audio, ended by {event['reason']}")
