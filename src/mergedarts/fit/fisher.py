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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..features import Readout, batches, hooked, padded, state_of
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet, TokenSequence
from ..store import FeatureStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Padded tokens in a batch of the backward pass, which keeps every layer's activations.
BATCH_TOKENS = 512


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
    width = model.get_output_embeddings().weight.shape[1]
    device = next(model.parameters()).device
    predicts = [torch.tensor(s.predicts) for s in part.sequences]
    if not any(p.any() for p in predicts):
        predicts = [torch.tensor([True] * (len(s) - 1) + [False]) for s in part.sequences]
    matrix = {i: torch.zeros(width, width, dtype=torch.float64) for i in layers}
    power = {i: torch.zeros(2, dtype=torch.float64) for i in layers}
    counts = torch.zeros(2, dtype=torch.float64)
    named = decoder_layers(model)
    readout = Readout(model)
    copies: Counter[TokenSequence] = Counter()
    uniform = []
    for s in part.sequences:
        uniform.append(_uniform(s, seed, copies[s]))
        copies[s] += 1
    states: dict[int, torch.Tensor] = {}
    final: list[torch.Tensor] = []
    hooks: list[Any] = [
        model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.detach().requires_grad_()),
        *(
            named[i][1].register_forward_hook(lambda m, args, out, i=i: states.__setitem__(i, state_of(out)))
            for i in layers
        ),
        model.get_decoder().register_forward_hook(lambda m, i, o: final.append(o[0])),
    ]
    with hooked(*hooks), bar(title, part.tokens) as advance, torch.enable_grad():
        for batch in batches(part, BATCH_TOKENS):
            ids = padded(part, batch, device)
            model.get_decoder()(input_ids=ids, use_cache=False)
            mask = torch.zeros(ids.shape, dtype=torch.bool)
            real = torch.zeros(ids.shape, dtype=torch.bool)
            drawn = torch.zeros(ids.shape, dtype=torch.float64)
            for row, i in enumerate(batch):
                drawn[row, : len(part.sequences[i])] = uniform[i]
                mask[row, : len(part.sequences[i])] = predicts[i]
                real[row, : len(part.sequences[i])] = True
            mask_d = mask.to(device)
            state = final.pop()
            gradient = torch.zeros_like(state)
            gradient[mask_d] = _score(readout, state.detach()[mask_d], drawn[mask])
            taken = torch.autograd.grad(state, [states[i] for i in layers], gradient)
            for i, g in zip(layers, taken, strict=True):
                flat = g[real.to(device)].float()
                # The sum over response tokens in float64 of products in float32: a few thousand terms of like size.
                matrix[i] += (flat.T @ flat).double().cpu()
                square = flat.square().sum(-1).double().cpu()
                here = mask[real]
                power[i] += torch.stack([square[here].sum(), square[~here].sum()])
            counts += torch.tensor([float(mask.sum()), float((real & ~mask).sum())])
            states.clear()
            advance(int(real.sum()))
    for i in layers:
        means = power[i] / counts.clamp(min=1)
        store.save(name(i), {"matrix": (matrix[i] / counts[0].clamp(min=1)).float(), "power": means})


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


def _uniform(sequence: TokenSequence, seed: int, copy: int) -> torch.Tensor:
    """[T] numbers in [0, 1) that a sequence's own tokens, a seed and the number of a copy determine."""
    own = hashlib.sha256(repr(sequence.ids).encode()).digest()
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
