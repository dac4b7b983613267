"""Say a text into a file: python speak.py "Hello there." hello.wav [MODEL]"""

import sys
from pathlib import Path

import shoal
from shoal.audio.write import AudioFile

text, path = sys.argv[1:3]
model = sys.argv[3] if len(sys.argv) > 3 else "nano"

with shoal.load(model) as engine, AudioFile(Path(path), engine.sample_rate) as file:
    seconds = 0.0
    for chunk in engine.speak(text, stream=True):
        file.write(chunk.samples)
        seconds += chunk.seconds
print(f"{path}: {seconds:.2f} s")
