"""Attaches corrections to a Hugging Face causal LM: positions under padding and cache, a domain for each row.

Knows hooks and positions, and no model family; does not know how corrections are made.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .correction import Correction, SiteCorrection
from .errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Domain = str | None

#: What a cache is called, by version and family.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class Handle:
    """Corrections attached to a model. Choose the domain, and detach when done.

    Usable as a context manager, which detaches at its end.
    """

    def __init__(self, model: PreTrainedModel, corrections: dict[str, Correction]) -> None:
        self.model = model
        self.corrections = corrections
        self._rows: Domain | list[Domain] = None
        self._hooks: list[Any] = []
        self._cast: dict[tuple[str, str, torch.device, torch.dtype], SiteCorrection] = {}
        self._positions: torch.Tensor | None = None
        self._keep: Any = 0
        self._seen: weakref.WeakKeyDictionary[Any, tuple[int, torch.Tensor]] = weakref.WeakKeyDictionary()
        self._attach()

    @property
    def domains(self) -> list[str]:
        return list(self.corrections)

    @property
    def domain(self) -> Domain | list[Domain]:
        """The domain in use: one for all rows, or a list with one a row; None is the uncorrected model."""
        return self._rows

    @domain.setter
    def domain(self, value: Domain | Sequence[Domain]) -> None:
        rows = value if value is None or isinstance(value, str) else list(value)
        for name in [rows] if not isinstance(rows, list) else rows:
            if name is not None and name not in self.corrections:
                raise UserError(
                    f"There is no domain '{name}' here; choose one of {', '.join(self.corrections)} or none."
                )
        self._rows = rows

    def detach(self) -> None:
        """Remove every hook; the model computes what it computed before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # ------------------------------------------------------------------------------------------------- hooks

    def _attach(self) -> None:
        modules = dict(self.model.named_modules())
        head = self.model.get_output_embeddings()
        names: dict[str, str] = {}
        for correction in self.corrections.values():
            for name, site in correction.items():
                if name != "final" and name not in modules:
                    raise UserError(f"The correction's site '{name}' is not a module of {type(self.model).__name__}.")
                names[name] = site.kind
        self._hooks = [
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            self.model.get_decoder().register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            self.model.get_decoder().register_forward_hook(self._after_decoder),
        ]
        for name, kind in names.items():
            if kind == "final":
                self._hooks.append(head.register_forward_pre_hook(self._at_head))
            else:
                self._hooks.append(modules[name].register_forward_hook(self._after(name)))

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep = _argument(module, args, kwargs, "logits_to_keep")
        self._keep = 0 if keep is None else keep

    def _before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def get(*names: str) -> Any:
            values = (_argument(module, args, kwargs, name) for name in names)
            return next((value for value in values if value is not None), None)

        tokens = get("inputs_embeds", "input_ids")
        batch, length = tokens.shape[:2]
        cache = get(*_CACHE_NAMES)
        self._positions = self._find_positions(
            batch, length, tokens.device, get("position_ids"), get("attention_mask"), cache
        )

    def _after_decoder(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Remember what a cache that the model itself made has seen."""
        cache = next((c for c in (getattr(output, name, None) for name in _CACHE_NAMES) if c is not None), None)
        if cache is not None and self._positions is not None and cache not in self._seen:
            self._seen[cache] = (self._positions.shape[1], self._positions[:, -1] + 1)

    def _find_positions(
        self, batch: int, length: int, device: torch.device, given: Any, mask: Any, cache: Any
    ) -> torch.Tensor:
        """[B, T] position of each token, counted from the first real token of its row.

        From the position ids where the caller gives them; else from a two-dimensional mask, which counts the padding
        out; else from what the cache holds, or (where a cache does not count, as of state-space models) from what was
        seen with it before.
        """
        before = self._seen.get(cache) if cache is not None else None
        past = _cached_length(cache)
        if past is None:
            past = before[0] if before is not None else 0
        if before is not None and (before[0] != past or before[1].shape[0] != batch):
            before = None
        start = before[1].to(device)[:, None] if before is not None else torch.full((batch, 1), past, device=device)
        if given is not None:
            positions = given[0] if given.dim() == 3 else given
            positions = positions.expand(batch, length)
        elif mask is not None and not isinstance(mask, dict) and mask.dim() == 2 and mask.shape[1] == past + length:
            positions = (mask.long().cumsum(-1) - 1)[:, -length:]
        elif mask is not None and not isinstance(mask, dict) and mask.dim() == 2 and mask.shape[1] == length:
            positions = start + mask.long().cumsum(-1) - 1
        else:
            positions = start + torch.arange(length, device=device)
        if cache is not None:
            self._seen[cache] = (past + length, positions[:, -1] + 1)
        found: torch.Tensor = positions.clamp(min=0)
        return found

    def _at_head(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        state, positions = inputs[0], self._positions
        assert positions is not None
        if state.shape[1] != positions.shape[1]:
            keep = slice(-self._keep, None) if isinstance(self._keep, int) else self._keep
            positions = positions[:, keep]
        return (self._correct("final", state, state, positions), *inputs[1:])

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            state = output[0] if isinstance(output, tuple) else output
            fixed = self._correct(name, state, inputs[0] if inputs else None, self._positions)
            return (fixed, *output[1:]) if isinstance(output, tuple) else fixed

        return hook

    def _correct(self, name: str, h: torch.Tensor, x: Any, positions: torch.Tensor | None) -> torch.Tensor:
        rows = self._rows
        if rows is None:
            return h
        if isinstance(rows, str):
            site = self._site(rows, name, h)
            return h if site is None else self._apply(site, h, x, positions)
        batch = h.shape[0]
        if batch % len(rows):
            raise UserError(f"{len(rows)} domains were chosen for a batch of {batch} rows; give one a row.")
        # Beams and several returned sequences repeat each row in place.
        expanded = [row for row in rows for _ in range(batch // len(rows))]
        out = h.clone()
        for domain in dict.fromkeys(expanded):
            site = self._site(domain, name, h) if domain is not None else None
            if site is None:
                continue
            mine = torch.tensor([i for i, row in enumerate(expanded) if row == domain], device=h.device)
            where = None if positions is None else positions.expand(batch, -1)[mine]
            out[mine] = self._apply(site, h[mine], x[mine] if x is not None else None, where)
        return out

    def _apply(self, site: SiteCorrection, h: torch.Tensor, x: Any, positions: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            fixed: torch.Tensor = site(h, x if site.kind == "linear" else h, positions)
            return fixed

    def _site(self, domain: str, name: str, like: torch.Tensor) -> SiteCorrection | None:
        """A site's correction on the device and in the dtype of the states, made once."""
        key = (domain, name, like.device, like.dtype)
        if key not in self._cast:
            found = dict(self.corrections[domain].items()).get(name)
            if found is None:
                return None
            copy = deepcopy(found).requires_grad_(False).to(device=like.device, dtype=like.dtype)
            self._cast[key] = copy
        return self._cast[key]


def attach(model: PreTrainedModel, corrections: dict[str, Correction], domain: Domain = None) -> Handle:
    """Attach corrections to a causal LM of any family by hooks; the weights stay as they are.

    Args:
        model: a Hugging Face causal LM.
        corrections: by domain, as `mergedarts.load` or a fit returns them.
        domain: the domain to begin with; None is the uncorrected model.

    Returns:
        A handle to change the domain (one for all rows, or one a row) and to detach.

    Raises:
        UserError: a site is not in the model, or a shape does not fit.
    """
    width = model.get_output_embeddings().weight.shape[1]
    for name, correction in corrections.items():
        for where, site in correction.items():
            at = site.up if site.up is not None else site.position_bias
            dimension = None if at is None else (at.shape[0] if at is site.up else at.shape[1])
            if where == "final" and dimension not in (None, width):
                raise UserError(
                    f"The correction of '{name}' is for hidden size {dimension}, but the model has {width}; "
                    "it belongs to another model."
                )
    handle = Handle(model, corrections)
    handle.domain = domain
    return handle


def _argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a module's forward, given by name or by place."""
    if name in kwargs:
        return kwargs[name]
    if not args:
        return None
    names = list(inspect.signature(module.forward).parameters)
    index = names.index(name) if name in names else len(args)
    return args[index] if index < len(args) else None


def _cached_length(cache: Any) -> int | None:
    """Tokens a cache holds, 0 without one, None where it does not count them."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError, TypeError, NotImplementedError):
        return None
