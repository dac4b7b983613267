"""Fast transformer: one hidden state of the slow transformer -> the codes of one frame, codebook by codebook."""

import torch
from torch import Tensor, nn

from shoal.model.cache import NoKVCache
from shoal.model.config import DualARConfig
from shoal.model.layers import KVCache, TransformerStack
from shoal.model.linear import first_rows


class FastTransformer(TransformerStack):
    """Transformer over the positions of one frame, with one embedding table and one head for all codebooks."""

    def __init__(self, config: DualARConfig) -> None:
        super().__init__(config.fast)
        dim = config.fast.dim
        self.project_in = nn.Linear(config.slow.dim, dim) if config.slow.dim != dim else nn.Identity()
        self.embeddings = nn.Embedding(config.codebook_size, dim)
        self.output = nn.Linear(dim, config.codebook_size, bias=False)
        self.residual_size = config.residual_size

    def forward(self, x: Tensor, position: int, cache: KVCache) -> Tensor:
        """Run inputs [n, dim] at one position of the frame -> hidden states [n, dim] after the norm."""
        positions = torch.full((len(x),), position, device=x.device)
        return self.norm(self.run(x, positions, cache))

    def first_logits(self, hidden: Tensor, code: Tensor, cache: KVCache) -> Tensor:
        """Return logits [n, residual_size] at position 1, given the first codebook's code [n].

        Position 0 holds the slow model's hidden state [n, slow dim]. Its output is not sampled, so positions 0 and 1
        run in one pass.
        """
        inputs = torch.stack((self.project_in(hidden), self.embeddings(code)), dim=1)
        positions = torch.arange(2, device=code.device).repeat(len(code))
        mixed = self.run(inputs.flatten(0, 1), positions, cache)
        return first_rows(self.output, self.norm(mixed[1::2]), self.residual_size)

    def next_logits(self, code: Tensor, position: int, cache: KVCache) -> Tensor:
        """Return logits [n, residual_size] at `position`, given the previous code [n]."""
        normed = self(self.embeddings(code), position, cache)
        return first_rows(self.output, normed, self.residual_size)

    def teacher_forced(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Return logits [n, codebooks, codebook_size] for known codes [n, codebooks]; the last code is unused."""
        rows, length = codes.shape
        inputs = torch.cat((self.project_in(hidden)[:, None], self.embeddings(codes[:, :-1])), dim=1)
        positions = torch.arange(length, device=codes.device).repeat(rows)
        mixed = self.run(inputs.flatten(0, 1), positions, NoKVCache(rows))
        return self.output(self.norm(mixed)).unflatten(0, (rows, length))
