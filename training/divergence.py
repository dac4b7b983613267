"""KL divergence of nano with quantised weights or KV cache from the trained model.

    python -m training.divergence --reference build/nano-lm/best --markdown build/quality/divergence.md

The trained model, in fp32, says held-out sentences in every voice; each mode is then fed the same columns, and its
distributions are compared with the trained model's, frame by frame. Runs on a CPU, in minutes.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.load import Checkpoint, load_checkpoint, load_model
from shoal.engine.kv_cache import AttentionMetadata, PagedKV, PrefillSegment, resolve_kv_dtype
from shoal.engine.preprocess import build_turns
from shoal.model.dual_ar import DualAR
from shoal.model.generate import generate
from shoal.model.layers import KVCache
from shoal.model.slow import Head
from shoal.quantize.apply import convert_int8_for_cpu, quantize_model
from shoal.quantize.divergence import Divergence, divergence, mean
from shoal.quantize.modes import WeightModes, has_int8_matmul
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore

WEIGHTS = ("int8", "fp8", "slow=int4", "fast=int4", "int4")
KV = ("int8", "fp8")
BLOCK = 16


def utterances(checkpoint: Checkpoint, sentences: Sequence[str], seed: int = 0) -> list[Tensor]:
    """Return the columns [T, 1 + codebooks] of each spoken sentence, prompt included; voices take turns."""
    model, encoder = checkpoint.model, CodecEncoder(checkpoint.codec)
    store = VoiceStore(checkpoint.builtin_voices[0], sample_rate=checkpoint.codec.config.sample_rate)
    voices, head = [store.get(name, encoder) for name in store.names()], Head(model.slow)
    said = []
    for number, (sentence, voice) in enumerate(zip(sentences, cycle(voices), strict=False)):
        prompt = torch.from_numpy(build_turns(sentence, voice, checkpoint)[0].prompt.copy()).long()
        sampling = replace(checkpoint.profile.sampling, seed=seed + number)
        codes = generate(model, head, prompt.T, sampling).codes.T
        frames = torch.cat((codes[:, :1] + model.config.semantic_begin_id, codes), dim=1)
        said.append(torch.cat((prompt, frames)))
    return said


def compare(reference: DualAR, model: DualAR, speech: Sequence[Tensor], kv: torch.dtype | None = None) -> Divergence:
    return mean([divergence(reference, model, columns, cache=_cache(model, columns, kv)) for columns in speech])


def table(reference: DualAR, speech: Sequence[Tensor]) -> list[tuple[str, Divergence]]:
    """Return the name and the divergence of each mode of weights and KV cache."""
    rows = []
    for text in WEIGHTS:
        model = copy.deepcopy(reference)
        quantize_model(model, WeightModes.parse(text))
        rows.append((f"weights {text}", compare(reference, model, speech)))
    integers = copy.deepcopy(reference)
    integers.slow.prune_output()
    quantize_model(integers, WeightModes.parse("int8"))
    convert_int8_for_cpu(integers, min_weights=0)
    how = "multiplied in integers" if has_int8_matmul() else "weight-only"
    rows.append((f"weights int8, {how}", compare(reference, integers, speech)))
    for name in KV:
        kind = resolve_kv_dtype(name, reference.dtype, reference.device)
        rows.append((f"keys and values {name}", compare(reference, reference, speech, kind)))
    return rows


def markdown(rows: Sequence[tuple[str, Divergence]]) -> str:
    head = "| mode | KL, main token | KL, other codes | same likeliest main token |\n| --- | --- | --- | --- |\n"
    return head + "".join(
        f"| {name} | {row.semantic:.5f} | {row.codes:.5f} | {row.agreement:.1%} |\n" for name, row in rows
    )


def _cache(model: DualAR, columns: Tensor, kind: torch.dtype | None) -> KVCache | None:
    """Return a KV cache of that dtype for these tokens; None for unquantised attention."""
    if kind is None:
        return None
    length = len(columns)
    blocks = -(-length // BLOCK)
    kv = PagedKV(model.config.slow, blocks, BLOCK, kind, model.device)
    no_decode = torch.zeros(0, blocks, dtype=torch.long)
    kv.begin_pass(
        AttentionMetadata(
            torch.arange(length), [PrefillSegment(0, length, length, torch.arange(blocks))], no_decode, no_decode[:, 0]
        )
    )
    return kv


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.divergence", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("shoal/models/nano"), help="directory with codec and voices")
    parser.add_argument("--reference", type=Path, help="weights before quantization (default: those of --model)")
    parser.add_argument("--text", type=Path, default=Path("training/text_corpus/sentences/heldout.txt"))
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    options = parser.parse_args(arguments)
    checkpoint = load_checkpoint(options.model, dtype=torch.float32)
    if options.reference is not None:
        trained = load_model(options.reference, checkpoint.tokenizer, dtype=torch.float32)
        checkpoint = replace(checkpoint, model=trained)
    quantize_model(checkpoint.model, WeightModes(), dtype=torch.float32)
    speech = utterances(checkpoint, list(islice(options.text.read_text().splitlines(), options.sentences)))
    rows = table(checkpoint.model, speech)
    print(f"{rows[0][1].frames} frames in {len(speech)} utterances")
    print(markdown(rows))
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
