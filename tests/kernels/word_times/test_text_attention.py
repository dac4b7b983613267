import torch

from shoal.kernels.attention.kv_quant import quantize_kv
from shoal.kernels.word_times.text_attention import Texts, text_attention, text_attention_reference

TEXTS = torch.tensor([[2, 1, 0, 1], [5, 3, 0, 130], [1, 0, 100, 64]], dtype=torch.int32)  # the second row has no text
HEADS = torch.tensor([0, 3])


def inputs(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(4, 4, 16, device=device).to(dtype)
    keys = torch.randn(60, 4, 2, 16, device=device).to(dtype)
    return q, keys, torch.randint(0, 60, (3, 50), dtype=torch.int32, device=device)


def test_the_kernel_equals_the_reference(dtype: torch.dtype, device: str, close: float) -> None:
    q, keys, tables = inputs(dtype, device)
    ours, reference = (torch.full((4, 5, 128), 7.0, device=device) for _ in range(2))
    place = (q, keys, tables, Texts(*TEXTS.to(device)), HEADS.to(device))
    text_attention(*place, ours[:, 1:3])
    text_attention_reference(*place, reference[:, 1:3])
    for row, length in enumerate(TEXTS[2].tolist()):
        torch.testing.assert_close(ours[row, :, :length], reference[row, :, :length], atol=close, rtol=close)
    assert ours[1].eq(7).all()
    assert ours[:, [0, 3, 4]].eq(7).all()


def test_the_kernel_reads_quantized_keys(device: str) -> None:
    torch.manual_seed(0)
    q, keys, tables = inputs(torch.float32, device)
    quantized, scales = quantize_kv(keys, torch.int8)
    ours, reference = (torch.zeros(4, 2, 128, device=device) for _ in range(2))
    place = (q, quantized, tables, Texts(*TEXTS.to(device)), HEADS.to(device))
    text_attention(*place, ours, key_scales=scales)
    text_attention_reference(*place, reference, key_scales=scales)
    for row, length in enumerate(TEXTS[2].tolist()):
        torch.testing.assert_close(ours[row, :, :length], reference[row, :, :length])


def test_the_reference_is_the_softmax_over_the_text_alone() -> None:
    torch.manual_seed(0)
    q, keys, tables = inputs(torch.float32, "cpu")
    out = torch.full((4, 2, 128), 7.0)
    text_attention_reference(q, keys, tables, Texts(*TEXTS), HEADS, out)
    slot, begin, length = (int(each) for each in TEXTS[:, 2])
    sequence = keys[tables[slot].long()].flatten(0, 1)[begin : begin + length]
    expected = (sequence[:, 1] @ q[2, 3] / 4).softmax(0)
    torch.testing.assert_close(out[2, 1, :length], expected)
