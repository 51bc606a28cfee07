"""A translation model of LSTM cells with attention, unrolled over fixed lengths, after GNMT (Wu et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Cell(nn.Module):
    """One step of an LSTM: gates from the input and the last output."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.x, self.h, self.dim = nn.Linear(in_dim, 4 * dim), nn.Linear(dim, 4 * dim, bias=False), dim

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = (self.x(x) + self.h(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


def _run(cell: Cell, steps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    h = c = steps[0].new_zeros(steps[0].shape[0], cell.dim)
    outputs = []
    for x in steps:
        h, c = cell(x, h, c)
        outputs.append(h)
    return outputs


class Translator(nn.Module):
    """Bidirectional first encoder layer, then one-way layers with residuals; a decoder that attends at each step."""

    def __init__(self, vocab: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.forward_cell, self.backward_cell = Cell(dim, dim), Cell(dim, dim)
        self.encoder = nn.ModuleList(Cell(2 * dim if i == 0 else dim, dim) for i in range(layers - 1))
        self.first = Cell(2 * dim, dim)
        self.decoder = nn.ModuleList(Cell(dim, dim) for _ in range(layers - 1))
        self.out = nn.Linear(dim, vocab)

    def _encode(self, tokens: torch.Tensor) -> torch.Tensor:
        steps = list(self.embedding(tokens).unbind(1))
        ahead, back = _run(self.forward_cell, steps), _run(self.backward_cell, steps[::-1])[::-1]
        steps = [torch.cat(pair, -1) for pair in zip(ahead, back, strict=True)]
        for i, cell in enumerate(self.encoder):
            outputs = _run(cell, steps)
            steps = outputs if i == 0 else [a + b for a, b in zip(outputs, steps, strict=True)]
        return torch.stack(steps, 1)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self._encode(source)
        zero = memory.new_zeros(memory.shape[0], memory.shape[2])
        states = [(zero, zero)] * (1 + len(self.decoder))
        logits = []
        for x in self.embedding(target).unbind(1):
            weights = torch.softmax((memory @ states[0][0].unsqueeze(2)).squeeze(2), -1)
            context = (weights.unsqueeze(1) @ memory).squeeze(1)
            h, c = self.first(torch.cat([x, context], -1), *states[0])
            new = [(h, c)]
            for cell, (last_h, last_c) in zip(self.decoder, states[1:], strict=True):
                h, c = cell(h, last_h, last_c)
                new.append((h, c))
            states = new
            logits.append(self.out(h))
        return torch.stack(logits, 1)


def lstm(
    *,
    batch: int = 8,
    source_length: int = 16,
    target_length: int = 16,
    vocab: int = 32_000,
    dim: int = 1024,
    layers: int = 4,
    seed: int = 0,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The translator at half of GNMT's depth; the inputs are source and target token ids, (batch, length) int64."""
    torch.manual_seed(seed)
    model = Translator(vocab, dim, layers)
    source = torch.randint(0, vocab, (batch, source_length))
    return model.eval(), (source, torch.randint(0, vocab, (batch, target_length)))
