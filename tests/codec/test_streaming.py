import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.audio.pcm import to_int16
from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.resolve import resolve_model
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.codec.streaming import NoPast, SlotPast, StreamingDecoder

EXACT = 1e-5
FRAME = 2048
FRAMES = 30  # more than the 24 frames of left context, so that every buffer fills up and slides


def random_codes(rows: int, frames: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 128, (rows, 10, frames), generator=torch.Generator().manual_seed(seed))


def largest_gap(ours: Tensor, whole: Tensor) -> float:
    assert ours.shape == whole.shape
    return float((ours - whole).abs().max()) if ours.numel() else 0.0


# Chunks


@settings(deadline=None, max_examples=12)
@given(cuts=st.sets(st.integers(1, FRAMES - 1)))
def test_chunks_of_any_sizes_equal_one_whole_decode(cuts: set[int], codec: Codec) -> None:
    codes, decoder = random_codes(1, FRAMES), StreamingDecoder(codec, slots=1)
    chunks = codes.tensor_split(sorted(cuts), dim=-1)
    streamed = torch.cat([decoder.decode(chunk, [0]) for chunk in chunks], dim=-1)
    assert largest_gap(streamed, codec.decode(codes)) <= EXACT


@pytest.mark.parametrize("sizes", [(2, 4, 8, 16, 32, 36), (1, 97), (49, 49)])
def test_streamed_pcm_of_nano_differs_from_the_whole_by_at_most_one_step(sizes: tuple[int, ...]) -> None:
    """Products of another number of rows round differently on a CPU; what is left of that in 16 bits is documented."""
    codec = resolve_model("nano", dtype=torch.float32, device="cpu").codec
    rng = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randint(0, size, (98,), generator=rng) for size in codec.quantizer.sizes])[None]
    decoder, whole = StreamingDecoder(codec, slots=1), codec.decode(codes)
    streamed = torch.cat([decoder.decode(chunk, [0]) for chunk in codes.split(sizes, dim=-1)], dim=-1)
    assert largest_gap(streamed, whole) <= EXACT
    off = np.abs(to_int16(streamed.numpy()).astype(int) - to_int16(whole.numpy()))
    assert off.max() <= 1
    assert off.sum() < 0.005 * off.size


SLOTS = 4
# In each pass some slots get between zero and seven frames each.
PASSES = st.lists(
    st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, 7), min_size=1, max_size=SLOTS), min_size=1, max_size=10
)


@settings(deadline=None, max_examples=8)
@given(passes=PASSES)
def test_any_mix_of_slots_and_lengths_equals_their_whole_decodes(passes: list[dict[int, int]], codec: Codec) -> None:
    codes = random_codes(SLOTS, 80)
    decoder = StreamingDecoder(codec, SLOTS)
    streamed: list[list[Tensor]] = [[] for _ in range(SLOTS)]
    done = [0] * SLOTS
    for new_frames in passes:
        advance(decoder, codes, new_frames, streamed, done)
    for slot in range(SLOTS):
        if done[slot]:
            whole = codec.decode(codes[slot : slot + 1, :, : done[slot]])[0]
            assert largest_gap(torch.cat(streamed[slot]), whole) <= EXACT


def advance(
    decoder: StreamingDecoder, codes: Tensor, new_frames: dict[int, int], streamed: list[list[Tensor]], done: list[int]
) -> None:
    """Decode one pass {slot: frames}; shorter rows are padded with random codes."""
    widest = max(new_frames.values())
    if widest == 0:
        return
    batch = random_codes(len(new_frames), widest, seed=sum(done) + 1)
    for row, (slot, new) in enumerate(new_frames.items()):
        batch[row, :, :new] = codes[slot, :, done[slot] : done[slot] + new]
    samples = decoder.decode(batch, list(new_frames), list(new_frames.values()))
    assert samples.shape == (len(new_frames), widest * FRAME)
    for row, (slot, new) in enumerate(new_frames.items()):
        streamed[slot].append(samples[row, : new * FRAME])
        done[slot] += new


def test_one_frame_at_a_time_for_longer_than_the_left_context(codec: Codec) -> None:
    codes, decoder = random_codes(2, 60), StreamingDecoder(codec, slots=2)
    streamed = [decoder.decode(codes[..., frame : frame + 1], [0, 1]) for frame in range(60)]
    assert largest_gap(torch.cat(streamed, dim=-1), codec.decode(codes)) <= EXACT


def test_slots_may_come_in_any_order(codec: Codec) -> None:
    codes, decoder = random_codes(3, 12), StreamingDecoder(codec, slots=3)
    first = decoder.decode(codes[[2, 0, 1], :, :5], [2, 0, 1])
    second = decoder.decode(codes[[1, 2, 0], :, 5:], [1, 2, 0])
    whole = codec.decode(codes)
    assert largest_gap(first, whole[[2, 0, 1], : 5 * FRAME]) <= EXACT
    assert largest_gap(second, whole[[1, 2, 0], 5 * FRAME :]) <= EXACT


def test_padding_frames_do_not_change_the_state(codec: Codec) -> None:
    codes, decoder = random_codes(1, 9), StreamingDecoder(codec, slots=1)
    decoder.decode(codes[..., :4], [0])
    before = [buffer.clone() for buffer in decoder.past.buffers]
    decoder.decode(random_codes(1, 3, seed=9), [0], lengths=[0])
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.past.buffers, strict=True))
    assert int(decoder.past.frames_seen[0]) == 4
    rest = decoder.decode(codes[..., 4:], [0])
    assert largest_gap(rest, codec.decode(codes)[:, 4 * FRAME :]) <= EXACT


