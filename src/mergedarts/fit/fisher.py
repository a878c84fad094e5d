"""The Fisher metric at each site: which directions of a hidden state move the expert's predictions.

Knows one backward pass through the expert; knows nothing of corrections. To second order, an error e_t in the state at
a site costs KL = 1/2 sum_t e_t' G_t e_t with G_t the Fisher information of the response's tokens with respect to the
state (Amari 1998; its use as a metric for layer-wise fits is that of K-FAC, Martens & Grosse 2015).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..distributed import add_up, every, total
from ..features import Readout
from ..layerwise import LayerRunner
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet, TokenSequence
from ..store import FeatureStore
from .closed_form import product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Padded tokens in a batch of the backward pass, which keeps one layer's activations.
BATCH_TOKENS = 1024
#: The metric is estimated on one in so many of the fitted sequences, and on more where they predict fewer tokens.
ONE_IN, LEAST_TOKENS = 4, 400


@dataclass(frozen=True)
class Metric:
    """The Fisher metric of a site.

    Attributes:
        matrix: [d, d] float64, sum over all tokens of g g', a response token (by how many the KL is averaged).
        response: mean |g|^2 at positions that predict a response token.
        prompt: the same at the others, whose state matters through attention alone.
    """

    matrix: torch.Tensor
    response: float
    prompt: float


def metric_sequences(prompts: PromptSet, fitted: list[int], places: list[int] | None = None) -> list[int]:
    """The fitted sequences that a metric is estimated on: a quarter, or as many as predict 400 tokens, in any order.

    What all of them would add is in docs/fit.md. Sequences that predict a response come first. Of several processes,
    each is told which of its own are among them.

    Args:
        places: of each sequence, its place in the set of which these are a process's share.
    """

    def order(i: int) -> tuple[bool, bytes]:
        sequence = prompts.sequences[i]
        return not any(sequence.predicts), _digest(sequence)

    mine = {(*order(i), i if places is None else places[i]): i for i in fitted}
    whole = sorted(every([(key, sum(prompts.sequences[i].predicts)) for key, i in mine.items()]))
    chosen: list[int] = []
    tokens = 0
    for count, (key, predicted) in enumerate(whole):
        if ONE_IN * count >= len(whole) and tokens >= LEAST_TOKENS:
            break
        chosen += [mine[key]] if key in mine else []
        tokens += predicted
    return sorted(chosen)


class FisherPass:
    """One backward pass through the expert over some sequences, layer by layer from the states that the store holds.

    g_t is the gradient, with respect to the state after a layer at position t, of the summed log-likelihood of one
    token drawn at each position that predicts a response token from the expert's own prediction there. What is drawn
    depends on the seed and the sequence alone (and on how many equal ones stand before it), not on the order of others.
    Each layer is run again with gradients on the states after the one before it, so that one layer's activations of
    one batch are in memory, and not those of all layers.

    Args:
        prompts: a domain's sequences.
        chosen: indices of those to run on.
        layers: after which gradients are taken.
        store: has the states of all sequences after each layer from the first of these on; gets a file for each.
        name: its name, by layer.
    """

    def __init__(
        self,
        prompts: PromptSet,
        chosen: list[int],
        layers: list[int],
        store: FeatureStore,
        name: Callable[[int], str],
        seed: int,
        title: str,
    ) -> None:
        self._prompts, self._chosen, self._layers = prompts, chosen, layers
        self._store, self._name, self._title = store, name, title
        self._part = prompts.subset(chosen)
        self._predicts = [torch.tensor(s.predicts) for s in self._part.sequences]
        if total(sum(int(p.sum()) for p in self._predicts)) == 0:
            self._predicts = [torch.tensor([True] * (len(s) - 1) + [False]) for s in self._part.sequences]
        copies: Counter[TokenSequence] = Counter()
        self._uniform = []
        for s in self._part.sequences:
            self._uniform.append(_uniform(s, seed, copies[s]))
            copies[s] += 1

    def run(self, model: PreTrainedModel) -> None:
        """Take the gradients, last layer to first, and keep what each layer's metric is."""
        last, first = len(decoder_layers(model)) - 1, min(self._layers)
        runner = LayerRunner(model, self._part, start=(last + 1, self._states(last)), tokens=BATCH_TOKENS)
        readout = Readout(model)
        gradient = runner.pull_rest(lambda batch, final: self._final_gradient(readout, batch, final))
        here = torch.cat([torch.zeros(0, dtype=torch.bool), *self._predicts])
        with bar(self._title, self._part.tokens * (last - first)) as advance:
            for layer in range(last, first - 1, -1):
                if layer in self._layers:
                    sums = _Sums(gradient.shape[1])
                    for g, mine in zip(gradient.split(BATCH_TOKENS), here.split(BATCH_TOKENS), strict=True):
                        sums.add(g, mine)
                    self._store.save(self._name(layer), sums.tensors(self._predicts))
                if layer > first:
                    runner.depth, runner.states = layer, self._states(layer - 1)
                    for done in runner.pull(gradient):
                        advance(done)

    def _states(self, layer: int) -> torch.Tensor:
        """[n, d] the expert's states after a layer."""
        return self._store.rows(f"layer-{layer}", self._prompts, self._chosen)

    def _final_gradient(self, readout: Readout, batch: list[int], final: torch.Tensor) -> torch.Tensor:
        """[B, T, d] the score of the drawn tokens at those final states [B, T, d] that predict a response."""
        mask = _rows(batch, self._predicts, final.shape[1])
        uniform = _rows(batch, self._uniform, final.shape[1])[mask]
        mask = mask.to(final.device)
        gradient = torch.zeros_like(final)
        gradient[mask] = _score(readout, final[mask], uniform)
        return gradient


