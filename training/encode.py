"""Turn shards of speech into shards of codes with the frozen codec, as the shards appear.

    python -m training.encode --shards build/speech build/codes --codec build/nano-codec

The codec is used as it will be shipped: weights rounded to fp16, computed in fp32. Codes are found by nearest
neighbours, so a lower precision here would teach the language model other codes than the shipped codec makes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.checkpoint.random import synthetic_tokenizer
from shoal.codec.dac import Codec
from shoal.errors import TextError
from shoal.model.config import BlockConfig, DualARConfig
from shoal.model.family import NANO
from shoal.text.clean import clean_text
from shoal.text.normalize import normalize
from shoal.text.prompt import GridBuilder, InterleavePrompts
from shoal.voices.encoder import codec_fingerprint
from training.codec import encode_latent, keep_codebooks, load_codec
from training.codec.quantiser import quantise
from training.data import Line, Samples, read_lines, write_whole
from training.packing import SEMANTIC_BEGIN, STOP_ID, EncodedShard, utterance_columns

logger = logging.getLogger(__name__)

ABOUT = "codes.json"
BATCH_FRAMES = {"cuda": 8192, "cpu": 1024}
SHAPES_FRAMES = (48, 72, 104, 160, 288)  # batch shapes of a compiled encoder
OPEN_ENDED_SHARE = 0.1

Encoding = Callable[[Codec, Tensor, torch.dtype], Tensor]
Encoder = Callable[[Sequence[Samples]], list[NDArray[np.int32]]]


@dataclass(frozen=True)
class About:
    """Codec that a folder of codes was made with; a model trained on it works with this codec only."""

    codebooks: int
    codebook_size: int
    frame_length: int
    sample_rate: int
    fingerprint: str

    @classmethod
    def of(cls, codec: Codec) -> About:
        config = codec.config
        size = config.semantic_codebook_size
        return cls(config.num_codebooks, size, config.frame_length, config.sample_rate, codec_fingerprint(codec))

    @classmethod
    def read(cls, folder: Path) -> About:
        return cls(**json.loads((folder / ABOUT).read_text()))

    def write(self, folder: Path) -> None:
        """Raises ValueError if the folder holds the codes of another codec."""
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / ABOUT).exists() and About.read(folder) != self:
            raise ValueError(f"{folder} holds codes of another codec; choose another folder")
        write_whole(folder / ABOUT, json.dumps(asdict(self), indent=1).encode())


def frozen_codec(folder: Path, codebooks: int | None = None) -> Codec:
    """Return the codec as it is shipped: the first `codebooks` codebooks, weights rounded to fp16, stored in fp32."""
    codec = load_codec(folder)
    if codebooks is not None and codebooks != codec.config.num_codebooks:
        codec = keep_codebooks(codec, codebooks)
    for weight in codec.parameters():
        weight.data = weight.data.half().float()
    return codec.eval().requires_grad_(False)


def prompts_for(about: About) -> InterleavePrompts:
    """Return the prompt builder of nano: the S1 family's, over bytes."""
    return InterleavePrompts(GridBuilder(synthetic_tokenizer(_any_config(about)), about.codebooks))


def _any_config(about: About) -> DualARConfig:
    """Return a configuration for the synthetic tokenizer, which uses only its token counts."""
    block = BlockConfig(1, 2, 1, 1, 2, 2, 1e4, 1e-6, attention_qk_norm=False, max_seq_len=2)
    end, size = SEMANTIC_BEGIN + about.codebook_size, about.codebook_size
    return DualARConfig(
        NANO, block, block, end, size, about.codebooks, SEMANTIC_BEGIN, end - 1, STOP_ID, False, True, True
    )


def spoken_text(line: Line) -> str | None:
    """Return the text as the engine passes it to the model; a tenth of the texts lose their final mark."""
    try:
        text = normalize(clean_text(line.text))
    except TextError:
        return None
    if random.Random(f"{line.voice} {line.text}").random() < OPEN_ENDED_SHARE:
        text = text.rstrip(".,!?;:") or text
    return text