# Reset


def test_a_reset_slot_starts_over_and_the_others_continue(codec: Codec) -> None:
    codes, decoder = random_codes(3, 20), StreamingDecoder(codec, slots=3)
    decoder.decode(codes[..., :8], [0, 1, 2])
    decoder.reset([1])
    again = decoder.decode(codes[1:2, :, :6], [1])
    others = decoder.decode(codes[[0, 2], :, 8:], [0, 2])
    whole = codec.decode(codes)
    assert largest_gap(again, whole[1:2, : 6 * FRAME]) <= EXACT
    assert largest_gap(others, whole[[0, 2], 8 * FRAME :]) <= EXACT


def test_an_unused_slot_can_be_reset(codec: Codec) -> None:
    decoder = StreamingDecoder(codec, slots=2)
    decoder.reset([0, 1])
    codes = random_codes(1, 3)
    assert largest_gap(decoder.decode(codes, [1]), codec.decode(codes)) <= EXACT


# Causality


def test_a_frame_does_not_affect_earlier_samples(codec: Codec) -> None:
    codes = random_codes(1, 12)
    changed = codes.clone()
    changed[..., 5] = (changed[..., 5] + 1) % 128
    difference = (codec.decode(codes) - codec.decode(changed)).abs()[0]
    assert float(difference[: 5 * FRAME].max()) <= 5e-6
    assert float(difference[5 * FRAME : 6 * FRAME].max()) > 1e-3


def test_a_frame_affects_the_next_24_frames_and_no_more(codec: Codec) -> None:
    codes = random_codes(1, 36)
    changed = codes.clone()
    changed[..., 3] = (changed[..., 3] + 1) % 128
    difference = (codec.decode(codes) - codec.decode(changed)).abs()[0].unflatten(0, (-1, FRAME)).amax(-1)
    assert float(difference[4:20].min()) > 1e-6
    assert float(difference[28:].max()) <= 5e-6


# Memory


def state_bytes(config: CodecConfig) -> dict[str, int]:
    """Return the state bytes per slot, counted layer by layer on the meta device."""
    with init_empty_weights():
        codec = Codec(config, encoder=False)
    with torch.device("meta"):
        codec.reserve = lambda frames: None  # type: ignore[method-assign]
        window = codec.quantizer.post_module
        window.table = torch.empty(64, config.transformer.head_dim // 2, 2)
        past = SlotPast(1, torch.device("meta"))
        past.open(torch.zeros(1, dtype=torch.long), 2, None)
        codec.quantizer.upscale(torch.empty(1, config.latent_dim, 2), past)
        attention = len(past.buffers) - len(config.downsample_factor)
        codec.decoder(torch.empty(1, config.latent_dim, 8), past)
    keys_and_values = sum(buffer.nbytes for buffer in past.buffers[:attention])
    return {"keys and values": keys_and_values, "convolutions": past.nbytes - keys_and_values}


def test_the_full_size_codec_keeps_nine_megabytes_per_slot_as_documented() -> None:
    kept = state_bytes(CodecConfig())
    assert kept == {"keys and values": 4 * 8 * 127 * 2 * 1024, "convolutions": 4 * 134_208}
    assert round(sum(kept.values()) / 1e6, 1) == 8.9
    documented = StreamingDecoder.__doc__ or ""
    assert all(words in documented for words in ("134,208 floats", "8 layers x 127 x 2 x 1,024", "8.9 MB"))


def test_the_golden_codec_has_the_documented_state_size(codec: Codec) -> None:
    decoder = StreamingDecoder(codec, slots=3)
    decoder.decode(random_codes(1, 1), [0])
    assert decoder.past.nbytes == 3 * 4 * (5400 + 896)
    assert state_bytes(codec.config) == {"keys and values": 4 * 896, "convolutions": 4 * 5400}


def test_memory_does_not_grow_with_the_stream(codec: Codec) -> None:
    decoder = StreamingDecoder(codec, slots=1)
    decoder.decode(random_codes(1, 2), [0])
    before = decoder.past.nbytes
    for _ in range(5):
        decoder.decode(random_codes(1, 20), [0])
    assert decoder.past.nbytes == before


def test_no_past_is_zero_padding() -> None:
    joined = NoPast().join(torch.ones(1, 2, 3), 4)
    assert joined.shape == (1, 2, 7)
    assert not joined[..., :4].any()


@pytest.mark.parametrize("lengths", [None, [3]])
def test_the_host_and_the_device_count_the_same_frames(lengths: list[int] | None, codec: Codec) -> None:
    decoder = StreamingDecoder(codec, slots=2)
    decoder.decode(random_codes(1, 3), [1], lengths)
    assert decoder.past.frames_seen.tolist() == [0, 3]


def test_positions_beyond_the_table_grow_it(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.codec.layers import WindowTransformer

    monkeypatch.setattr(WindowTransformer, "TABLE_STEP", 16)
    short = Codec(codec.config, encoder=False)
    short.load_state_dict(codec.state_dict(), strict=False)
    codes, decoder = random_codes(1, 40), StreamingDecoder(short, slots=1)
    streamed = torch.cat([decoder.decode(chunk, [0]) for chunk in codes.split(7, dim=-1)], dim=-1)
    assert largest_gap(streamed, codec.decode(codes)) <= EXACT
