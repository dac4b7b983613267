import pytest
import torch

from shoal.kernels.codec_decoder.embed_codes import embed_codes, embed_codes_reference


@pytest.mark.parametrize("dim", [24, 700], ids=["one program per frame", "two programs per frame"])
def test_the_vectors_of_all_codebooks_are_added(dim: int, dtype: torch.dtype, device: str, close: float) -> None:
    sizes = torch.tensor([40, 8, 8], device=device)
    table = torch.randn(56, dim, device=device).to(dtype)
    rows = torch.randint(0, 8, (3, 8), dtype=torch.int32, device=device)
    rows[0, 2:4] = torch.tensor([39, 100])  # the last entry of the first codebook, and a code beyond it
    codes = rows[:, :5].T  # strided, as in the inputs of a call
    ours = embed_codes(codes, sizes, table)
    torch.testing.assert_close(ours, embed_codes_reference(codes, sizes, table), atol=close, rtol=close)
    first = embed_codes(codes[2:4, :1], sizes[:1], table)
    assert torch.equal(first, table[[39, 39]])
