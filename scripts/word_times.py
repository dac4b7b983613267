"""Judge word times: `python -m scripts.word_times COMMAND`.

    speak OUT --sentences 200        speak sentences in all built-in voices; wav files and manifest.jsonl with the times
    force MANIFEST -o FOUND          read the times of recordings that the model did not make, such as the teacher's
    truth MANIFEST -o TRUTH          times of an independent forced aligner (pip install pocketsphinx; English)
    compare TRUTH FOUND              error of the word starts, in seconds
    cost --model random:s1-mini      throughput of many voices without heads, with heads, and with word times; on a GPU

A manifest has one JSON object per line: `audio` (a wav file, relative to the manifest), `text`, `voice` (a name or
null) and `words`, a list of objects with `text`, `start` and `end` in seconds. `force` is how nano is judged by the
exact durations of its teacher: the recording's codes are read like frames that the model had sampled, so both times
belong to the same audio.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from scripts.many_voices import closed_loop
from shoal.audio.decode import read_audio
from shoal.audio.write import AudioFile
from shoal.checkpoint.format.profile import Alignment
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.load import build_core, choose_dtype, load
from shoal.engine.output.word_times import WordTimes
from shoal.engine.preprocess import build_utterance, check_alignment, plan_request, plan_turns, plan_words
from shoal.engine.utterance import Utterance
from shoal.kernels.attention.grouped_attention import grouped_attention
from shoal.kernels.word_times.text_path_numpy import path_origins
from shoal.speech import Sampling, SpeechRequest
from shoal.tools.bench.engine import TEXT
from shoal.tools.bench.texts import sentence
from shoal.voices.store import VoiceStore, voice_directory
from shoal.voices.voice import DEFAULT_LIMITS

app = typer.Typer(add_completion=False)
Entry = dict[str, Any]
ALIGNER_RATE, ALIGNER_PADDING = 16_000, 0.2
COST_KV_BYTES = 16 << 30  # two engines share the GPU
_ids = itertools.count()


@app.command()
def speak(out: Path, model: str = "nano", sentences: int = 200, first: int = 1000) -> None:
    """Speak sentences and write their audio and word times; `first` is the number of the first of them."""
    out.mkdir(parents=True)
    with load(model) as engine, (out / "manifest.jsonl").open("w") as manifest:
        voices = builtin_voices(engine)
        for number in range(sentences):
            text, voice = sentence((first + number) * 997), voices[number % len(voices)]
            speech = engine.speak(text, voice=voice, sampling=Sampling(seed=number), timestamps=True)
            with AudioFile(out / f"{number:04}.wav", speech.sample_rate) as file:
                file.write(speech.samples)
            words = [asdict(word) for word in speech.words]
            entry = {"audio": f"{number:04}.wav", "text": text, "voice": voice, "words": words}
            manifest.write(json.dumps(entry) + "\n")


@app.command()
def force(
    manifest: Path,
    output: Annotated[Path, typer.Option("--output", "-o")],
    model: str = "nano",
    lead: float | None = None,
) -> None:
    """Read the word times of recordings, in the voice that each entry names."""
    with load(model, device="cpu") as engine:
        found = [{**entry, "words": forced_words(engine, entry, manifest.parent, lead)} for entry in read(manifest)]
    output.write_text("".join(json.dumps(entry) + "\n" for entry in found))


@app.command()
def truth(manifest: Path, output: Annotated[Path, typer.Option("--output", "-o")]) -> None:
    """Align every recording with its words by pocketsphinx, whose acoustic model is in its wheel."""
    from pocketsphinx import Decoder  # type: ignore[import-not-found]

    decoder = Decoder(samprate=ALIGNER_RATE, bestpath=False)
    found = [{**entry, "words": aligned_words(decoder, entry, manifest.parent)} for entry in read(manifest)]
    output.write_text("".join(json.dumps(entry) + "\n" for entry in found))


@app.command()
def compare(truth: Path, found: Path) -> None:
    """Print the error of word starts and how many last words were found, as JSON."""
    errors, last, sentences = list[float](), 0, 0
    for expected, ours in zip(read(truth), read(found), strict=True):
        assert expected["text"] == ours["text"], "the manifests list different sentences"
        pairs = list(zip(expected["words"], ours["words"], strict=False))
        errors += [our["start"] - their["start"] for their, our in pairs]
        complete = len(expected["words"]) == len(ours["words"])
        last += complete and abs(ours["words"][-1]["start"] - expected["words"][-1]["start"]) < 0.5
        sentences += 1
    distance = np.abs(errors)
    typer.echo(
        json.dumps(
            {
                "sentences": sentences,
                "words": len(errors),
                "mean absolute error": round(float(distance.mean()), 4),
                "mean error": round(float(np.mean(errors)), 4),
                "within 60 ms": round(float((distance <= 0.06).mean()), 4),
                "within 150 ms": round(float((distance <= 0.15).mean()), 4),
                "last word found": round(last / sentences, 4),
            }
        )
    )


@app.command()
def cost(
    model: str = "random:s1-mini", device: str = "cuda", voices: int = 64, frames: int = 150, rounds: int = 4
) -> None:
    """Print the throughput in audio-s/s of engines that take turns, as JSON. Three heads of two layers are read."""
    dtype = choose_dtype(None, device)
    checkpoint = resolve_model(model, dtype=dtype, device=device, encoder=False)
    last = checkpoint.model.config.slow.n_layer - 1
    alignment = Alignment(((last // 2, 0), (last, 0), (last, 1)), quality=1.0)
    aligned = replace(checkpoint, profile=replace(checkpoint.profile, alignment=alignment))
    config = EngineConfig(slots=voices, guard=False, kv_bytes=COST_KV_BYTES)
    plain, reading = (build_core(each, config) for each in (checkpoint, aligned))
    runs = {"no heads": (plain, False), "unused": (reading, False), "all requests": (reading, True)}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number, (name, (core, timestamps)) in itertools.product(range(-1, rounds), runs.items()):
        request = partial(timed_request, timestamps=timestamps)
        figures, _ = closed_loop(core, voices, frames, 2, request)
        if number >= 0:  # the first round warms up
            found[name].append(round(figures["audio_per_second"], 1))
    typer.echo(json.dumps(found))


def timed_request(core: EngineCore, number: int, frames: int, *, timestamps: bool) -> Utterance:
    """Return the request of that number, with word times or without."""
    sampling = Sampling(seed=number, max_frames=frames)
    request = SpeechRequest(f"{number} {number % 7}. {TEXT}", timestamps=timestamps, sampling=sampling)
    plan, limit = plan_request(request, core.checkpoint), core.tracker.context_limit
    return build_utterance(next(_ids), request, plan, {None: None}, core.checkpoint, context_limit=limit)


def read(manifest: Path) -> Iterator[Entry]:
    return (json.loads(line) for line in manifest.read_text().splitlines() if line.strip())


def builtin_voices(engine: Engine) -> list[str | None]:
    folders = engine.service.core.checkpoint.builtin_voices
    store = VoiceStore(voice_directory(), folders, sample_rate=engine.sample_rate)
    return [*filter(store.is_builtin, store.names())] or [None]


def aligned_words(decoder: Any, entry: Entry, folder: Path) -> list[Entry]:
    samples = read_audio(folder / entry["audio"], ALIGNER_RATE, DEFAULT_LIMITS.audio).samples
    padded = np.pad(samples, round(ALIGNER_PADDING * ALIGNER_RATE))
    words = [re.sub(r"[^a-z']", "", word["text"].lower()) for word in entry["words"]]
    decoder.set_align_text(" ".join(words))
    decoder.start_utt()
    decoder.process_raw((np.clip(padded, -1, 1) * 32767).astype(np.int16).tobytes(), full_utt=True)
    decoder.end_utt()
    heard = [each for each in decoder.seg() or () if not each.word.startswith("<")]
    times = ((each.start_frame / 100 - ALIGNER_PADDING, (each.end_frame + 1) / 100 - ALIGNER_PADDING) for each in heard)
    return [{"text": word, "start": start, "end": end} for word, (start, end) in zip(words, times, strict=False)]


class RecordingCache:
    """KV cache of one pass over one sequence; keeps the queries and keys of some layers."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self.layers:
            self.kept[layer] = (q, k)
        mask = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        parts = (each.transpose(0, 1)[None] for each in (q, k, v))
        return grouped_attention(*parts, mask)[0].transpose(0, 1)


