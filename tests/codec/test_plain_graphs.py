"""The plain codec at fixed sizes gives the samples of the plain codec, over arbitrarily chunked streams."""

import pytest
import torch

from shoal.codec.dac import Codec
from shoal.codec.plain_graphs import PlainGraphDecoder
from tests.codec.test_fused import CONFIG, build
from tests.host_reads import NoHostReads


@pytest.fixture(scope="module")
def codec() -> Codec:
    return build(CONFIG)


def test_arbitrarily_chunked_streams_equal_the_whole(codec: Codec) -> None:
    decoder = PlainGraphDecoder(codec, 5, capture=False)
    codes = torch.randint(0, 16, (3, 3, 50), generator=torch.Generator().manual_seed(1))
    expected, step = codec.decode(codes), CONFIG.frame_length
    streamed: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for lengths in ([1, 2, 3], [40, 1, 9], [9, 47, 38]):
        piece = torch.zeros(3, 3, max(lengths), dtype=torch.long)
        for row, new in enumerate(lengths):
            piece[row, :, :new] = codes[row, :, done[row] : done[row] + new]
            done[row] += new
        samples = decoder.decode(piece, [4, 0, 2], lengths)
        for row, new in enumerate(lengths):
            streamed[row].append(samples[row, : new * step])
    torch.testing.assert_close(torch.stack([torch.cat(row) for row in streamed]), expected, atol=1e-5, rtol=0)


def test_a_reset_slot_starts_a_new_stream(codec: Codec) -> None:
    decoder = PlainGraphDecoder(codec, 2, capture=False)
    codes = torch.randint(0, 16, (1, 3, 2))
    first = decoder.decode(codes, [1])
    decoder.reset([1])
    assert torch.equal(decoder.decode(codes, [1]), first)


def test_nothing_is_read_by_the_host(codec: Codec) -> None:
    decoder = PlainGraphDecoder(codec, 2, capture=False)
    with torch.inference_mode():
        for size in decoder._calls:
            workload = decoder._calls[size].workload
            workload.run()
            with NoHostReads():
                workload.run()
        with NoHostReads():
            decoder._reset.workload.run()


def test_a_size_that_failed_is_served_by_the_others(codec: Codec) -> None:
    decoder = PlainGraphDecoder(codec, 2, capture=False)
    codes = torch.randint(0, 16, (2, 3, 4), generator=torch.Generator().manual_seed(2))
    for size in [size for size in decoder._calls if size != (32, 1)]:
        del decoder._calls.available[size]
    torch.testing.assert_close(decoder.decode(codes, [0, 1]), codec.decode(codes), atol=1e-5, rtol=0)
