"""Use OpenAI's client, for complete and for streamed audio: python openai_client.py [ADDRESS]"""

import os
import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
client = OpenAI(base_url=f"{address}/v1", api_key=os.environ.get("SHOAL_KEY", "any"))

client.audio.speech.create(model="tts-1", voice="alloy", input="The tide is coming in.").write_to_file("tide.mp3")
print("tide.mp3 is written")

with client.audio.speech.with_streaming_response.create(
    model="tts-1", voice="alloy", input="The boats are going out.", response_format="pcm"
) as answer:
    sizes = [len(piece) for piece in answer.iter_bytes()]
print(f"{sum(sizes) / 2 / 24_000:.2f} s of audio came in {len(sizes)} pieces")
