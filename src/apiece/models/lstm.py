"""A character model of long short-term memory: an embedding, LSTM layers and a score per character and place.

The sizes of TensorFlow Federated's Shakespeare examples (Reddi et al. 2021): embedding 8, two layers of 256.
Departure: PyTorch's LSTM has two biases where Keras has one; their sum is what counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """`torch.nn.LSTM(..., batch_first=True)` by its parameters and outputs, in products that vmap batches."""

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        for layer in range(layers):
            shapes = {"weight_ih": (inputs if layer == 0 else hidden,), "weight_hh": (hidden,)}
            for name, more in {**shapes, "bias_ih": (), "bias_hh": ()}.items():
                bound = 1.0 / math.sqrt(hidden)
                values = torch.empty(4 * hidden, *more).uniform_(-bound, bound)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            x = self._layer(x, layer)
        return x

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        to_input, to_hidden, bias_ih, bias_hh = (getattr(self, f"{name}_l{layer}") for name in names)
        incoming = x @ to_input.T + (bias_ih + bias_hh)
        h = c = torch.zeros(x.shape[0], self.hidden, dtype=x.dtype, device=x.device)
        states = []
        # The gradient of an index would be as long as all places, at every place.
        for each in incoming.unbind(1):
            i, f, g, o = (each + h @ to_hidden.T).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1)


class CharacterLSTM(nn.Module):
    def __init__(self, characters: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters + 1, embedding)  # 0 stands before the text
        self.lstm = LSTM(embedding, hidden, layers)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embedding(x.long())))
        return scores


def lstm(classes: int, embedding: int = 8, hidden: int = 256, layers: int = 2) -> nn.Module:
    """Scores of shape (n, length, classes) for sequences of characters, counted from 1."""
    for name, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return CharacterLSTM(classes, embedding, hidden, layers)
