"""Quantized KV cache: smaller, and independent of batch and preemption."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore, block_count
from shoal.engine.kv_cache import HostCache, PagedKV, resolve_kv_dtype
from shoal.engine.preprocess import build_turns
from shoal.engine.utterance import Utterance
from shoal.errors import InvalidRequest
from shoal.kernels.attention.kv_quant import SCALE_DTYPE, dequantize_kv, quantize_kv
from shoal.model.config import BlockConfig
from shoal.speech import SamplingParams
from shoal.text.prompt import Codes
from shoal.voices.voice import Voice
from tests.engine.oracle import StepDriver

DTYPES = [torch.int8, torch.float8_e4m3fn]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 1 / 16)])
def test_a_stored_token_is_within_half_a_quantization_step(dtype: torch.dtype, error: float) -> None:
    x = torch.randn(50, 2, 64) * torch.logspace(-2, 3, 50)[:, None, None]
    q, scales = quantize_kv(x, dtype)
    assert (q.dtype, scales.dtype, scales.shape) == (dtype, SCALE_DTYPE, (50, 2))
    away = (dequantize_kv(q, scales, torch.float32) - x).abs()
    # The error of int8 is relative to the largest value of its token, that of fp8 to each value.
    size = x.abs().amax(-1, keepdim=True) if dtype == torch.int8 else x.abs() + x.abs().amax(-1, keepdim=True) / 256
    assert (away / size).max() <= error * 1.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    q, scales = quantize_kv(torch.zeros(1, 2, 8), dtype)
    assert torch.equal(dequantize_kv(q, scales, torch.float32), torch.zeros(1, 2, 8))


@pytest.mark.parametrize(("head_dim", "gain"), [(64, 1.9), (128, 1.96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nearly_twice_the_blocks_fit(head_dim: int, gain: float, dtype: torch.dtype) -> None:
    config = BlockConfig(28, 1024, 16, 8, head_dim, 3072, 1e6, 1e-6, True, 8192)
    plain, small = (PagedKV.bytes_per_block(config, 16, each) for each in (torch.bfloat16, dtype))
    assert plain / small >= gain


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_a_block_takes_bytes_per_block_bytes(tiny: Checkpoint, dtype: torch.dtype) -> None:
    kv = PagedKV(tiny.model.config.slow, blocks=9, size=16, dtype=dtype, device="cpu")
    assert kv.nbytes == 10 * PagedKV.bytes_per_block(tiny.model.config.slow, 16, dtype)


def filled(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> tuple[PagedKV, list[torch.Tensor]]:
    """Return a cache of four random blocks, and the content of block 1."""
    kv = PagedKV(checkpoint.model.config.slow, blocks=4, size=16, dtype=dtype, device=device)
    for part in kv.parts():
        part.copy_(torch.randn(part.shape))
    return kv, [part[:, 1].clone() for part in kv.parts()]


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_a_block_is_restored_unchanged_from_the_host(tiny: Checkpoint, dtype: torch.dtype) -> None:
    kv, before = filled(tiny, dtype, "cpu")
    tier = HostCache(kv, 1 << 20)
    tier.save(1, b"key")
    assert tier.restore(b"key", 3)
    for part, saved in zip(kv.parts(), before, strict=True):
        assert torch.equal(part[:, 3].float(), saved.float())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES])
def test_blocks_are_saved_and_restored_in_stream_order_without_synchronization(
    tiny: Checkpoint, dtype: torch.dtype
) -> None:
    kv, before = filled(tiny, dtype, "cuda")
    tier = HostCache(kv, 1 << 20)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy  # delays the copies on the stream
    tier.save(1, b"key")
    for part in kv.parts():
        part.copy_(torch.zeros(part.shape))
    assert tier.restore(b"key", 3)
    for part, saved in zip(kv.parts(), before, strict=True):
        assert torch.equal(part[:, 3].float(), saved.float())


def speak(checkpoint: Checkpoint, voice: Voice, ids: list[int], config: EngineConfig) -> dict[int, Codes]:
    driver = StepDriver(EngineCore(checkpoint, config))
    turns = build_turns("hello there", voice, checkpoint)
    heard = {id: driver.add(Utterance(id, turns, SamplingParams(seed=id, max_frames=12))) for id in ids}
    driver.run()
    return {id: each.codes for id, each in heard.items()}


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_output_is_the_same_alone_in_a_batch_and_after_preemption(
    tiny: Checkpoint, voice: Voice, kv_dtype: str
) -> None:
    roomy = EngineConfig(slots=8, guard=False, kv_dtype=kv_dtype, token_budget=512, backend="eager")
    per_block = PagedKV.bytes_per_block(tiny.model.config.slow, 16, resolve_kv_dtype(kv_dtype, torch.float32, CPU))
    tight = replace(roomy, token_budget=17, prefix_cache=False, kv_bytes=14 * per_block)
    together, squeezed = speak(tiny, voice, list(range(4)), roomy), speak(tiny, voice, list(range(4)), tight)
    for id in range(4):
        alone = speak(tiny, voice, [id], roomy)[id]
        assert np.array_equal(together[id], alone)
        assert np.array_equal(squeezed[id], alone)


def test_an_8_bit_cache_has_twice_the_blocks(tiny: Checkpoint) -> None:
    counts = {
        name: block_count(tiny, EngineConfig(kv_dtype=name, kv_bytes=1 << 20)) for name in ("auto", "int8", "fp8")
    }
    assert counts["int8"] == counts["fp8"] > 3 * counts["auto"]  # from fp32


def test_an_unknown_kv_dtype_is_refused_with_the_supported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="kv_dtype = 'int2' is not supported on cpu: use auto, int8, fp8"):
        resolve_kv_dtype("int2", torch.float32, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InvalidRequest, match=r"on cuda: use auto, int8$"):
        resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda"))
