"""The slow transformer: columns of the prompt grid -> hidden state -> logits of the main token."""

import math

import torch
from torch import Tensor, nn

from shoal.model.config import DualARConfig
from shoal.model.layers import KVCache, TransformerStack
from shoal.model.linear import AnyLinear, dense, take_rows


class SlowTransformer(TransformerStack):
    def __init__(self, config: DualARConfig) -> None:
        super().__init__(config.slow)
        self.config = config
        dim = config.slow.dim
        self.embeddings = nn.Embedding(config.vocab_size, dim)
        self.codebook_embeddings = nn.Embedding(config.num_codebooks * config.codebook_size, dim)
        if not config.tie_word_embeddings:
            self.output: AnyLinear = nn.Linear(dim, config.vocab_size, bias=False)
        self.pruned = False  # whether `output` holds the legal rows only

    def prune_output(self) -> None:
        """Let go of the rows of text tokens, which no cut head reads: a tenth of a small model's weights."""
        if not self.config.tie_word_embeddings and not self.pruned:
            self.output = take_rows(self.output, candidate_ids(self.config).to(self.norm.weight.device))
            self.pruned = True

    def embed(self, columns: Tensor) -> Tensor:
        """Columns [tokens, 1 + codebooks] (main id, then codes) -> [tokens, dim]"""
        config = self.config
        main, codes = columns[:, 0], columns[:, 1:]
        semantic = (main >= config.semantic_begin_id) & (main <= config.semantic_end_id)
        first = torch.arange(config.num_codebooks, device=columns.device) * config.codebook_size
        frame = self.codebook_embeddings(codes + first).sum(1) * semantic[:, None]
        x = self.embeddings(main) + frame
        if config.scale_codebook_embeddings:
            # Only audio columns carry eleven vectors, so only they are scaled back to the size of one.
            x = torch.where(semantic[:, None], x / math.sqrt(config.num_codebooks + 1), x)
        return x

    def forward(self, columns: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Columns [tokens, 1 + codebooks] at positions [tokens] -> hidden states [tokens, dim], before the norm."""
        return self.run(self.embed(columns), positions, cache)


def candidate_ids(config: DualARConfig) -> Tensor:
    """The main tokens that speech is made of: the semantic ones in order, and the end."""
    return torch.tensor([*range(config.semantic_begin_id, config.semantic_end_id + 1), config.stop_id])


class Head(nn.Module):
    """Logits over the main tokens that may be drawn, with the vocabulary id of each column.

    Cut, it holds the semantic ids in order and the stop token last: 4,097 rows are read per frame instead of
    155,776, and text can never be drawn by accident. Whole, it is upstream's S1 head, which allows everything.
    """

    def __init__(self, slow: SlowTransformer, *, full_vocab: bool = False) -> None:
        super().__init__()
        config = slow.config
        assert not (full_vocab and slow.pruned), "the rows of text tokens were let go"
        source = dense(slow.embeddings.weight.detach()) if config.tie_word_embeddings else slow.output
        ids = torch.arange(config.vocab_size) if full_vocab else candidate_ids(config)
        ids = ids.to(slow.norm.weight.device)
        self.register_buffer("ids", ids, persistent=False)
        self.ids: Tensor
        self.output = source if full_vocab or slow.pruned else take_rows(source, ids)
        self.full_vocab = full_vocab
        self.first, self.count = config.semantic_begin_id, config.semantic_end_id - config.semantic_begin_id + 1
        self.stop_id = config.stop_id

    def forward(self, normed: Tensor) -> Tensor:
        """[n, dim] after the final norm -> [n, rows]"""
        return self.output(normed)

    def logit_index(self, ids: Tensor) -> Tensor:
        """Which column holds each vocabulary id; `len(self.ids)` for ids that cannot be drawn."""
        if self.full_vocab:
            return ids
        code = ids - self.first
        column = torch.where((code >= 0) & (code < self.count), code, len(self.ids))
        return torch.where(ids == self.stop_id, self.count, column)
