"""Fits the router in closed form on prompts of every domain, and chooses at which depth it reads.

Knows prompts, their mean states and the algebra in float64; how a router is used is in `router` and `runtime`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..features import final_states, hooked, padded, state_of
from ..files import digest_text
from ..models import decoder_layers
from ..prompts import PromptSet, TokenSequence
from ..router import Router, choice, content, distances_to, mean_state
from ..store import FeatureStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDS = 5
#: Share of the folds' own prompts that the limit on the distance lets pass.
QUANTILE = 0.99
#: Accuracy on the folds that a cheaper reading may lose against the best.
TOLERANCE = 0.01
#: Accuracy on the folds at which no deeper reading is tried.
ENOUGH = 0.98


def prompt_part(sequence: TokenSequence) -> TokenSequence:
    """What a model is given before it writes the last response; the whole where there is none."""
    marks = sequence.predicts
    if not any(marks):
        return sequence
    start = len(marks) - 1 - marks[::-1].index(True)
    while start and marks[start - 1]:
        start -= 1
    return TokenSequence(sequence.ids[: start + 1], (False,) * (start + 1))


@dataclass(frozen=True)
class Template:
    """Token ids that all prompts of all domains begin and end with: what a chat template puts around them."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @classmethod
    def of(cls, prompts: list[tuple[int, ...]]) -> Template:
        """The longest of some prompts' ids; the suffix takes nothing of the prefix."""
        prefix = _common(prompts)
        rest = [ids[len(prefix) :][::-1] for ids in prompts]
        return cls(prefix, _common(rest)[::-1])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"prefix": torch.tensor(self.prefix).long(), "suffix": torch.tensor(self.suffix).long()}