def encode_recordings(codec: Codec, recordings: Sequence[Samples], most: int | None = None) -> list[NDArray[np.int32]]:
    """Return codes [codebooks, frames] of each, in one batch; the codec is causal, so padding changes nothing."""
    frame = codec.config.frame_length
    found: dict[int, NDArray[np.int32]] = {}
    most = most or BATCH_FRAMES[codec.device.type]
    for batch in batches([len(samples) // frame for samples in recordings], most):
        chosen = [recordings[index] for index in batch]
        frames = -(-max(map(len, chosen)) // frame)
        codes = encode_padded(codec, padded(chosen, len(chosen), frames * frame)).to("cpu", torch.int32).numpy()
        found |= {index: row[:, : len(recordings[index]) // frame] for index, row in zip(batch, codes, strict=True)}
    return [found[index] for index in range(len(recordings))]


def padded(recordings: Sequence[Samples], rows: int, length: int) -> Tensor:
    """Return recordings as int16 [rows, length], padded with zeros."""
    filled = np.zeros((rows, length), np.int16)
    for row, samples in zip(filled, recordings, strict=False):
        row[: len(samples)] = samples
    return torch.from_numpy(filled)


@torch.inference_mode()
def encode_padded(codec: Codec, recordings: Tensor, encode: Encoding = encode_latent) -> Tensor:
    """Encode int16 samples [n, frames * frame_length] -> codes [n, codebooks, frames]."""
    # Converted on the device: on the host it took longer than encoding.
    samples = recordings.to(codec.device).float() / 32768
    if codec.device.type != "cuda" and encode is encode_latent:
        return codec.encode(samples)
    # Matrix products: cuDNN's convolutions in fp32 are many times slower at these shapes.
    frames = samples.shape[1] // codec.config.frame_length
    codec.reserve(frames)
    active = torch.full((len(samples),), codec.config.num_codebooks, device=samples.device)
    codes = quantise(codec, encode(codec, samples, torch.float32), active).codes
    return codes.view(-1, len(samples), frames).transpose(0, 1)


class FixedShapeEncoder:
    """Encodes recordings in batches of few fixed shapes, so that a compiled encoder is compiled once for each.

    Fusing the copies of its convolutions is what makes it fast: uncompiled, an hour of speech takes three seconds on an
    H200. Recordings longer than the largest shape are encoded by `encode_recordings`.
    """

    def __init__(self, codec: Codec, encode: Encoding, shapes: Sequence[int] = SHAPES_FRAMES) -> None:
        self.codec, self.encode, self.shapes = codec, encode, sorted(shapes)

    def __call__(self, recordings: Sequence[Samples]) -> list[NDArray[np.int32]]:
        frame = self.codec.config.frame_length
        found: dict[int, NDArray[np.int32]] = {}
        waiting: dict[int, list[int]] = {}
        for index, samples in enumerate(recordings):
            shape = next((shape for shape in self.shapes if len(samples) <= shape * frame), 0)
            waiting.setdefault(shape, []).append(index)
        long = waiting.pop(0, [])
        found |= zip(long, encode_recordings(self.codec, [recordings[index] for index in long]), strict=True)
        for shape, indices in waiting.items():
            rows = max(1, BATCH_FRAMES[self.codec.device.type] // shape)
            for start in range(0, len(indices), rows):
                batch = indices[start : start + rows]
                sound = padded([recordings[index] for index in batch], rows, shape * frame)
                codes = encode_padded(self.codec, sound, self.encode).to("cpu", torch.int32).numpy()
                found |= {i: row[:, : len(recordings[i]) // frame] for i, row in zip(batch, codes, strict=False)}
        return [found[index] for index in range(len(recordings))]


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Return indices of rows of similar length, at most `most` frames or positions in total after padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def encode_shard(encode: Encoder, prompts: InterleavePrompts, lines: Path) -> EncodedShard:
    pcm = np.fromfile(lines.with_suffix(".pcm"), dtype="<i2")
    said = [(line, text) for line in read_lines(lines) if (text := spoken_text(line)) is not None]
    if any(line.offset + line.samples > len(pcm) for line, _ in said):
        raise ValueError(f"{lines.with_suffix('.pcm')}: its samples were dropped after an earlier run; speak it again")
    recordings = [pcm[line.offset : line.offset + line.samples] for line, _ in said]
    codes = encode(recordings)
    columns = [utterance_columns(prompts, text, each) for (_, text), each in zip(said, codes, strict=True)]
    voices, texts = [line.voice for line, _ in said], [text for _, text in said]
    offsets = [line.offset for line, _ in said]
    return EncodedShard.of(columns, voices, texts, prompts.grid.num_codebooks, offsets)


def encode_new(encode: Encoder, prompts: InterleavePrompts, speech: Path, out: Path, *, discard: bool) -> int:
    """Encode the complete shards of `speech` that `out` lacks, and return how many there were."""
    missing = [
        lines for lines in sorted(speech.glob("shard-*.jsonl")) if not (out / lines.name).with_suffix(".npz").exists()
    ]
    for lines in missing:
        encode_shard(encode, prompts, lines).write((out / lines.name).with_suffix(".npz"))
        if discard:
            # Truncated, not removed: the producer still reads its size and maps it.
            os.truncate(lines.with_suffix(".pcm"), 2)
    return len(missing)


def follow(work: Callable[[], int], seconds: float = 0.5) -> None:
    """Repeat the work, sleeping when there is none, until the parent process has exited."""
    parent = os.getppid()
    while os.getppid() == parent:
        if not work():
            time.sleep(seconds)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.encode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shards",
        type=Path,
        nargs=2,
        action="append",
        required=True,
        metavar=("SPEECH", "CODES"),
        help="folder to read and folder to write; may be repeated; earlier pairs are encoded first",
    )
    parser.add_argument("--codec", type=Path, required=True, help="folder of the finished codec")
    parser.add_argument("--codebooks", type=int, help="number of codebooks to use, from the first on (default: all)")
    parser.add_argument("--follow", action="store_true", help="wait for more shards as long as the parent lives")
    parser.add_argument("--plain", action="store_true", help="do not compile the encoder")
    parser.add_argument("--discard", action="store_true", help="drop the samples of a shard when its codes are written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parse_arguments(arguments)
    # TF32 is on by default for convolutions; its ten bits of mantissa would change codes.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = frozen_codec(options.codec, options.codebooks).to(device)
    about = About.of(codec)
    for _, out in options.shards:
        about.write(out)
    prompts = prompts_for(about)
    encode: Encoder = partial(encode_recordings, codec)
    if device.type == "cuda" and not options.plain:
        encode = FixedShapeEncoder(codec, torch.compile(encode_latent, dynamic=False, fullgraph=True))

    def work() -> int:
        began = time.monotonic()
        done = sum(encode_new(encode, prompts, *pair, discard=options.discard) for pair in options.shards)
        if done:
            logger.info("%d shards encoded in %.1f s", done, time.monotonic() - began)
        return done

    follow(work) if options.follow else work()


if __name__ == "__main__":
    main()
