"""Receive audio while it is generated, over plain HTTP: python stream_http.py [ADDRESS]"""

import os
import sys
import time

import httpx

address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
headers = {"Authorization": f"Bearer {os.environ['SHOAL_KEY']}"} if "SHOAL_KEY" in os.environ else {}
body = {"text": "The tide is coming in, and the boats are going out.", "format": "pcm", "streaming": True}

began = time.perf_counter()
with httpx.stream("POST", f"{address}/v1/tts", json=body, headers=headers, timeout=60) as answer:
    answer.raise_for_status()
    rate, received, first = int(answer.headers["X-Sample-Rate"]), 0, 0.0
    for piece in answer.iter_bytes():
        first = first or time.perf_counter() - began
        received += len(piece)  # 16-bit samples: give them to a player here
print(f"{received / 2 / rate:.2f} s of audio; the first came after {first:.2f} s, seed {answer.headers['X-Seed']}")
