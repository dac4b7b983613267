"""Build the streaming decoder of a backend that computes with torch."""

from typing import Literal

import torch

from shoal.codec.dac import Codec
from shoal.codec.fused import FusedDecoder
from shoal.codec.plain_graphs import PlainGraphDecoder
from shoal.codec.streaming import StreamingDecoder

TorchBackend = Literal["graph", "plain-graph", "eager"]


def build_decoder(
    backend: TorchBackend, codec: Codec, slots: int
) -> FusedDecoder | PlainGraphDecoder | StreamingDecoder:
    """Return a decoder with state for `slots` streams; `graph` runs in half precision. Raises what compilers raise."""
    capture = codec.device.type == "cuda"
    if backend == "graph":
        return FusedDecoder(codec, slots, torch.float16, capture=capture)
    if backend == "plain-graph":
        return PlainGraphDecoder(codec, slots, capture=capture)
    return StreamingDecoder(codec, slots)
