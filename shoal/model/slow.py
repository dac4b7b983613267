"""Slow transformer: tokens of the prompt grid -> hidden states -> logits of the semantic token."""

import math

import torch
from torch import Tensor, nn

from shoal.model.config import DualARConfig
from shoal.model.layers import KVCache, TransformerStack
from shoal.model.linear import AnyLinear, dense, take_rows


class SlowTransformer(TransformerStack):
    """Transformer over time. A token is a column of the prompt grid: an id and, for audio, the codes of a frame."""

    def __init__(self, config: DualARConfig) -> None:
        super().__init__(config.slow)
        self.config = config
        dim = config.slow.dim
        self.embeddings = nn.Embedding(config.vocab_size, dim)
        self.codebook_embeddings = nn.Embedding(config.num_codebooks * config.codebook_size, dim)
        if not config.tie_word_embeddings:
            self.output: AnyLinear = nn.Linear(dim, config.vocab_size, bias=False)
        self.pruned = False  # whether `output` holds only the rows of `candidate_ids`

    def prune_output(self) -> None:
        """Drop the output rows of text tokens, which speech never samples: a tenth of a small model's weights."""
        if not self.config.tie_word_embeddings and not self.pruned:
            self.output = take_rows(self.output, candidate_ids(self.config).to(self.norm.weight.device))
            self.pruned = True

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [n, 1 + codebooks] (id, then codes) -> [n, dim]."""
        config = self.config
        ids, codes = tokens[:, 0], tokens[:, 1:]
        semantic = (ids >= config.semantic_begin_id) & (ids <= config.semantic_end_id)
        first = torch.arange(config.num_codebooks, device=tokens.device) * config.codebook_size
        frame = self.codebook_embeddings(codes + first).sum(1) * semantic[:, None]
        x = self.embeddings(ids) + frame
        if config.scale_codebook_embeddings:
            # Audio tokens are the sum of 1 + codebooks embeddings; scale them back to the size of one.
            x = torch.where(semantic[:, None], x / math.sqrt(config.num_codebooks + 1), x)
        return x

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Run tokens [n, 1 + codebooks] at positions [n] -> hidden states [n, dim] before the final norm."""
        return self.run(self.embed(tokens), positions, cache)


def candidate_ids(config: DualARConfig) -> Tensor:
    """Return the ids that generation may sample: the semantic tokens in order, then the stop token."""
    return torch.tensor([*range(config.semantic_begin_id, config.semantic_end_id + 1), config.stop_id])


class Head(nn.Module):
    """Output head over the candidate ids; `ids` maps a logit index to its vocabulary id.

    By default only the rows of `candidate_ids` are computed, 4,097 of 155,776 for the released models, so text tokens
    cannot be sampled. `full_vocab` gives upstream's S1 head, which samples from the whole vocabulary.
    """

    def __init__(self, slow: SlowTransformer, *, full_vocab: bool = False) -> None:
        super().__init__()
        config = slow.config
        assert not (full_vocab and slow.pruned), "the rows of text tokens were pruned"
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
        """Return logits [n, len(ids)] of hidden states [n, dim] after the final norm."""
        return self.output(normed)

    def logit_index(self, ids: Tensor) -> Tensor:
        """Return the logit index of each vocabulary id; `len(self.ids)` for ids that cannot be sampled."""
        if self.full_vocab:
            return ids
        code = ids - self.first
        index = torch.where((code >= 0) & (code < self.count), code, len(self.ids))
        return torch.where(ids == self.stop_id, self.count, index)
