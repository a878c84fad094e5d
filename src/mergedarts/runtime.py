"""Attaches corrections to a Hugging Face causal LM: positions under padding and cache, a domain for each row.

Knows hooks, positions and when a router is to be asked, and no model family; does not know how corrections are made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .correction import Correction, Position, SiteCorrection
from .errors import UserError
from .models import decoder_layers
from .passes import Caches, Pass, argument, cache_of, without_cache
from .router import Router, mean_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Domain = str | None

#: The domain that leaves the choice to the router.
AUTO = "auto"


class _Read(Exception):
    """Ends a pass that was only to be read."""


class Handle:
    """Corrections attached to a model. Choose the domain, and detach when done.

    Usable as a context manager, which detaches at its end. With domain `auto` a router chooses for each row from the
    prompt: at the first pass of a call of `generate`, and at a pass without cache or with an empty one otherwise; what
    continues from there keeps the choice.
    """

    def __init__(
        self, model: PreTrainedModel, corrections: dict[str, Correction], router: Router | None = None
    ) -> None:
        self.model = model
        self.corrections = corrections
        self.router = router
        self._sites = {name: dict(correction.items()) for name, correction in corrections.items()}
        self._rows: Domain | list[Domain] = None
        self._hooks: list[Any] = []
        self._cast: dict[tuple[str, str, torch.device, torch.dtype], SiteCorrection] = {}
        self._positions: torch.Tensor | None = None
        self._bases: dict[Position, torch.Tensor] = {}
        self._keep: Any = None
        self._caches = Caches()
        self._chosen: list[Domain] | None = None
        self._of_cache: weakref.WeakKeyDictionary[Any, list[Domain]] = weakref.WeakKeyDictionary()
        self._in_turn = False
        self._counted: torch.Tensor | None = None
        self._ahead = False
        self._attach()

    @property
    def domains(self) -> list[str]:
        return list(self.corrections)

    @property
    def domain(self) -> Domain | list[Domain]:
        """The domain in use: one for all rows, or a list with one a row; None is the uncorrected model.

        `auto` lets the router choose, row by row. Setting it again lets it choose anew where a cache goes on.
        """
        return self._rows

    @domain.setter
    def domain(self, value: Domain | Sequence[Domain]) -> None:
        self._rows = self._known(value)
        self._chosen = None
        self._of_cache.clear()

    @contextmanager
    def using(self, value: Domain | Sequence[Domain]) -> Iterator[None]:
        """Another domain inside the block; what the router chose for a cache stays."""
        before, self._rows = self._rows, self._known(value)
        try:
            yield
        finally:
            self._rows = before

    def _known(self, value: Domain | Sequence[Domain]) -> Domain | list[Domain]:
        rows = value if value is None or isinstance(value, str) else list(value)
        for name in [rows] if not isinstance(rows, list) else rows:
            if name == AUTO and self.router is None:
                raise UserError("There is no router here to choose a domain; name one, or calibrate with a router.")
            if name is not None and name != AUTO and name not in self.corrections:
                raise UserError(
                    f"There is no domain '{name}' here; choose one of {', '.join(self.corrections)} or none."
                )
        return rows

    @property
    def chosen(self) -> list[Domain] | None:
        """What the router chose for each row of the last pass; None in a row is unsure, which is uncorrected."""
        return self._chosen

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, the router chooses at the first pass only: one answer, however it is decoded."""
        self._in_turn, self._chosen = True, None
        try:
            yield
        finally:
            self._in_turn = False

    def detach(self) -> None:
        """Remove every hook; the model computes what it computed before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        vars(self.model).pop("generate", None)

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
        decoder = self.model.get_decoder()
        self._hooks = [
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            decoder.register_forward_hook(self._after_decoder),
        ]
        if self.router is not None:
            layers = [layer for _, layer in decoder_layers(self.model)]
            if self.router.depth == 0:
                self._hooks.append(layers[0].register_forward_pre_hook(self._read_input, with_kwargs=True))
            else:
                # Before the corrections' own hooks, so that the state is the merged model's.
                self._hooks.append(layers[self.router.depth - 1].register_forward_hook(self._read_output))
            self._reads_ahead = self.router.depth > free_depth(self.model, names)
        for name, kind in names.items():
            if kind == "final":
                self._hooks.append(head.register_forward_pre_hook(self._at_head))
            else:
                self._hooks.append(modules[name].register_forward_hook(partial(self._after, name)))

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep = argument(module, args, kwargs, "logits_to_keep")

    def _before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ahead:
            return

        this = self._caches.read(module, args, kwargs)
        self._positions, self._bases = this.positions, {}
        if self._asks_router():
            self._choose(module, args, kwargs, this)
        else:
            self._chosen = None

    def _after_decoder(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Remember what a cache that the model itself made has seen, and what was chosen for it."""
        cache = None if self._ahead else cache_of(output)
        if cache is None or self._positions is None:
            return
        self._caches.made(cache, self._positions)
        if self._chosen is not None and self._asks_router():
            self._of_cache[cache] = self._chosen

    # ------------------------------------------------------------------------------------------------ router

    def _asks_router(self) -> bool:
        return self._rows == AUTO or (isinstance(self._rows, list) and AUTO in self._rows)

    def _choose(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], this: Pass) -> None:
        """Keep the choice of the turn or of the cache, or have the router read this pass or one run ahead of it."""
        if not self._in_turn:
            self._chosen = self._of_cache.get(this.cache) if this.cache is not None and this.past else None
        batch = this.positions.shape[0]
        if self._chosen is not None and batch % len(self._chosen) == 0:
            return
        self._chosen = None
        assert self.router is not None
        real = torch.ones_like(this.positions, dtype=torch.bool) if this.real is None else this.real
        self._counted = self.router.content(this.ids, real.expand(this.positions.shape))
        if not self._reads_ahead:
            return
        if this.past:
            # What the cache holds was corrected, and what it stood for is gone: nothing can be said of this row.
            self._chosen = [None] * batch
            return
        self._ahead = True
        try:
            with suppress(_Read), torch.no_grad():
                decoder(**without_cache(decoder, args, kwargs, this.real, batch))
        finally:
            self._ahead = False

    def _read_input(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read(args[0] if args else kwargs["hidden_states"])

    def _read_output(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._read(output[0] if isinstance(output, tuple) else output)

    def _read(self, state: torch.Tensor) -> None:
        if self._asks_router() and self._chosen is None:
            assert self.router is not None
            assert self._counted is not None
            with torch.no_grad():
                self._chosen = self.router.choose(mean_state(state, self._counted))
        if self._ahead:
            raise _Read

    # ------------------------------------------------------------------------------------------- corrections

    def _at_head(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        state, positions = inputs[0], self._positions
        assert positions is not None
        if state.shape[1] != positions.shape[1]:
            # Where the model itself was not called (PEFT calls its forward), the last ones are meant.
            keep = state.shape[1] if self._keep is None else self._keep
            positions = positions[:, slice(-keep, None) if isinstance(keep, int) else keep]
        return (self._correct("final", state, state, positions), *inputs[1:])

    def _after(self, name: str, _module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        fixed = self._correct(name, state, inputs[0] if inputs else None, self._positions)
        return (fixed, *output[1:]) if isinstance(output, tuple) else fixed

    def _domains(self, batch: int) -> Domain | list[Domain]:
        """The domain of all rows, or a list with that of each."""
        rows = self._rows
        if self._ahead or rows is None:
            return None
        if isinstance(rows, list):
            if batch % len(rows):
                raise UserError(f"{len(rows)} domains were chosen for a batch of {batch} rows; give one a row.")
            # Beams and several returned sequences repeat each row in place.
            rows = [row for row in rows for _ in range(batch // len(rows))]
        if not self._asks_router():
            return rows
        assert self._chosen is not None
        routed = [row for row in self._chosen for _ in range(batch // len(self._chosen))]
        if isinstance(rows, list):
            routed = [found if row == AUTO else row for row, found in zip(rows, routed, strict=True)]
        return routed[0] if len(set(routed)) == 1 else routed

    def _correct(self, name: str, h: torch.Tensor, x: Any, positions: torch.Tensor | None) -> torch.Tensor:
        batch = h.shape[0]
        rows = self._domains(batch)
        if rows is None:
            return h
        if isinstance(rows, str):
            site = self._site(rows, name, h)
            return h if site is None else self._apply(site, h, x, positions, positions is self._positions)
        out = h.clone()
        for domain in dict.fromkeys(rows):
            site = self._site(domain, name, h) if domain is not None else None
            if site is None:
                continue
            mine = torch.tensor([i for i, row in enumerate(rows) if row == domain], device=h.device)
            where = None if positions is None else positions.expand(batch, -1)[mine]
            out[mine] = self._apply(site, h[mine], x[mine] if x is not None else None, where)
        return out

    def _apply(
        self, site: SiteCorrection, h: torch.Tensor, x: Any, positions: torch.Tensor | None, whole: bool = False
    ) -> torch.Tensor:
        """A site's correction of some rows; `whole` where the positions are those of the pass."""
        bases = self._bases if whole else None
        fixed: torch.Tensor = site(h, x if site.kind == "linear" else h, positions, bases)
        return fixed

    def _site(self, domain: str, name: str, like: torch.Tensor) -> SiteCorrection | None:
        """A site's correction on the device and in the dtype of the states, copied once.

        Copied also where nothing has to change: tensors as a file maps them lie at any address, and kernels may round
        by it.
        """
        found = self._sites[domain].get(name)
        if found is None:
            return None
        key = (domain, name, like.device, like.dtype)
        if key not in self._cast:
            self._cast[key] = deepcopy(found).requires_grad_(False).to(device=like.device, dtype=like.dtype)
        return self._cast[key]


def free_depth(model: PreTrainedModel, sites: Iterable[str]) -> int:
    """How many decoder layers' outputs can be read before any of the sites changes them."""
    names = [name for name, _ in decoder_layers(model)]
    for depth, layer in enumerate(names):
        if layer in sites:
            return depth + 1
        if any(site.startswith(layer + ".") for site in sites):
            return depth
    return len(names)


def attach(
    model: PreTrainedModel, corrections: dict[str, Correction], domain: Domain = None, router: Router | None = None
) -> Handle:
    """Attach corrections to a causal LM of any family by hooks; the weights stay as they are.

    Args:
        model: a Hugging Face causal LM.
        corrections: by domain, as `mergedarts.load` or a fit returns them.
        domain: the domain to begin with; None is the uncorrected model, `auto` the router's choice for each row.
        router: as `mergedarts.load` or `calibrate` makes it, for domain `auto`.

    Returns:
        A handle to change the domain (one for all rows, or one a row) and to detach.

    Raises:
        UserError: a site is not in the model, or a shape does not fit.
    """
    width = model.get_output_embeddings().weight.shape[1]
    for name, correction in corrections.items():
        for where, site in correction.items():
            wanted = (width, width)
            if site.kind == "linear" and where in dict(model.named_modules()):
                weight = model.get_submodule(where).weight
                # GPT-2 keeps its weights the other way round.
                wanted = tuple(
                    weight.shape[::-1] if isinstance(model.get_submodule(where), nn.Linear) else weight.shape
                )
            if site.widths != wanted:
                raise UserError(
                    f"The correction of '{name}' at {where} is for widths {site.widths}, but the model has {wanted}; "
                    "it belongs to another model."
                )
    handle = Handle(model, corrections, router)
    handle.domain = domain
    if router is not None:
        vars(model)["generate"] = partial(_generate, model, handle)
    return handle


def _generate(model: PreTrainedModel, handle: Handle, *args: Any, **kwargs: Any) -> Any:
    """The model's own `generate`, as one turn."""
    with handle.turn():
        return type(model).generate(model, *args, **kwargs)