@torch.inference_mode()
def forced_words(engine: Engine, entry: Entry, folder: Path, lead: float | None) -> list[Entry]:
    """Return the words of a recording of one turn, read from the attention of the frames it encodes to."""
    service = engine.service
    checkpoint = service.core.checkpoint
    alignment = check_alignment(checkpoint)
    request = SpeechRequest(entry["text"], voice=entry["voice"], chunk_bytes=100_000, timestamps=True)
    turns = plan_turns(
        plan_request(request, checkpoint), {None: service.resolve_blocking(request)}, checkpoint, words=True
    )
    assert len(turns) == 1, "one sentence per entry"
    codes = service.encode((folder / entry["audio"]).read_bytes())
    frames = np.concatenate((codes[:1] + checkpoint.tokenizer.semantic_begin, codes)).T
    prompt, tokens = turns[0].prompt, turns[0].text_tokens
    assert tokens is not None
    grid = torch.from_numpy(np.concatenate((prompt, frames)).astype(np.int64))
    cache = RecordingCache(frozenset(layer for layer, _ in alignment.heads))
    checkpoint.model.slow(grid, torch.arange(len(grid)), cache)
    begin = len(prompt) - tokens.after - tokens.count
    weights = torch.stack(
        [head_weights(*cache.kept[layer], head, begin, tokens.count) for layer, head in alignment.heads]
    )
    plan = plan_words(request, turns, checkpoint, None)
    lead_frames = alignment.lead_frames if lead is None else lead
    times = WordTimes(plan, 1 / checkpoint.codec.config.frame_rate, lead_frames)
    sampling = weights[:, len(prompt) - 1 : len(grid) - 1]  # the token before a frame samples it
    for origins in path_origins(sampling.transpose(0, 1).numpy()):
        times.feed(0, origins, tokens.count)
    times.collect(0, tokens.words, 0.0, 1.0, ended=True)
    return [asdict(word) for word in times.take()]


def head_weights(q: torch.Tensor, k: torch.Tensor, head: int, begin: int, count: int) -> torch.Tensor:
    """Return the weights [tokens, count] of one head over the text."""
    key = k[begin : begin + count, head // (q.shape[1] // k.shape[1])]
    return (q[:, head] @ key.T * q.shape[2] ** -0.5).softmax(-1)


if __name__ == "__main__":
    app()
