"""The codec's kernels run in fp16, on GPUs too."""

import pytest
import torch


@pytest.fixture(params=[torch.float16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]
