"""Fused decoder against the plain one, over arbitrarily chunked streams."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.random import fill_random
from shoal.codec import fused
from shoal.codec.config import MAX_POSITIONS, CodecConfig, WindowTransformerConfig
from shoal.codec.dac import Codec
from shoal.codec.fused import FRAME_BUCKETS, FusedDecoder, pack_calls
from shoal.kernels.codec_decoder import residual_unit as unit
from shoal.kernels.codec_decoder.window_attention import MAX_STEPS
from shoal.kernels.cuda_graph import compile_ahead
from tests.poison import poisoned_memory

pytest.importorskip("triton")

# Every kind of layer once or twice, as small as possible.
CONFIG = CodecConfig(
    sample_rate=8000,
    encoder_dim=4,
    encoder_rates=(2, 3),
    latent_dim=16,
    decoder_dim=16,
    decoder_rates=(3, 2),
    encoder_transformer_layers=(0, 0),
    downsample_factor=(2,),
    semantic_codebook_size=32,
    codebook_size=16,
    n_codebooks=2,
    transformer=WindowTransformerConfig(n_layer=1, n_head=1, dim=16, intermediate_size=32, head_dim=16, window_size=4),
)


def build(config: CodecConfig) -> Codec:
    with init_empty_weights():
        codec = Codec(config, encoder=False)
    fill_random(codec, torch.float32, "cpu", torch.Generator().manual_seed(0))
    return codec.eval()


@pytest.fixture(scope="module")
def codec() -> Codec:
    return build(CONFIG)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
@pytest.mark.parametrize("max_steps", [1, 3, 32])
def test_arbitrarily_chunked_streams_equal_the_plain_codec(
    codec: Codec, max_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = FusedDecoder(codec, 3, torch.float32, capture=False)
    with poisoned_memory():
        compile_ahead(decoder._calls[size].workload for size in decoder._calls)  # must not change any state
    monkeypatch.setattr(fused, "MAX_STEPS", max_steps)
    codes = torch.randint(0, 16, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    expected, step = codec.decode(codes), CONFIG.frame_length
    streamed: list[list[torch.Tensor]] = [[], []]
    done = [0, 0]
    for lengths in ([1, 2], [4, 1], [1, 3]):
        piece = torch.zeros(2, 3, max(lengths), dtype=torch.long)
        for row, new in enumerate(lengths):
            piece[row, :, :new] = codes[row, :, done[row] : done[row] + new]
            done[row] += new
        samples = decoder.decode(piece, [2, 0], lengths)
        for row, new in enumerate(lengths):
            streamed[row].append(samples[row, : new * step])
    torch.testing.assert_close(torch.stack([torch.cat(row) for row in streamed]), expected, atol=1e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
def test_a_reset_slot_starts_a_new_stream(codec: Codec) -> None:
    decoder = FusedDecoder(codec, 2, torch.float32, capture=False)
    codes = torch.randint(0, 16, (1, 3, 2))
    first = decoder.decode(codes, [1])
    decoder.reset([1])
    assert torch.equal(decoder.decode(codes, [1]), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, on the CPU")
def test_fused_residual_units_equal_the_plain_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = build(replace(CONFIG, decoder_dim=64))
    monkeypatch.setattr(unit, "MIN_ROWS_PER_CHANNEL", 0)
    launched = Mock(wraps=unit.residual_unit)
    monkeypatch.setattr(unit, "residual_unit", launched)
    decoder = FusedDecoder(codec, 2, torch.float32, capture=False)
    codes = torch.randint(0, 16, (1, 3, 5), generator=torch.Generator().manual_seed(1))
    samples = torch.cat([decoder.decode(piece, [1]) for piece in codes.split([1, 3, 1], dim=2)], dim=1)
    torch.testing.assert_close(samples, codec.decode(codes), atol=1e-5, rtol=0)
    assert launched.call_count == 3 * 3  # three units of 32 channels in each call; those of 16 are too narrow


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=64))
def test_packed_calls_are_full_and_contain_every_frame_once_in_order(lengths: list[int]) -> None:
    calls = list(pack_calls(lengths))
    done = [0] * len(lengths)
    for spans in calls:
        assert len({span.row for span in spans}) == len(spans)
        for span in spans:
            assert span.start == done[span.row]
            assert 0 < span.frames <= MAX_STEPS
            done[span.row] += span.frames
    assert done == lengths
    sizes = [sum(span.frames for span in spans) for spans in calls]
    assert max(sizes) <= FRAME_BUCKETS[-1]
    # Only a row longer than MAX_STEPS may leave a call partly filled.
    assert max(lengths) > MAX_STEPS or all(size == FRAME_BUCKETS[-1] for size in sizes[:-1])


def test_a_stream_beyond_the_rotary_table_is_rejected(codec: Codec) -> None:
    decoder = FusedDecoder(codec, 1, torch.float32, capture=False)
    decoder._seen[0] = MAX_POSITIONS
    with pytest.raises(RuntimeError, match=str(MAX_POSITIONS)):
        decoder.decode(torch.zeros(1, 3, 1, dtype=torch.long), [0])
