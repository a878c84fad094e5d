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

from ..distributed import add_up, every, total
from ..features import Readout, batches, hooked, padded, state_of
from ..layerwise import LayerRunner
from ..memory import by_halves
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet, TokenSequence
from ..store import FeatureStore
from ..streaming import is_streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Padded tokens in a batch of the backward pass, which keeps every layer's activations.
BATCH_TOKENS = 512
#: The metric is estimated on one in so many of the fitted sequences, and on more where they predict fewer tokens.
ONE_IN, LEAST_TOKENS = 4, 800


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
    """The fitted sequences that a metric is estimated on: a quarter, or as many as predict 800 tokens, in any order.

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


def collect_fisher(
    model: PreTrainedModel,
    prompts: PromptSet,
    chosen: list[int],
    layers: list[int],
    store: FeatureStore,
    name: Callable[[int], str],
    seed: int,
    title: str,
) -> None:
    """One forward and one backward pass through the expert over some sequences; a file in the store for each layer.

    g_t is the gradient, with respect to the state after a layer at position t, of the summed log-likelihood of one
    token drawn at each position that predicts a response token from the expert's own prediction there. What is drawn
    depends on the seed and the sequence alone (and on how many equal ones stand before it), not on the order of others.
    """
    part = prompts.subset(chosen)
    predicts = [torch.tensor(s.predicts) for s in part.sequences]
    if total(sum(int(p.sum()) for p in predicts)) == 0:
        predicts = [torch.tensor([True] * (len(s) - 1) + [False]) for s in part.sequences]
    copies: Counter[TokenSequence] = Counter()
    uniform = []
    for s in part.sequences:
        uniform.append(_uniform(s, seed, copies[s]))
        copies[s] += 1
    run = _streamed if is_streamed(model) else _resident

    def states_after(layer: int) -> torch.Tensor:
        return store.rows(f"layer-{layer}", prompts, chosen)

    for layer, sums in run(model, part, predicts, uniform, layers, states_after, title):
        store.save(name(layer), sums.tensors(predicts))


class _Sums:
    """A layer's gradients summed: their products, and their power at response and at other tokens."""

    def __init__(self, width: int) -> None:
        self._matrix = torch.zeros(width, width, dtype=torch.float64)
        self._power = torch.zeros(2, dtype=torch.float64)

    def add(self, gradient: torch.Tensor, here: torch.Tensor) -> None:
        """Gradients [n, d], and which are at positions that predict a response token."""
        flat = gradient.float()
        # The sum over response tokens in float64 of products in float32: a few thousand terms of like size.
        self._matrix += (flat.T @ flat).double().cpu()
        square = flat.square().sum(-1).double().cpu()
        self._power += torch.stack([square[here].sum(), square[~here].sum()])

    def tensors(self, predicts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the store keeps them, given which positions of each sequence predict a response token."""
        response = sum(int(p.sum()) for p in predicts)
        counts = torch.tensor([response, sum(map(len, predicts)) - response], dtype=torch.float64)
        matrix, power, counts = add_up(self._matrix, self._power, counts)
        counts = counts.clamp(min=1)
        return {"matrix": (matrix / counts[0]).float(), "power": power / counts}


def _resident(
    model: PreTrainedModel,
    part: PromptSet,
    predicts: list[torch.Tensor],
    uniform: list[torch.Tensor],
    layers: list[int],
    states_after: Callable[[int], torch.Tensor],
    title: str,
) -> Iterator[tuple[int, _Sums]]:
    """All layers' sums in one pass over the batches."""
    sums = {i: _Sums(model.get_output_embeddings().weight.shape[1]) for i in layers}
    device = next(model.parameters()).device
    named = decoder_layers(model)
    readout = Readout(model)
    states: dict[int, torch.Tensor] = {}
    final: list[torch.Tensor] = []
    hooks: list[Any] = [
        model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.detach().requires_grad_()),
        *(
            named[i][1].register_forward_hook(lambda m, args, out, i=i: states.__setitem__(i, state_of(out)))
            for i in sums
        ),
        model.get_decoder().register_forward_hook(lambda m, i, o: final.append(o[0])),
    ]

    def run(batch: list[int]) -> tuple[torch.Tensor, ...]:
        try:
            model.get_decoder()(input_ids=padded(part, batch, device), use_cache=False)
            state = final.pop()
            gradient = _final_gradient(readout, batch, state.detach(), predicts, uniform)
            return torch.autograd.grad(state, [states[i] for i in sums], gradient)
        finally:  # they hold the graph, and with it every layer's activations
            states.clear()
            final.clear()

    with hooked(*hooks), bar(title, part.tokens) as advance, torch.enable_grad():
        for batch, taken in by_halves(batches(part, BATCH_TOKENS), run, part.length, title):
            mask = _rows(batch, predicts, taken[0].shape[1])
            real = _rows(batch, [torch.ones_like(p) for p in predicts], taken[0].shape[1])
            for layer, g in zip(sums.values(), taken, strict=True):
                layer.add(g[real.to(device)], mask[real])
            advance(int(real.sum()))
    yield from sums.items()


