"""Residual vector quantizer: one semantic codebook, then residual ones, each searched by cosine similarity."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codec.config import CodecConfig
from shoal.codec.layers import CausalConv, CausalUpsample, Resample, WindowTransformer, apply_layers
from shoal.codec.streaming import Past


class VectorQuantizer(nn.Module):
    """One codebook with its projections into and out of the codebook space."""

    def __init__(self, dim: int, entries: int, codebook_dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Conv1d(dim, codebook_dim, 1)
        self.out_proj = nn.Conv1d(codebook_dim, dim, 1)
        self.codebook = nn.Embedding(entries, codebook_dim)

    def encode(self, latent: Tensor) -> Tensor:
        """Quantize latent [n, dim, T] -> codes [n, T], the entries of highest cosine similarity."""
        query = F.normalize(self.in_proj(latent).transpose(1, 2), dim=-1)
        return (query @ F.normalize(self.codebook.weight, dim=-1).T).argmax(-1)

    def table(self) -> Tensor:
        """Return the latent vector of every code [entries, dim], projection and bias included."""
        return F.linear(self.codebook.weight, self.out_proj.weight.squeeze(-1), self.out_proj.bias)


class CodebookStack(nn.Module):
    """Codebooks that each quantize the residual of the previous ones. The attribute name is upstream's."""

    def __init__(self, dim: int, count: int, entries: int, codebook_dim: int) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(VectorQuantizer(dim, entries, codebook_dim) for _ in range(count))

    def __iter__(self) -> Iterator[VectorQuantizer]:
        return cast(Iterator[VectorQuantizer], iter(self.quantizers))

    def encode(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [n, count, T] and the residual latent [n, dim, T]."""
        codes = []
        for quantizer in self:
            code = quantizer.encode(latent)
            latent = latent - F.embedding(code, quantizer.table()).transpose(1, 2)
            codes.append(code)
        return torch.stack(codes, dim=1), latent


class Quantizer(nn.Module):
    """Everything between encoder and decoder: downsampling to the frame rate, quantization, upsampling."""

    def __init__(self, config: CodecConfig, *, encoder: bool = True) -> None:
        super().__init__()
        dim, factors = config.latent_dim, config.downsample_factor
        if encoder:
            self.downsample = nn.ModuleList(
                Resample(CausalConv(dim, dim, factor, stride=factor), dim) for factor in factors
            )
            self.pre_module = WindowTransformer(config.transformer)
        self.semantic_quantizer = CodebookStack(dim, 1, config.semantic_codebook_size, config.codebook_dim)
        self.quantizer = CodebookStack(dim, config.n_codebooks, config.codebook_size, config.codebook_dim)
        self.post_module = WindowTransformer(config.transformer)
        self.upsample = nn.ModuleList(
            Resample(CausalUpsample(dim, dim, factor, factor), dim) for factor in reversed(factors)
        )
        self.sizes = config.codebook_sizes
        # Computed from the weights at the first lookup; a buffer, so that it moves with them to another device.
        self.register_buffer("_tables", torch.empty(0, device="cpu"), persistent=False)
        self._tables: Tensor
        # Last entry and first table row of every codebook [2, codebooks, 1]. Kept on the device as well, because CUDA
        # graphs capture `lookup` and cannot capture copies of new tensors from the host.
        self.register_buffer("_bounds", torch.empty(0, device="cpu", dtype=torch.long), persistent=False)
        self._bounds: Tensor

    def encode(self, latent: Tensor, past: Past) -> Tensor:
        """Encode latent [n, dim, steps] -> codes [n, codebooks, frames]."""
        latent = self.pre_module(apply_layers(self.downsample, latent, past), past)
        semantic, residual = self.semantic_quantizer.encode(latent)
        codes, _ = self.quantizer.encode(residual)
        return torch.cat((semantic, codes), dim=1)

    def lookup(self, codes: Tensor) -> Tensor:
        """Look up codes [n, codebooks, T] -> latent [n, dim, T]; codes beyond a codebook's end are clamped."""
        if self._bounds.numel() == 0:
            sizes = torch.tensor(self.sizes, device=codes.device)
            self._bounds = torch.stack((sizes - 1, sizes.cumsum(0) - sizes))[..., None]
        last, first = self._bounds
        rows = torch.minimum(codes, last) + first
        return F.embedding(rows, self.tables()).sum(1).transpose(1, 2)

    def upscale(self, latent: Tensor, past: Past) -> Tensor:
        """Upsample a frame-rate latent [n, dim, T] -> decoder input [n, dim, steps]."""
        return apply_layers(self.upsample, self.post_module(latent, past), past)

    def tables(self) -> Tensor:
        """Return the concatenated latent vectors of all codebooks [sum of sizes, dim]; computed once and cached."""
        if self._tables.numel() == 0:
            books = (*self.semantic_quantizer, *self.quantizer)
            self._tables = torch.cat([book.table() for book in books])
        return self._tables
