"""Codebooks in training: straight-through lookup, k-means initialisation, reset of unused codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.codec.dac import Codec
from shoal.codec.quantizer import VectorQuantizer


@dataclass
class Quantised:
    """Quantised latent [n, T, dim] with its losses, codes [codebooks, n * T] and lookup queries [codebooks, n * T, 8].

    `semantic` [n, T, dim] is the part of the latent that the first codebook holds.
    """

    latent: Tensor
    commit: Tensor
    book: Tensor
    codes: Tensor
    queries: Tensor
    semantic: Tensor


def codebooks(codec: Codec) -> list[VectorQuantizer]:
    stacks = (codec.quantizer.semantic_quantizer, codec.quantizer.quantizer)
    return [cast(VectorQuantizer, book) for stack in stacks for book in stack.quantizers]


def nearest(queries: Tensor, entries: Tensor) -> Tensor:
    """Return the index [m] of the entry [entries, d] with the highest cosine similarity to each of [m, d]."""
    return (F.normalize(queries, dim=-1) @ F.normalize(entries, dim=-1).T).argmax(-1)


def quantise(codec: Codec, latent: Tensor, active: Tensor) -> Quantised:
    """Pass the latent through the first active[i] codebooks of row i; gradients pass straight through the lookup."""
    left, total = latent, torch.zeros_like(latent)
    commit = book_loss = latent.new_zeros(())
    codes, queries, parts = [], [], []
    for index, book in enumerate(codebooks(codec)):
        query = F.linear(left, book.in_proj.weight.squeeze(-1), book.in_proj.bias)
        code = nearest(query.detach().flatten(0, 1), book.codebook.weight.detach())
        # index_select rather than embedding, whose backward pass synchronizes with the host.
        entry = book.codebook.weight.index_select(0, code).view_as(query)
        used = (active > index)[:, None, None].to(latent.dtype)
        commit = commit + (used * (query - entry.detach()).square()).mean()
        book_loss = book_loss + (used * (query.detach() - entry).square()).mean()
        through = query + (entry - query).detach()
        part = F.linear(through, book.out_proj.weight.squeeze(-1), book.out_proj.bias)
        left, total = left - part, total + used * part
        codes.append(code)
        queries.append(query.detach().flatten(0, 1))
        parts.append(part)
    return Quantised(total, commit, book_loss, torch.stack(codes), torch.stack(queries), parts[0])


def look_up(codec: Codec, codes: Tensor) -> Tensor:
    """Look up codes [n, T, codebooks] of the first codebooks -> latent [n, T, dim]."""
    parts = [
        F.linear(book.codebook.weight[codes[..., index]], book.out_proj.weight.squeeze(-1), book.out_proj.bias)
        for index, book in enumerate(codebooks(codec)[: codes.shape[-1]])
    ]
    return torch.stack(parts).sum(0)


@torch.no_grad()
def lay_out_codebooks(codec: Codec, latents: Tensor, rounds: int = 10) -> None:
    """Set every codebook from latents [m, dim]: its space is the top principal directions of what is left so far."""
    left = latents.clone()
    for book in codebooks(codec):
        mean = left.mean(0)
        centred = left - mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        top = vectors[:, -book.codebook.embedding_dim :]
        queries = centred @ top
        entries = cosine_means(queries, book.codebook.num_embeddings, rounds)
        # In place: a captured graph and the optimiser refer to these tensors.
        book.in_proj.weight.copy_(top.T[..., None])
        cast(Tensor, book.in_proj.bias).copy_(-mean @ top)
        book.out_proj.weight.copy_(top[..., None])
        cast(Tensor, book.out_proj.bias).copy_(mean)
        book.codebook.weight.copy_(entries)
        left = left - entries[nearest(queries, entries)] @ top.T - mean


def cosine_means(queries: Tensor, count: int, rounds: int) -> Tensor:
    """Cluster by cosine k-means; centres have the mean length of their members, empty ones restart at random."""
    entries = random_rows(queries, count)
    for _ in range(rounds):
        code = nearest(queries, entries)
        sums = torch.zeros_like(entries).index_add_(0, code, queries)
        members = torch.bincount(code, minlength=count)[:, None]
        entries = torch.where(members > 0, sums / members.clamp(min=1), random_rows(queries, count))
    return entries


def random_rows(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randint(len(rows), (count,), device=rows.device)]


@torch.no_grad()
def revive(codec: Codec, uses: Tensor, queries: Tensor) -> int:
    """Move entries that were not used [codebooks, entries] onto recent queries [codebooks, m, d]; returns how many."""
    moved = 0
    for book, count, recent in zip(codebooks(codec), uses, queries, strict=True):
        dead = (count == 0).nonzero().squeeze(-1)
        book.codebook.weight[dead] = random_rows(recent, len(dead))
        moved += len(dead)
    return moved


def perplexities(codes: Tensor, entries: int) -> list[float]:
    """Return the perplexity of each codebook over codes [codebooks, m]."""
    shares = [torch.bincount(row, minlength=entries).float() / len(row) for row in codes]
    return [math.exp(-(share * (share + 1e-10).log()).sum().item()) for share in shares]
