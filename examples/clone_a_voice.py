"""Store a recording as a voice, speak with it, remove it: python clone_a_voice.py ADDRESS RECORDING TRANSCRIPT"""

import os
import sys
from pathlib import Path

import httpx

if len(sys.argv) != 4:
    sys.exit(__doc__)
address, recording, transcript = sys.argv[1:]
headers = {"Authorization": f"Bearer {os.environ['SHOAL_KEY']}"} if "SHOAL_KEY" in os.environ else {}
voice = "example-voice"

with httpx.Client(base_url=address, headers=headers | {"Accept": "application/json"}, timeout=60) as http:
    form = {"id": (None, voice), "text": (None, transcript), "audio": ("voice", Path(recording).read_bytes())}
    print(http.post("/v1/references/add", files=form).raise_for_status().json()["message"])
    spoken = http.post("/v1/tts", json={"text": "Hello there.", "reference_id": voice, "format": "mp3"})
    Path("cloned.mp3").write_bytes(spoken.raise_for_status().content)
    print(http.request("DELETE", "/v1/references/delete", json={"reference_id": voice}).raise_for_status().json())
