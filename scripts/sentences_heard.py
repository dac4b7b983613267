"""Count the sentences that a model leaves out: `python -m scripts.sentences_heard --texts 300`.

Speaks texts of two to five short sentences in all built-in voices, each with its own seed, and prints as JSON: the
duration of every sentence against the time that reading it takes, how often the guard repeated a turn, and which words
a recogniser heard (the judge of docs/quality.md; `make quality` installs it).
"""

import json
import random
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import typer

from scripts.word_times import builtin_voices
from shoal.audio.guard import shortest_seconds
from shoal.engine.engine import Engine
from shoal.engine.load import load
from shoal.errors import GenerationFailed
from shoal.speech import Sampling, SpeechRequest
from training.judges import at_judge_rate, normalise, standard_judges

SENTENCES = (
    *("Stop!", "Good.", "Really?", "Who goes there?", "A friend, I hope.", "You did what?", "Come in.", "Not yet."),
    *("Why on earth would you do that?", "I see.", "Wait here.", "It is late.", "Nobody knows.", "Thank you.", "Yes."),
    *("The door was open.", "She smiled.", "Are you sure?", "Let me think.", "We should go.", "No.", "That is all."),
    *("What a day!", "It rained again.", "He left at noon.", "Try once more.", "Look out!", "I agree.", "How odd."),
    *("Where is my hat?", "The soup is cold.", "They won.", "Please sit down.", "Maybe tomorrow.", "Hurry up!"),
    *("Nothing happened.", "Ask your brother.", "Is it far?", "The train is late.", "Good night.", "Never mind."),
    *("I told you so.", "Keep the change.", "Can you hear me?", "It works.", "Do not touch it.", "Happy birthday!"),
)
FEW_WORDS = 0.75  # share of heard words below which a text is listed


@dataclass
class Count:
    texts: int = 0
    sentences: int = 0
    audio_seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    shortest_ratio: float = float("inf")  # duration of a sentence against the ordinary time to read it
    unheard: list[dict[str, Any]] = field(default_factory=list)  # sentences of which no word was heard
    misheard: list[dict[str, Any]] = field(default_factory=list)  # texts with few words heard


def main(texts: int = 300, model: str = "nano", seed: int = 0) -> None:
    """Speak `texts` texts and print the count."""
    dice, judges, count = random.Random(seed), standard_judges(), Count()
    with load(model) as engine:
        voices = builtin_voices(engine)
        for number in range(texts):
            chosen = dice.sample(SENTENCES, dice.randint(2, 5))
            voice = voices[number % len(voices)]
            count.texts += 1
            try:
                samples, ratios = speak(engine, chosen, voice, number)
            except GenerationFailed:
                count.failed.append(" ".join(chosen))
                continue
            count.sentences += len(chosen)
            count.audio_seconds += len(samples) / engine.sample_rate
            count.shortest_ratio = min(count.shortest_ratio, *ratios)
            note_heard(count, chosen, voice, judges.transcribe(at_judge_rate(samples, engine.sample_rate)))
        retried = engine.service.core.tracker.stats.retried
    print(json.dumps(vars(count) | {"model": model, "voices": len(voices), "retried": retried}, indent=2))


def speak(engine: Engine, chosen: list[str], voice: str | None, seed: int) -> tuple[np.ndarray, list[float]]:
    """Return the samples, and the duration of each turn against the ordinary time to read it."""
    request = SpeechRequest(" ".join(chosen), voice=voice, sampling=Sampling(seed=seed), whole=True, context=())
    chunks = list(engine.service.speak_blocking(request))
    spoken = next(chunk.context for chunk in reversed(chunks) if chunk.context is not None)
    frame_rate = engine.service.core.checkpoint.codec.config.frame_rate
    ratios = [turn.codes.shape[1] / frame_rate / shortest_seconds(turn.text, 1.0) for turn in spoken]
    return np.concatenate([chunk.samples for chunk in chunks]), ratios


def note_heard(count: Count, chosen: list[str], voice: str | None, heard: str) -> None:
    """Find each sentence's words, in order, among those that were heard."""
    sentences = [normalise(sentence).split() for sentence in chosen]
    words = [word for sentence in sentences for word in sentence]
    blocks = SequenceMatcher(None, words, normalise(heard).split(), autojunk=False).get_matching_blocks()
    found = {place for block in blocks for place in range(block.a, block.a + block.size)}
    start = 0
    for text, sentence in zip(chosen, sentences, strict=True):
        if not found & set(range(start, start + len(sentence))):
            count.unheard.append({"sentence": text, "voice": voice, "heard": heard})
        start += len(sentence)
    if len(found) < FEW_WORDS * len(words):
        count.misheard.append({"text": " ".join(chosen), "voice": voice, "heard": heard})


if __name__ == "__main__":
    typer.run(main)
