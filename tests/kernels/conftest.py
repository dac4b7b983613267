"""Fixtures of the kernel tests: bf16 (the codec: fp16) and fp32 on a GPU, fp16 and fp32 under the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# By default convolutions on a GPU round their operands to TF32; references must be exact.
torch.backends.cudnn.allow_tf32 = False
# The interpreter cannot multiply bf16.
DTYPES = [torch.bfloat16, torch.float32] if DEVICE == "cuda" else [torch.float16, torch.float32]


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def close(dtype: torch.dtype) -> float:
    """Return the tolerance for results of order one."""
    return {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