def _common(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    count = 0
    while rows and all(len(row) > count and row[count] == rows[0][count] for row in rows):
        count += 1
    return rows[0][:count]


def prompt_means(
    model: PreTrainedModel,
    prompts: PromptSet,
    template: Template,
    store: FeatureStore,
    depths: tuple[int, ...],
    title: str,
) -> torch.Tensor:
    """[N, depths, d] float32 mean state of each prompt after so many layers, by way of the store.

    The model runs to the deepest of them.

    Args:
        model: the merged model, uncorrected.
        prompts: the parts of the sequences that come before the last response.
        depths: 0 is before the first layer.
    """
    name = f"prompt-means-{digest_text(repr((template, depths)))[:12]}"
    with store.making(name) as missing:
        if missing:
            store.save(name, {"means": _prompt_means(model, prompts, template, depths, title)})
    return store.load(name)["means"]


def _prompt_means(
    model: PreTrainedModel, prompts: PromptSet, template: Template, depths: tuple[int, ...], title: str
) -> torch.Tensor:
    layers = [layer for _, layer in decoder_layers(model)]
    out = torch.empty(len(prompts.sequences), len(depths), model.get_output_embeddings().weight.shape[1])
    current: list[int] = []
    counted = torch.empty(0, dtype=torch.bool)

    def begin(batch: list[int]) -> None:
        nonlocal counted
        current[:] = batch
        lengths = torch.tensor([len(prompts.sequences[i]) for i in batch])
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        counted = content(padded(prompts, batch, lengths.device), real, list(template.prefix), list(template.suffix))

    def keep(place: int, states: torch.Tensor) -> None:
        if current:  # not in a trial run
            out[current, place] = mean_state(states, counted).cpu()

    def enter(place: int) -> Any:
        return lambda module, args, kwargs: keep(place, args[0] if args else kwargs["hidden_states"])

    def leave(place: int) -> Any:
        return lambda module, args, output: keep(place, state_of(output))

    hooks = [
        layers[depth - 1].register_forward_hook(leave(place))
        if depth
        else layers[0].register_forward_pre_hook(enter(place), with_kwargs=True)
        for place, depth in enumerate(depths)
    ]
    # One layer at least, since a first layer that never runs is never entered by a streamed model.
    needed = max(1, *depths)
    with hooked(*hooks):
        final_states(model, prompts, lambda batch, state: None, title, begin, needed if needed < len(layers) else None)
    return out


@dataclass(frozen=True)
class Fitted:
    """A router, and the class [N] that routers fitted without a prompt's fold choose for it (-1: unsure)."""

    router: Router
    chosen: torch.Tensor

    def accuracy(self, labels: torch.Tensor) -> float:
        return float((self.chosen == labels).double().mean())


def fit_router(x: torch.Tensor, labels: torch.Tensor, domains: list[str], depth: int, template: Template) -> Fitted:
    """Fit a router in closed form, in float64.

    The covariance within classes is shrunk to a multiple of the identity by the rule of Ledoit and Wolf; a temperature
    t <= 1 makes the probabilities true on held-out folds, and the limit on the distance is what nearly all their
    prompts keep to.

    Args:
        x: [N, d] mean states of prompts.
        labels: [N] index of each prompt's domain; each domain needs `FOLDS` prompts or more.
        depth: where the states were read.
    """
    x = x.double()
    fold = torch.zeros_like(labels)
    for k in range(len(domains)):
        mine = labels == k
        fold[mine] = torch.arange(int(mine.sum())) % FOLDS
    distances = torch.empty(len(x), len(domains), dtype=torch.float64)
    for i in range(FOLDS):
        held = fold == i
        distances[held] = distances_to(x[held], _discriminant(x[~held], labels[~held], len(domains)))
    tensors = _discriminant(x, labels, len(domains))
    tensors["levels"][1] = _temperature(distances, labels)
    tensors["levels"][2] = torch.quantile(distances.gather(1, labels[:, None]), QUANTILE)
    return Fitted(Router(domains, depth, tensors | template.tensors()), choice(distances, tensors["levels"]))


def depth_groups(layers: int, free: int) -> list[tuple[int, ...]]:
    """The depths to try, those up to a quarter of the layers first, and the others only if need be."""
    quarter = max(1, round(layers / 4))
    near = tuple(sorted({0, min(free, 1), quarter}))
    far = tuple(sorted({round(layers * i / 4) for i in range(2, 5)} - set(near)))
    return [near, far] if far else [near]


def choose_depth(
    means: Callable[[tuple[int, ...]], torch.Tensor],
    labels: torch.Tensor,
    domains: list[str],
    groups: list[tuple[int, ...]],
    free: int,
    template: Template,
) -> tuple[Fitted, dict[int, float]]:
    """The router of the depth to read at, and the accuracy on the folds of each that was tried.

    A depth that the corrections leave as it was costs nothing, and any other a second pass up to there; so the best of
    the former is taken where it comes within `TOLERANCE` of the best of all, else the earliest of the latter that does.
    Once a group of depths has one with an accuracy of `ENOUGH`, the groups after it are not asked for.

    Args:
        means: of some depths, mean states [N, depths, d] of prompts.
        labels: [N] index of each prompt's domain.
        groups: as `depth_groups` returns them.
        free: the last depth that the corrections do not change.
    """
    fitted: dict[int, Fitted] = {}
    accuracy: dict[int, float] = {}
    for depths in groups:
        found = means(depths)
        for place, depth in enumerate(depths):
            fitted[depth] = fit_router(found[:, place], labels, domains, depth, template)
            accuracy[depth] = fitted[depth].accuracy(labels)
        if max(accuracy.values()) >= ENOUGH:
            break
    good = [depth for depth in fitted if accuracy[depth] >= max(accuracy.values()) - TOLERANCE]
    costless = [depth for depth in good if depth <= free]
    return fitted[max(costless, key=lambda d: accuracy[d]) if costless else good[0]], accuracy


def _discriminant(x: torch.Tensor, labels: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """Standardisation, class means and shrunk covariance of vectors [N, d] float64."""
    means = torch.stack([x[labels == k].mean(0) for k in range(count)])
    residual = x - means[labels]
    scale = residual.square().mean(0).sqrt()
    scale = torch.where(scale > 1e-6 * scale.max(), scale, scale.max().clamp(min=1e-12))
    centre = means.mean(0)
    z = residual / scale
    shrinkage, power = ledoit_wolf(z)
    # The covariance z'z / N has at most N directions: its eigenvectors are right singular vectors.
    _, singular, basis = torch.linalg.svd(z / len(z) ** 0.5, full_matrices=False)
    kept = singular > 1e-7 * singular.max()
    floor = max(shrinkage, 1e-6) * power
    variances = (1 - shrinkage) * singular[kept].square() + floor
    levels = torch.tensor([floor, 1.0, float("inf")], dtype=torch.float64)
    return {
        "centre": centre, "scale": scale, "means": (means - centre) / scale, "basis": basis[kept],
        "variances": variances, "levels": levels,
    }  # fmt: skip


def ledoit_wolf(z: torch.Tensor) -> tuple[float, float]:
    """Shrinkage in [0, 1] towards the identity's multiple, and that multiple, for centred vectors [N, d].

    Ledoit & Wolf (2004), lemmas 3.2 to 3.5: with S = z'z / N, the multiple is tr S / d and the shrinkage
    min(b2, d2) / d2, b2 = sum_i |z_i z_i' - S|^2 / N^2 and d2 = |S|^2 - (tr S)^2 / d, all by the N products z_i' z_j.
    """
    count, width = z.shape
    gram = z @ z.T
    power = float(gram.diagonal().sum()) / count / width
    square = float(gram.square().sum()) / count**2
    spread = square - width * power**2
    noise = (float(gram.diagonal().square().sum()) / count - square) / count
    return (min(max(noise, 0.0) / spread, 1.0) if spread > 1e-12 * square else 1.0), max(power, 1e-12)


def _temperature(distances: torch.Tensor, labels: torch.Tensor) -> float:
    """The t in (0, 1] of greatest likelihood of the labels under softmax(-t d2 / 2), which is concave in t."""
    scores = -0.5 * distances

    def slope(t: float) -> float:
        expected = ((t * scores).softmax(-1) * scores).sum(-1)
        return float((scores.gather(1, labels[:, None]).squeeze(1) - expected).sum())

    if slope(1.0) >= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return high
