"""A codec as the encoder of voices."""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import ceil

import torch

from shoal.audio.pcm import Samples
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError
from shoal.text.prompt import Codes
from shoal.voices.voice import DEFAULT_LIMITS, feed

# The first few channels of the decoder's Snakes tell codecs apart that were trained on from the same codebooks.
CHANNELS = 16


class CodecEncoder:
    """Encodes beside a running decoder: on a stream of its own, and touching nothing that decoding reads.

    A codec that was built without its encoder will do for voices whose codes are stored already.
    """

    def __init__(self, codec: Codec, *, max_seconds: float = DEFAULT_LIMITS.audio.max_seconds) -> None:
        self._codec = codec
        # Tables that grow later would be swapped under a decoder's feet.
        codec.reserve(ceil(max_seconds * codec.config.frame_rate))
        self._stream = _stream_beside(codec.device)

    @property
    def sample_rate(self) -> int:
        return self._codec.config.sample_rate

    @property
    def frame_rate(self) -> float:
        return self._codec.config.frame_rate

    @cached_property
    def fingerprint(self) -> str:
        return codec_fingerprint(self._codec)

    def encode(self, samples: Samples) -> Codes:
        """[n] -> [codebooks, frames]"""
        if not self._codec.can_encode:
            raise CheckpointError("This codec was loaded without its encoder: only stored codes can be used.")
        with self._aside():
            batch = torch.from_numpy(samples)[None].to(self._codec.device)
            codes: Codes = self._codec.encode(batch)[0].to("cpu", torch.int32).numpy()
        return codes

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the weights may still be on their way
    return stream


def codec_fingerprint(codec: Codec) -> str:
    """16 hexadecimal digits: the same with and without the encoder, on every device.

    Hashed are the configuration and what gives codes their meaning: the codebooks and a little of the decoder. These
    tensors are stored as they are used; the folded ones may differ by a bit where they were folded.
    """
    digest = hashlib.sha256()
    feed(digest, json.dumps(codec.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(codec.state_dict().items()):
        if name.endswith("codebook.weight"):
            feed(digest, name.encode(), _rounded_bytes(tensor))
        elif name.startswith("decoder.") and name.endswith("alpha"):
            feed(digest, name.encode(), _rounded_bytes(tensor.flatten()[:CHANNELS]))
    return digest.hexdigest()[:16]


def _rounded_bytes(tensor: torch.Tensor) -> bytes:
    """In bfloat16, whatever type the codec runs in."""
    return tensor.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes()
