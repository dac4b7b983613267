"""Speak several texts at the same time: python many_at_once.py [MODEL]"""

import asyncio
import sys

import shoal

TEXTS = ["The tide is coming in.", "The boats are going out.", "The gulls do not care.", "It is six in the morning."]


async def main(model: str) -> None:
    with shoal.load(model) as engine:
        # Every step of the engine computes a frame of each text. With a seed, a text gives the same audio every time.
        speeches = await asyncio.gather(
            *(engine.aspeak(text, sampling=shoal.Sampling(seed=seed)) for seed, text in enumerate(TEXTS))
        )
    for text, speech in zip(TEXTS, speeches, strict=True):
        print(f"{speech.seconds:5.2f} s  {text}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
