"""Compile the kernels with the highest resource use and compare them with the GPU's limits, without launching any."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.errors import describe_error, device_errors
from shoal.kernels.codec_decoder.conv import Taps, conv
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.codec_decoder.residual_unit import residual_unit
from shoal.kernels.jit import collect_compiled, kernels_unavailable, shared_memory_limit
from shoal.kernels.linear.linear import linear
from shoal.kernels.linear.split_k_linear import split_k_linear


def check_kernels(device: torch.device, dtype: torch.dtype, limit: int | None = None) -> str | None:
    """Return why the fused kernels of a model cannot run on this GPU, None if they can. Takes seconds, less if cached.

    `limit` is the shared memory per block in bytes, by default that of the device.
    """
    return _check(launch_largest_products, device, dtype, limit)


def check_codec_kernels(device: torch.device, dtype: torch.dtype, limit: int | None = None) -> str | None:
    """Return why the fused kernels of the codec cannot run on this GPU, as `check_kernels` does."""
    return _check(launch_largest_codec_kernels, device, dtype, limit)


def _check(
    launch: Callable[[torch.device, torch.dtype], None], device: torch.device, dtype: torch.dtype, limit: int | None
) -> str | None:
    if (reason := kernels_unavailable(device)) is not None:
        return reason
    limit = shared_memory_limit(device) if limit is None else limit
    failed = list[str]()
    with collect_compiled() as compiled, device_errors(lambda error: failed.append(describe_error(error))):
        launch(device, dtype)
    if failed:
        return f"a kernel does not compile: {failed[0]}"
    name, shared = max(compiled, key=lambda each: each[1])
    over = f"{name.strip('_')} needs {shared:,} bytes of shared memory, this GPU has {limit:,} per block"
    return over if shared > limit else None


def launch_largest_products(device: torch.device, dtype: torch.dtype) -> None:
    """Launch the products of the released models that need over 99 KB of shared memory with the tiles of an H200."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    for rows, n, k, gated in ((1, 3072, 1024, True), (64, 1024, 1024, False), (128, 3072, 1024, True)):
        linear(empty(rows, k), empty(2 * n if gated else n, k), gated=gated)
    linear(empty(128, 1024), empty(4096, 1024))
    linear(empty(64, 1024), empty(1024, 1024, dtype=torch.int8), scales=empty(1024, dtype=torch.float32))
    split_k_linear(empty(1, 3072), empty(1024, 3072))


def launch_largest_codec_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Launch the kernels of the released codec that need the most shared memory, one of each tile."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def taps(count: int, out: int, channels: int) -> Taps:
        return Taps(empty(count, out, channels), empty(out, dtype=torch.float32))

    frame = empty(1, dtype=torch.int32)
    packing = Packing(frame, frame, frame)
    for rows, channels, width, count in (
        (16, 1024, 1024, 7),
        (64, 1024, 1024, 7),
        (4096, 768, 768, 7),
        (4096, 96, 96, 1),
    ):
        conv(empty(rows, channels), taps(count, width, channels), empty(1, count - 1, channels), packing)
    x, alpha = empty(64 * 192, 192), empty(192, dtype=torch.float32)
    residual_unit(x, x, taps(7, 192, 192), alpha, taps(1, 192, 192), alpha, empty(1, 6, 192), packing)
    linear(empty(128, 1024), empty(2 * 3072, 1024), gated=True)
    linear(empty(1, 1024), empty(3072, 1024))
