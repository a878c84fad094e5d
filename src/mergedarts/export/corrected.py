"""A stock causal LM with its corrections inside: what the remote code of an exported model runs.

Knows the stock class only as what it is mixed into; how corrections act is in `runtime`. Needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from ..correction import Correction, SiteCorrection
from ..router import Router
from ..runtime import Handle


class Corrected:
    """Mixed into a causal LM, before its stock class.

    The configuration says in `mergedarts` what corrections there are, and in `domain` which is in use where a call does
    not say: a domain's name, `auto`, or none. `forward` and `generate` take `domain` too: one for all rows, or a list
    with one a row; `generate` also finds it in its `generation_config`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stock = cls.forward  # type: ignore[attr-defined]

        @wraps(stock)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._domain(kwargs):
                return stock(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[attr-defined]
        # Rounded to the dtype of the states they meet, which is not always that of the weights; the router never.
        strict = getattr(cls, "_keep_in_fp32_modules_strict", None) or ()
        kept = {*strict, "mergedarts_corrections", "mergedarts_router"}
        cls._keep_in_fp32_modules_strict = kept  # type: ignore[attr-defined]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        said = config.mergedarts
        self.mergedarts_corrections = nn.ModuleList(
            Correction({entry["site"]: SiteCorrection.empty(entry, entry["widths"]) for entry in sites})
            for sites in said["sites"].values()
        ).requires_grad_(False)
        names, router = list(said["sites"]), said.get("router")
        if router is not None:
            self.mergedarts_router = Router.empty(names, router["depth"], router["sizes"])
        corrections: dict[str, Any] = dict(zip(names, self.mergedarts_corrections, strict=True))
        self._handle = Handle(self, corrections, getattr(self, "mergedarts_router", None))
        self._handle.domain = _named(config.domain)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: buffers that are in no file are made again as the stock class does it, not left as they are."""
        return False

    @property
    def mergedarts(self) -> Handle:
        """The corrections: `.domain` is the one in use, `.chosen` what the router chose last."""
        return self._handle

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As of the stock model, with `domain`; one call is one turn, in which the router chooses once."""
        settings: Any = kwargs.get("generation_config")
        if "domain" not in kwargs and settings is not None and hasattr(settings, "domain"):
            kwargs["domain"] = settings.domain
        with self._domain(kwargs), self._handle.turn():
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _domain(self, kwargs: dict[str, Any]) -> Iterator[None]:
        if "domain" not in kwargs:
            yield
            return
        with self._handle.using(_named(kwargs.pop("domain"))):
            yield


def _named(domain: Any) -> Any:
    """Text and lists as a caller or a file writes them, where `none` is no domain."""
    if isinstance(domain, list | tuple):
        return [_named(one) for one in domain]
    return None if domain == "none" else domain