class _Sums:
    """A layer's gradients summed: their products, and their power at response and at other tokens."""

    def __init__(self, width: int) -> None:
        self._matrix = torch.zeros(width, width, dtype=torch.float64)
        self._power = torch.zeros(2, dtype=torch.float64)

    def add(self, gradient: torch.Tensor, here: torch.Tensor) -> None:
        """Gradients [n, d], and which are at positions that predict a response token."""
        # The sum in float64 over batches of what is summed in float32: a few thousand terms of like size.
        self._matrix += product(gradient, gradient)
        square = gradient.float().square().sum(-1).cpu().double()
        self._power += torch.stack([square[here].sum(), square[~here].sum()])

    def tensors(self, predicts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the store keeps them, given which positions of each sequence predict a response token."""
        response = sum(int(p.sum()) for p in predicts)
        counts = torch.tensor([response, sum(map(len, predicts)) - response], dtype=torch.float64)
        matrix, power, counts = add_up(self._matrix, self._power, counts)
        counts = counts.clamp(min=1)
        return {"matrix": (matrix / counts[0]).float(), "power": power / counts}


def _rows(batch: list[int], marks: list[torch.Tensor], length: int) -> torch.Tensor:
    """[B, length] marks of the sequences of a batch, zero where padded."""
    out = torch.zeros(len(batch), length, dtype=marks[0].dtype)
    for row, i in enumerate(batch):
        out[row, : len(marks[i])] = marks[i]
    return out


def load_metric(store: FeatureStore, name: str) -> Metric:
    """What a `FisherPass` kept of a layer."""
    tensors = store.load(name)
    response, prompt = tensors["power"].tolist()
    return Metric(tensors["matrix"].double(), response, prompt)


def head_metric(readout: Readout, states: torch.Tensor, samples: int = 4, seed: int = 0) -> torch.Tensor:
    """[d, d] float64 Fisher metric of final states [n, d]: the mean of W' (diag p - p p') W, by drawn tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(states.shape[1], states.shape[1], dtype=torch.float64)
    for _ in range(samples):
        g = _score(readout, states, torch.rand(len(states), dtype=torch.float64, generator=generator)).float()
        total += product(g, g)
    return total / (samples * max(1, len(states)))


def _digest(sequence: TokenSequence) -> bytes:
    return hashlib.sha256(repr(sequence.ids).encode()).digest()


def _uniform(sequence: TokenSequence, seed: int, copy: int) -> torch.Tensor:
    """[T] numbers in [0, 1) that a sequence's own tokens, a seed and the number of a copy determine."""
    own = _digest(sequence)
    return torch.from_numpy(np.random.default_rng([seed, copy, *own[:8]]).random(len(sequence)))


def _score(readout: Readout, states: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Gradient of log p(y | state) at one y for each state [n, d], drawn by uniform numbers [n]; chunk by chunk."""
    out = torch.empty_like(states)
    for part, mine, at in zip(*(t.split(readout.chunk) for t in (states, out, uniform)), strict=True):
        with torch.enable_grad():
            h = part.detach().requires_grad_()
            logits = readout.logits(h)
        p = logits.detach().softmax(-1)
        below = p.cpu().cumsum(-1, dtype=torch.float64)
        drawn = torch.searchsorted(below, at[:, None] * below[:, -1:], right=True).clamp(max=below.shape[-1] - 1)
        # The gradient of log p(y) with respect to the logits.
        pull = p.neg_().scatter_add_(-1, drawn.to(p.device), torch.ones_like(p[:, :1]))
        mine.copy_(torch.autograd.grad(logits, h, pull)[0])
    return out
