"""Say a text into a file: python speak.py [TEXT [FILE [MODEL]]]"""

import sys
from pathlib import Path

import shoal
from shoal.audio.write import AudioFile

text, path, model = [*sys.argv[1:], *("The tide is coming in.", "tide.wav", "nano")[len(sys.argv) - 1 :]]

with shoal.load(model) as engine, AudioFile(Path(path), engine.sample_rate) as file:
    seconds = 0.0
    for chunk in engine.speak(text, stream=True):
        file.write(chunk.samples)
        seconds += chunk.seconds
print(f"{path}: {seconds:.2f} s")
