"""Voice encoder on top of a codec, and the fingerprint that identifies a codec."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from math import ceil
from weakref import WeakKeyDictionary

import torch

from shoal.audio.pcm import Samples
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError
from shoal.text.prompt import Codes
from shoal.voices.fingerprint import fingerprint
from shoal.voices.voice import DEFAULT_LIMITS, CodecRates

# One lock per codec: the engine reserves memory for one codec call at a time besides its own steps.
_LOCKS: WeakKeyDictionary[Codec, threading.Lock] = WeakKeyDictionary()


class CodecEncoder(CodecRates):
    """Encodes concurrently with a running decoder: on its own CUDA stream, without touching the decoder's state.

    Voices with stored codes need no encoder, so the codec may have been loaded without one.
    """

    def __init__(self, codec: Codec, *, max_seconds: float = DEFAULT_LIMITS.audio.max_seconds) -> None:
        super().__init__(codec.config)
        self._codec = codec
        # Reserve the tables now: growing them later would replace tensors that a running decoder reads.
        codec.reserve(ceil(max_seconds * codec.config.frame_rate))
        self._stream = _encoding_stream(codec.device)
        self._lock = _LOCKS.setdefault(codec, threading.Lock())

    @cached_property
    def fingerprint(self) -> str:
        return codec_fingerprint(self._codec)

    def encode(self, samples: Samples) -> Codes:
        """Return the codes [codebooks, frames] of samples [n]. Raises CheckpointError without an encoder."""
        if not self._codec.can_encode:
            raise CheckpointError("the codec was loaded without its encoder: only voices with stored codes can be used")
        with self.exclusive():
            batch = torch.from_numpy(samples)[None].to(self._codec.device)
            codes: Codes = self._codec.encode(batch)[0].to("cpu", torch.int32).numpy()
        return codes

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run the block on a dedicated CUDA stream, so that it does not delay steps; one block at a time per codec."""
        with self._lock, self._on_own_stream():
            yield

    def _on_own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _encoding_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the weights may still be copying
    return stream


def codec_fingerprint(codec: Codec) -> str:
    """Return the fingerprint of a codec, on any device and in any dtype."""
    state = codec.state_dict()
    return fingerprint(codec.config, state, lambda name: state[name].float().cpu().numpy())