def _streamed(
    model: PreTrainedModel,
    part: PromptSet,
    predicts: list[torch.Tensor],
    uniform: list[torch.Tensor],
    layers: list[int],
    states_after: Callable[[int], torch.Tensor],
    title: str,
) -> Iterator[tuple[int, _Sums]]:
    """The same layer by layer, last to first, each run again on the states that the store holds of the one before."""
    last, first = len(decoder_layers(model)) - 1, min(layers)
    runner = LayerRunner(model, part, start=(last + 1, states_after(last)), tokens=BATCH_TOKENS)
    readout = Readout(model)
    gradient = runner.pull_rest(lambda batch, final: _final_gradient(readout, batch, final, predicts, uniform))
    here = torch.cat([torch.zeros(0, dtype=torch.bool), *predicts])
    with bar(title, part.tokens * (last - first)) as advance:
        for layer in range(last, first - 1, -1):
            if layer in layers:
                sums = _Sums(gradient.shape[1])
                for g, mine in zip(gradient.split(BATCH_TOKENS), here.split(BATCH_TOKENS), strict=True):
                    sums.add(g, mine)
                yield layer, sums
            if layer > first:
                runner.depth, runner.states = layer, states_after(layer - 1)
                for done in runner.pull(gradient):
                    advance(done)


def _rows(batch: list[int], marks: list[torch.Tensor], length: int) -> torch.Tensor:
    """[B, length] marks of the sequences of a batch, zero where padded."""
    out = torch.zeros(len(batch), length, dtype=marks[0].dtype)
    for row, i in enumerate(batch):
        out[row, : len(marks[i])] = marks[i]
    return out


def _final_gradient(
    readout: Readout, batch: list[int], final: torch.Tensor, predicts: list[torch.Tensor], uniform: list[torch.Tensor]
) -> torch.Tensor:
    """[B, T, d] the score of the drawn tokens at the positions of final states [B, T, d] that predict a response."""
    mask = _rows(batch, predicts, final.shape[1])
    gradient = torch.zeros_like(final)
    gradient[mask.to(final.device)] = _score(
        readout, final[mask.to(final.device)], _rows(batch, uniform, final.shape[1])[mask]
    )
    return gradient


def load_metric(store: FeatureStore, name: str) -> Metric:
    """What `collect_fisher` wrote for a layer."""
    tensors = store.load(name)
    response, prompt = tensors["power"].tolist()
    return Metric(tensors["matrix"].double(), response, prompt)


def head_metric(readout: Readout, states: torch.Tensor, samples: int = 4, seed: int = 0) -> torch.Tensor:
    """[d, d] float64 Fisher metric of final states [n, d]: the mean of W' (diag p - p p') W, by drawn tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(states.shape[1], states.shape[1], dtype=torch.float64)
    for _ in range(samples):
        g = _score(readout, states, torch.rand(len(states), dtype=torch.float64, generator=generator)).float()
        total += (g.T @ g).double().cpu()
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
    for start in range(0, len(states), readout.chunk):
        with torch.enable_grad():
            h = states[start : start + readout.chunk].detach().requires_grad_()
            log_p = readout.logits(h).log_softmax(-1)
            below = log_p.detach().cpu().double().exp().cumsum(-1)
            at = uniform[start : start + readout.chunk, None] * below[:, -1:]
            drawn = torch.searchsorted(below, at, right=True).clamp(max=below.shape[-1] - 1).to(h.device)
            (out[start : start + readout.chunk],) = torch.autograd.grad(log_p.gather(-1, drawn).sum(), h)
    return out
