"""Models that no single device holds: does cutting one over unlike devices beat one type?

    python -m benchmarks.recommend_large [--models llama70b,llama33b] [--markets aws,gcp,lambda] [--splits 2,4,8]

Decoders of the published sizes of Llama 3 70B and LLaMA 33B, bfloat16, prompts of 512 tokens, one at a time, the last
token's logits as the answer; made on torch's meta device, so no weight is ever in memory. Questions, markets and what
the recommendation is compared with are those of recommend.py; where no device holds a model, loads and budgets are
multiples of what its fastest pipeline does and costs. With splits there is a question more, "soon": the price question,
each input within 0.6 of the least latency that there is without splits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.recommend import Row, every_market, rows_of, show
from tvmhet.cluster import Market
from tvmhet.ir.importers import from_torch
from tvmhet.recommending.flow import candidates_of
from tvmhet.recommending.study import study_with, with_teams
from tvmhet.splitting import wishes_of
from tvmhet.times import time_table

LENGTH = 512


@dataclass(frozen=True)
class Sizes:
    """A decoder's published sizes."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int


MODELS = {
    "llama70b": Sizes(80, 8192, 64, 8, 28672, 128256),  # Llama 3 70B (Meta, 2024)
    "llama33b": Sizes(60, 6656, 52, 52, 17920, 32000),  # LLaMA 33B (Touvron et al., 2023)
}


class Layer(nn.Module):
    """Normalise, attend to the past with rotated queries and keys, add; normalise, gated perceptron, add."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = s.heads, s.kv_heads, s.dim // s.heads
        self.norm1, self.norm2 = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
        self.q = nn.Linear(s.dim, s.dim, bias=False)
        self.k, self.v = (nn.Linear(s.dim, s.kv_heads * self.width, bias=False) for _ in range(2))
        self.out = nn.Linear(s.dim, s.dim, bias=False)
        self.gate, self.up = (nn.Linear(s.dim, s.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(s.hidden, s.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., self.width // 2 :], t[..., : self.width // 2]), -1) * sin for t in (q, k))
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Token embeddings, layers, the logits of the last token."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.word = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm, self.head = nn.RMSNorm(s.dim), nn.Linear(s.dim, s.vocab, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(LENGTH, s.dim // s.heads))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x[:, -1]))


def decoder(sizes: Sizes) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model without its weights, and one prompt."""
    with torch.device("meta"):
        return Decoder(sizes).to(torch.bfloat16).eval(), (torch.zeros(1, LENGTH, dtype=torch.int64),)


def all_rows(models: list[str], markets: list[str], splits: list[int]) -> Iterator[Row]:
    """Every case; a line on standard error for each model. With `splits` stages may run on teams of so many GPUs."""
    for name in models:
        model = from_torch(*decoder(MODELS[name]))
        prepared, candidates = candidates_of(model)
        table = time_table(candidates, every_market(markets).device_types(), None)
        took = f"{model.param_bytes / 2**30:.1f} GiB of weights, {len(candidates.kernels)} candidate kernels"
        sys.stderr.write(f"{name}: {took}, {time.process_time():.0f} s of CPU\n")
        for market in markets:
            study = study_with(prepared, candidates, table, Market.shipped(market).where(spot=False))
            study = with_teams(study, wishes_of(splits))
            for question in ("price", "time", "soon") if splits else ("price", "time"):
                yield from rows_of(study, name, market, question)
            sys.stderr.write(f"{name} on {market}, {time.process_time():.0f} s of CPU\n")


def main() -> int:
    """Print every case, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--markets", default="aws,gcp,lambda")
    parser.add_argument("--splits", default="", help="degrees of tensor split that stages may have: 2,4,8")
    args = parser.parse_args()
    splits = [int(n) for n in args.splits.split(",") if n]
    show(all_rows(args.models.split(","), args.markets.split(","), splits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
