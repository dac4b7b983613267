"""Kernels against their references: on a GPU in bf16, elsewhere under Triton's interpreter in fp32 and fp16."""

import pytest
import torch

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# References are exact: by default a GPU rounds what convolutions multiply to ten bits.
torch.backends.cudnn.allow_tf32 = False
# The interpreter has no bf16 products.
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
    """How far a result of order one may be from its reference."""
    return {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
