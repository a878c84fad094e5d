"""What one forward pass of a decoder is given: its cache, its tokens' positions, and which of them are real.

Knows the arguments of Hugging Face decoders by name, and no model family; knows nothing of corrections.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: What a cache is called, by version and family.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        ids: [B, T] token ids, None where embeddings were given.
        positions: [B, T] of each token, counted from the first real token of its row.
        real: [B or 1, T] whether a token is not padding; None where nothing tells, and all are taken as real.
        cache: the cache that was given, or None.
        past: how many tokens it holds.
    """

    ids: torch.Tensor | None
    positions: torch.Tensor
    real: torch.Tensor | None
    cache: Any
    past: int


class Caches:
    """Reads passes, and remembers of each cache what it has seen."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, tuple[int, torch.Tensor]] = weakref.WeakKeyDictionary()

    def read(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        """What a pass is given."""

        def get(*names: str) -> Any:
            values = (argument(decoder, args, kwargs, name) for name in names)
            return next((value for value in values if value is not None), None)

        tokens, mask, cache = get("inputs_embeds", "input_ids"), get("attention_mask"), get(*CACHE_NAMES)
        batch, length = tokens.shape[:2]
        past = _cached_length(cache)
        if past is None:
            # State-space models do not count.
            past = self._seen[cache][0] if cache in self._seen else 0
        positions = self._positions(batch, length, tokens.device, get("position_ids"), mask, cache, past)
        return Pass(get("input_ids"), positions, _real_tokens(mask, past, length), cache, past)

    def made(self, cache: Any, positions: torch.Tensor) -> None:
        """Remember a cache that the model itself made in a pass of these positions."""
        if cache not in self._seen:
            self._seen[cache] = (positions.shape[1], positions[:, -1] + 1)

    def _positions(
        self, batch: int, length: int, device: torch.device, given: Any, mask: Any, cache: Any, past: int
    ) -> torch.Tensor:
        """From the position ids where the caller gives them; else from a two-dimensional mask, which counts the padding
        out; else from what the cache holds and what was seen with it before."""
        before = self._seen.get(cache) if cache is not None else None
        if before is not None and (before[0] != past or before[1].shape[0] != batch):
            before = None
        start = before[1].to(device)[:, None] if before is not None else torch.full((batch, 1), past, device=device)
        flat = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if given is not None:
            positions = given[0] if given.dim() == 3 else given
            positions = positions.expand(batch, length)
        elif flat and mask.shape[1] == past + length:
            positions = (mask.long().cumsum(-1) - 1)[:, -length:]
        elif flat and mask.shape[1] == length:
            positions = start + mask.long().cumsum(-1) - 1
        else:
            positions = start + torch.arange(length, device=device)
        if cache is not None:
            self._seen[cache] = (past + length, positions[:, -1] + 1)
        found: torch.Tensor = positions.clamp(min=0)
        return found


def argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a module's forward, given by name or by place."""
    if name in kwargs:
        return kwargs[name]
    if not args:
        return None
    names = list(inspect.signature(module.forward).parameters)
    index = names.index(name) if name in names else len(args)
    return args[index] if index < len(args) else None


def cache_of(output: Any) -> Any:
    """The cache in what a model or decoder returns, or None."""
    return next((c for c in (getattr(output, name, None) for name in CACHE_NAMES) if c is not None), None)


def without_cache(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], real: torch.Tensor | None, batch: int
) -> dict[str, Any]:
    """The arguments of a pass over the same tokens that leaves the cache alone."""
    names = list(inspect.signature(decoder.forward).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    kept = {k: v for k, v in given.items() if k not in (*CACHE_NAMES, "attention_mask", "use_cache")}
    mask = None if real is None else real.long().expand(batch, -1)
    return kept | {"attention_mask": mask, "use_cache": False}


def _cached_length(cache: Any) -> int | None:
    """Tokens a cache holds, 0 without one, None where it does not count them."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError, TypeError, NotImplementedError):
        return None


def _real_tokens(mask: Any, past: int, length: int) -> torch.Tensor | None:
    """[B or 1, T] which tokens of a pass are not padding; None where nothing tells, and all are taken as real."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() == 2:
        return mask[:, -length:].bool() if mask.shape[1] in (length, past + length) else None
    # The last token sees what is real: true, or nothing added to its score.
    seen = mask[:, 0, -1, past : past + length]
    return seen if seen.dtype == torch.bool else seen == 0
