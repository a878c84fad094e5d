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
from .closed_form import BLOCK, products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Padded tokens in a batch of the backward pass, which keeps one layer's activations.
BATCH_TOKENS = 1024
#: The metric is estimated on one in so many of the fitted sequences, on fewer where they predict so many tokens a
#: dimension of the state, and on more where they predict fewer tokens than the least.
ONE_IN, TOKENS_A_DIMENSION, LEAST_TOKENS = 4, 0.7, 400
#: A gradient counts for no more than so many times the root mean square of its kind (response tokens, or the others): a
#: few tokens, often the first, have gradients that would outweigh those of all the rest.
LONGEST = 2.0


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


def metric_sequences(prompts: PromptSet, fitted: list[int], width: int, places: list[int] | None = None) -> list[int]:
    """The fitted sequences that a metric of states of some width is estimated on, in any order.

    A quarter, or fewer if they predict 0.7 tokens a dimension, or as many more as it takes for 400 tokens. What more
    would add is in docs/fit.md. Sequences that predict a response come first; where none does, all tokens count. Of
    several processes, each is told which of its own are among them.

    Args:
        places: of each sequence, its place in the set of which these are a process's share.
    """

    def order(i: int) -> tuple[bool, bytes]:
        sequence = prompts.sequences[i]
        return not any(sequence.predicts), _digest(sequence)

    mine = {(*order(i), i if places is None else places[i]): i for i in fitted}
    rows = [(key, sum(prompts.sequences[i].predicts), len(prompts.sequences[i]) - 1) for key, i in mine.items()]
    whole = sorted(every(rows))
    answered = any(predicted for _, predicted, _ in whole)
    chosen: list[int] = []
    tokens = 0
    for count, (key, predicted, length) in enumerate(whole):
        if tokens >= LEAST_TOKENS and (ONE_IN * count >= len(whole) or tokens >= TOKENS_A_DIMENSION * width):
            break
        chosen += [mine[key]] if key in mine else []
        tokens += predicted if answered else length
    return sorted(chosen)


class FisherPass:
    """One backward pass through the expert over some sequences, layer by layer from the states that the store holds.

    g_t is the gradient, with respect to the state after a layer at position t, of the sum over the positions that
    predict a response token of a random combination of logits, whose covariance is that of the score of a token drawn
    from the expert's own prediction (`_pulled`). The signs in it depend on the seed and the sequence alone (and on how
    many equal ones stand before it), not on the order of others.
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
        self._seeds = []
        for s in self._part.sequences:
            self._seeds.append([seed, copies[s], *_digest(s)[:8]])
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
                    self._store.save(self._name(layer), _sums(gradient, here))
                if layer > first:
                    runner.depth, runner.states = layer, self._states(layer - 1)
                    for done in runner.pull(gradient):
                        advance(done)

    def _states(self, layer: int) -> torch.Tensor:
        """[n, d] the expert's states after a layer."""
        return self._store.rows(f"layer-{layer}", self._prompts, self._chosen)

    def _final_gradient(self, readout: Readout, batch: list[int], final: torch.Tensor) -> torch.Tensor:
        """[B, T, d] the gradient at those final states [B, T, d] that predict a response, zero at the others."""
        gradient = torch.zeros_like(final)
        for row, i in enumerate(batch):
            where = self._predicts[i].nonzero()[:, 0].to(final.device)
            if len(where):
                signs = np.random.default_rng(self._seeds[i])
                gradient[row, where] = _pulled(readout, final[row, where], signs)
        return gradient


def _sums(gradient: torch.Tensor, here: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer's gradients [n, d] as the store keeps them, given which are at positions that predict a response token.

    The sums are over all processes. A gradient longer than `LONGEST` allows is shortened to that.
    """
    size = gradient.float().norm(dim=-1).cpu().double()

    def power() -> torch.Tensor:
        return add_up(torch.stack([size[here].square().sum(), size[~here].square().sum()]))[0]

    counts = add_up(torch.stack([here.sum(), (~here).sum()]).double())[0].clamp(min=1)
    longest = LONGEST * (power() / counts).sqrt()
    kept = (torch.where(here, longest[0], longest[1]) / size.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
    size *= kept
    matrix = torch.zeros(gradient.shape[1], gradient.shape[1], dtype=torch.float64)
    # The sum in float64 over batches of what is summed in float32: a few thousand terms of like size.
    for part, share in zip(gradient.split(BLOCK), kept.split(BLOCK), strict=True):
        matrix += products(part.float() * share.float().to(part.device)[:, None])[0]
    return {"matrix": (add_up(matrix)[0] / counts[0]).float(), "power": power() / counts}


def load_metric(store: FeatureStore, name: str) -> Metric:
    """What a `FisherPass` kept of a layer."""
    tensors = store.load(name)
    response, prompt = tensors["power"].tolist()
    return Metric(tensors["matrix"].double(), response, prompt)


def head_metric(readout: Readout, states: torch.Tensor, samples: int = 4, seed: int = 0) -> torch.Tensor:
    """[d, d] float64 Fisher metric of final states [n, d]: the mean of W' (diag p - p p') W, by random signs."""
    signs = np.random.default_rng(seed)
    total = torch.zeros(states.shape[1], states.shape[1], dtype=torch.float64)
    for _ in range(samples):
        g = _pulled(readout, states, signs).float()
        total += products(g)[0]
    return total / (samples * max(1, len(states)))


def _digest(sequence: TokenSequence) -> bytes:
    return hashlib.sha256(repr(sequence.ids).encode()).digest()


def _pulled(readout: Readout, states: torch.Tensor, signs: np.random.Generator) -> torch.Tensor:
    """[n, d] gradients at states [n, d] of v'z, z a state's logits and v = s - p (1's) for s = sqrt(p) of random signs.

    The covariance of v is diag p - p p', that of the score of a drawn token with respect to the logits; but where a
    drawn token has one direction, often that of the likeliest token alone, this has a share of all of them (the
    factor is that of Martens, Sutskever & Swersky 2012, section 4).
    """
    out = torch.empty_like(states)
    for part, mine in zip(states.split(readout.chunk), out.split(readout.chunk), strict=True):
        with torch.enable_grad():
            h = part.detach().requires_grad_()
            logits = readout.logits(h)
        p = logits.detach().softmax(-1)
        size = p.shape[-1]
        drawn = np.frombuffer(signs.bytes(len(p) * 4 * -(-size // 32)), np.uint8).reshape(len(p), -1)
        up = torch.from_numpy(np.unpackbits(drawn, axis=1, count=size)).to(p.device)
        s = p.sqrt() * (2.0 * up - 1.0)
        pull = s - p * s.sum(-1, keepdim=True)
        mine.copy_(torch.autograd.grad(logits, h, pull)[0])
    return out
