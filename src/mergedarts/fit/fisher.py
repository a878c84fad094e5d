"""The Fisher metric at each site: which directions of a hidden state move the expert's predictions.

Knows one backward pass through the expert; knows nothing of corrections. To second order, an error e_t in the state at
a site costs KL = 1/2 sum_t e_t' G_t e_t with G_t the Fisher information of the response's tokens with respect to the
state (Amari 1998; its use as a metric for layer-wise fits is that of K-FAC, Martens & Grosse 2015).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..distributed import add_up, every, size, total
from ..features import Readout, batches, check_finite, hooked, padded, state_of, stopping_before
from ..layerwise import LayerRunner
from ..memory import by_halves
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet, TokenSequence
from ..store import FeatureStore
from ..streaming import is_streamed
from .closed_form import product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Padded tokens in a batch of the backward pass, which keeps every layer's activations.
BATCH_TOKENS = 256
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
    """One forward and one backward pass through the expert over some sequences.

    g_t is the gradient, with respect to the state after a layer at position t, of the summed log-likelihood of one
    token drawn at each position that predicts a response token from the expert's own prediction there. What is drawn
    depends on the seed and the sequence alone (and on how many equal ones stand before it), not on the order of others.

    Args:
        prompts: a domain's sequences, whose states the store has where the expert is streamed.
        chosen: indices of those to run on.
        layers: after which gradients are taken.
        store: where a file for each layer is kept.
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
        self.chosen = chosen
        self._prompts, self._layers, self._store, self._name, self._title = prompts, layers, store, name, title
        self._part = prompts.subset(chosen)
        self._predicts = [torch.tensor(s.predicts) for s in self._part.sequences]
        if total(sum(int(p.sum()) for p in self._predicts)) == 0:
            self._predicts = [torch.tensor([True] * (len(s) - 1) + [False]) for s in self._part.sequences]
        copies: Counter[TokenSequence] = Counter()
        self._uniform = []
        for s in self._part.sequences:
            self._uniform.append(_uniform(s, seed, copies[s]))
            copies[s] += 1
        self._sums: dict[int, _Sums] = {}

    def run(self, model: PreTrainedModel) -> None:
        """Take the gradients, and keep what the layers' metrics are."""
        if not is_streamed(model):
            self.resident(model)
            if self.pending:
                self.keep()
            return
        for layer in self._streamed(model):
            self._keep(layer)

    @property
    def pending(self) -> bool:
        """Whether `resident` has summed what the store does not hold yet."""
        return bool(self._sums)

    def keep(self) -> None:
        """Put into the store what `resident` summed, over all processes."""
        for layer in self._layers:
            self._keep(layer)

    def _keep(self, layer: int) -> None:
        self._store.save(self._name(layer), self._sums.pop(layer).tensors(self._predicts))

    def resident(
        self,
        model: PreTrainedModel,
        begin: Callable[[list[int]], None] = lambda batch: None,
        take: Callable[[list[int], torch.Tensor], None] = lambda batch, state: None,
    ) -> None:
        """All layers' sums in one pass over the batches; one of several processes keeps nothing yet.

        Args:
            begin, take: called before and after each batch with its sequences' indices, and their final states.
        """
        part = self._part
        self._sums = {i: _Sums(model.get_output_embeddings().weight.shape[1]) for i in self._layers}
        device = next(model.parameters()).device
        named = decoder_layers(model)
        readout = Readout(model)
        states: dict[int, torch.Tensor] = {}
        hooks: list[Any] = [
            model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.detach().requires_grad_()),
            *(
                named[i][1].register_forward_hook(lambda m, args, out, i=i: states.__setitem__(i, state_of(out)))
                for i in self._layers
            ),
        ]

        def run(batch: list[int]) -> tuple[torch.Tensor, ...]:
            begin([self.chosen[i] for i in batch])
            try:
                with stopping_before(model.get_output_embeddings()) as caught:
                    model(input_ids=padded(part, batch, device), use_cache=False)
                final = caught.pop()
                gradient = self._final_gradient(readout, batch, final.detach())
                return final.detach(), *torch.autograd.grad(final, [states[i] for i in self._layers], gradient)
            finally:  # they hold the graph, and with it every layer's activations
                states.clear()

        ones = [torch.ones_like(p) for p in self._predicts]
        with hooked(*hooks), bar(self._title, part.tokens) as advance, torch.enable_grad():
            for batch, (final, *taken) in by_halves(batches(part, BATCH_TOKENS), run, part.length, self._title):
                check_finite(final, self._title)
                take([self.chosen[i] for i in batch], final)
                mask, real = _rows(batch, self._predicts, final.shape[1]), _rows(batch, ones, final.shape[1])
                for layer, g in zip(self._layers, taken, strict=True):
                    self._sums[layer].add(g[real.to(device)], mask[real])
                advance(int(real.sum()))
        if size() == 1:  # at once, while whoever waits for the features still waits
            self.keep()

    def _streamed(self, model: PreTrainedModel) -> Iterator[int]:
        """The same layer by layer, last to first, each run again on the states that the store holds of the one before.

        Yields each layer whose sums are whole.
        """

        def states_after(layer: int) -> torch.Tensor:
            return self._store.rows(f"layer-{layer}", self._prompts, self.chosen)

        last, first = len(decoder_layers(model)) - 1, min(self._layers)
        runner = LayerRunner(model, self._part, start=(last + 1, states_after(last)), tokens=BATCH_TOKENS)
        readout = Readout(model)
        gradient = runner.pull_rest(lambda batch, final: self._final_gradient(readout, batch, final))
        here = torch.cat([torch.zeros(0, dtype=torch.bool), *self._predicts])
        with bar(self._title, self._part.tokens * (last - first)) as advance:
            for layer in range(last, first - 1, -1):
                if layer in self._layers:
                    self._sums[layer] = _Sums(gradient.shape[1])
                    for g, mine in zip(gradient.split(BATCH_TOKENS), here.split(BATCH_TOKENS), strict=True):
                        self._sums[layer].add(g, mine)
                    yield layer
                if layer > first:
                    runner.depth, runner.states = layer, states_after(layer - 1)
                    for done in runner.pull(gradient):
                        advance(done)

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
