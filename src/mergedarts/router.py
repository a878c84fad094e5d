"""Picks the domain of a prompt from the mean of its hidden states: a linear discriminant that may be unsure.

Knows vectors, distances and which tokens of a prompt count; where states come from is the runtime's affair, and how it
is fitted `fit.router`'s.

With class means m_k and one covariance S of the standardised states within classes, the squared distance to a class is
d2_k = (x - m_k)' S^-1 (x - m_k), and the probability of class k is softmax_k(-t d2_k / 2), all classes alike likely
beforehand. A prompt is unsure where its least distance is beyond a limit, or where its best class has less than half of
the probability.
"""

from __future__ import annotations

import torch
from torch import nn

#: What a choice of no domain is called.
UNSURE = "unsure"
LEAST_PROBABILITY = 0.5
NAMES = ("centre", "scale", "means", "basis", "variances", "levels")
#: Token ids that the chat template puts before and after every prompt.
TEMPLATE = ("prefix", "suffix")


class Router(nn.Module):
    """The discriminant, ready for use; its tensors are buffers, float32 but for token ids.

    Attributes:
        domains: names of the K classes.
        depth: how many decoder layers have run when the state is read; 0 is the input of the first.

    Buffers: centre, scale [d] of the standardisation; means [K, d] of the classes, standardised; basis [k, d]
    orthonormal directions in which S is not a multiple of the identity; variances [k] along them; levels [3]: variance
    in all other directions, temperature, limit of the squared distance; prefix and suffix, the token ids that every
    calibration prompt begins and ends with.
    """

    def __init__(self, domains: list[str], depth: int, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.domains = domains
        self.depth = depth
        for name in NAMES:
            self.register_buffer(name, tensors[name].float())
        for name in TEMPLATE:
            self.register_buffer(name, tensors[name].long())

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named_buffers())

    @property
    def sizes(self) -> list[int]:
        """Width, directions, and lengths of the template's two ends: with the domains, all shapes."""
        return [len(self.get_buffer(name)) for name in ("centre", "variances", *TEMPLATE)]

    @classmethod
    def empty(cls, domains: list[str], depth: int, sizes: list[int]) -> Router:
        """A router of uninitialised tensors, to be filled from a file."""
        width, directions, prefix, suffix = sizes
        shapes = ((width,), (width,), (len(domains), width), (directions, width), (directions,), (3,))
        tensors = {name: torch.empty(shape) for name, shape in zip(NAMES, shapes, strict=True)}
        tensors |= {"prefix": torch.empty(prefix), "suffix": torch.empty(suffix)}
        return cls(domains, depth, tensors)

    def is_consistent(self) -> bool:
        """Whether shapes and values fit each other."""
        found = self.tensors()
        width, size = found["centre"].shape[-1], found["basis"].shape[0]
        wanted = ((width,), (width,), (len(self.domains), width), (size, width), (size,), (3,))
        return all(
            found[name].shape == shape and bool(torch.isfinite(found[name]).all())
            for name, shape in zip(NAMES, wanted, strict=True)
        )

    def content(self, ids: torch.Tensor | None, real: torch.Tensor) -> torch.Tensor:
        """Which tokens of prompts count, as `content` finds them."""
        return content(ids, real, *(self.get_buffer(name).tolist() for name in TEMPLATE))

    def distances(self, x: torch.Tensor) -> torch.Tensor:
        """Squared distances [B, K] of mean states [B, d]."""
        return distances_to(x.float(), {name: self.get_buffer(name).to(x.device) for name in NAMES})

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """[B, K] probability of each domain, given that it is one of them."""
        return (-0.5 * self.get_buffer("levels")[1].to(x.device) * self.distances(x)).softmax(-1)

    def choose(self, x: torch.Tensor) -> list[str | None]:
        """The domain of each mean state [B, d]; None where the router is unsure, as it is of an empty prompt."""
        named = choice(self.distances(x), self.get_buffer("levels").to(x.device)).tolist()
        return [self.domains[i] if i >= 0 else None for i in named]


def distances_to(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Squared distances [B, K] of vectors [B, d] by a router's tensors, in their dtype."""
    offset = ((x - tensors["centre"]) / tensors["scale"])[:, None] - tensors["means"]
    inside = offset @ tensors["basis"].T
    outside = offset - inside @ tensors["basis"]
    along = (inside.square() / tensors["variances"]).sum(-1)
    return along + outside.square().sum(-1) / tensors["levels"][0]


def choice(distances: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """[B] index of the chosen class, -1 where unsure."""
    best, index = (-0.5 * levels[1] * distances).softmax(-1).max(-1)
    sure = (distances.min(-1).values <= levels[2]) & (best >= LEAST_PROBABILITY)
    return torch.where(sure, index, torch.full_like(index, -1))


def content(ids: torch.Tensor | None, real: torch.Tensor, prefix: list[int], suffix: list[int]) -> torch.Tensor:
    """Which tokens [B, T] of prompts count: the real ones, less the template's and less the first.

    The template's say nothing and are most of a short prompt; the first token's state is an attention sink's, far
    larger than all others.

    Args:
        ids: [B, T] token ids, None where the model was given embeddings.
        real: [B, T] whether a token is not padding.
        prefix, suffix: token ids of the template.
    """
    out = real.clone()
    for b in range(len(out)):
        where = real[b].nonzero().squeeze(-1)
        row = [] if ids is None else ids[b, where].tolist()
        start = len(prefix) if prefix and row[: len(prefix)] == prefix else 1
        rest = len(where) - len(suffix)
        end = rest if suffix and rest >= start and row[rest:] == suffix else len(where)
        out[b, where[:start]] = False
        out[b, where[end:]] = False
    return out


def mean_state(states: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """[B, d] float32 mean of states [B, T, d] over the tokens that count [B, T]; not a number where none does."""
    weights = counted.to(device=states.device, dtype=torch.float32)
    return torch.einsum("bt,btd->bd", weights, states.float()) / weights.sum(1, keepdim=True)
