"""Use Fish Audio's client: python fish_client.py [ADDRESS]"""

import os
import sys
from pathlib import Path

from fishaudio import FishAudio

address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
client = FishAudio(api_key=os.environ.get("SHOAL_KEY", "any"), base_url=address)

audio = client.tts.convert(text="The tide is coming in.")
Path("fish.mp3").write_bytes(audio)
print(f"fish.mp3: {len(audio):,} bytes")
