import torch
from torch.nn import functional as F

from shoal.codec.dac import Codec
from shoal.codec.quantizer import VectorQuantizer
from shoal.codec.streaming import NoPast


def test_the_nearest_entry_is_the_one_of_highest_cosine() -> None:
    quantizer = VectorQuantizer(6, 32, 4)
    latent = torch.randn(2, 6, 9)
    query = quantizer.in_proj(latent).transpose(1, 2)
    cosine = F.cosine_similarity(query[:, :, None], quantizer.codebook.weight[None, None], dim=-1)
    assert torch.equal(quantizer.encode(latent), cosine.argmax(-1))


def test_the_norm_of_an_entry_does_not_matter() -> None:
    quantizer = VectorQuantizer(6, 32, 4)
    latent = torch.randn(1, 6, 50)
    before = quantizer.encode(latent)
    with torch.no_grad():
        quantizer.codebook.weight.mul_(torch.rand(32, 1) + 0.1)
    assert torch.equal(quantizer.encode(latent), before)


@torch.inference_mode()
def test_a_code_maps_to_its_projected_entry(codec: Codec) -> None:
    book = next(iter(codec.quantizer.semantic_quantizer))
    row = book.out_proj(book.codebook.weight[7][None, :, None])[0, :, 0]
    torch.testing.assert_close(book.table()[7], row)


@torch.inference_mode()
def test_looking_up_codes_sums_the_codebooks(codec: Codec) -> None:
    quantizer, codes = codec.quantizer, torch.randint(0, 128, (1, 10, 5))
    books = (*quantizer.semantic_quantizer, *quantizer.quantizer)
    expected = sum(book.table()[codes[0, index]] for index, book in enumerate(books))
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(quantizer.lookup(codes)[0], expected.T)


@torch.inference_mode()
def test_residual_codebooks_quantize_the_remaining_residual(codec: Codec) -> None:
    latent = torch.randn(1, codec.config.latent_dim, 3)
    codes, left = codec.quantizer.quantizer.encode(latent)
    assert codes.shape == (1, 9, 3)
    tables = [book.table() for book in codec.quantizer.quantizer]
    quantized = sum(table[codes[0, index]] for index, table in enumerate(tables))
    assert isinstance(quantized, torch.Tensor)
    torch.testing.assert_close(latent[0] - quantized.T, left[0])


@torch.inference_mode()
def test_encoding_downsamples_to_the_frame_rate(codec: Codec) -> None:
    codec.reserve(3)
    codes = codec.quantizer.encode(torch.randn(2, codec.config.latent_dim, 12), NoPast())
    assert codes.shape == (2, 10, 3)
