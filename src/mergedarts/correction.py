"""Corrections as modules, and their format on disk.

Knows what is added at a site and how many parameters it has; knows nothing of models, hooks or fitting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .errors import UserError
from .store import load_tensors, save_tensors

FILE = "corrections.safetensors"

Kind = Literal["final", "residual", "linear"]


@dataclass(frozen=True)
class Position:
    """How a bias depends on the position p, counted from the first real token.

    `table`: row min(p, size - 1) of a table (`constant` is a table of one row). `smooth`: `size` cosines of
    log-position up to position `last`, constant beyond it: f_j(p) = cos(pi j log(1 + min(p, last)) / log(1 + last)).
    """

    form: Literal["table", "smooth"]
    size: int
    last: int = 0

    def basis(self, positions: torch.Tensor) -> torch.Tensor:
        """The smooth functions at some positions: [..., size] float32."""
        u = (positions.clamp(min=0, max=self.last).float() + 1).log() / math.log(self.last + 1 if self.last else 2)
        return torch.cos(math.pi * u[..., None] * torch.arange(self.size, device=positions.device))


class SiteCorrection(nn.Module):
    """What is subtracted at one site: h' = h - up act(down x + inner(p)) - bias(p).

    At `residual` and `final` sites x is h itself, [..., d]; at a `linear` site x is the input of the linear layer and h
    its output. `act` is the identity or, as in Representation Surgery, a ReLU.

    Attributes:
        down: [r, d_in], up: [d_out, r]; both None where there is no low-rank part.
        position_bias: [size, d_out]; rows of a table or weights of smooth functions; None where there is no bias.
        position_inner: [size, r], the same inside the low-rank part, where a position costs r parameters and not d.
    """

    def __init__(
        self,
        kind: Kind,
        down: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        position: Position | None = None,
        relu: bool = False,
        inner: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if (down is None) != (up is None) or (position is None) != (bias is None and inner is None):
            raise ValueError("down goes with up, and a bias with a position")
        self.kind: Kind = kind
        self.relu = relu
        self.position = position
        self.down = None if down is None else nn.Parameter(down.contiguous())
        self.up = None if up is None else nn.Parameter(up.contiguous())
        self.position_bias = None if bias is None else nn.Parameter(bias.contiguous())
        self.position_inner = None if inner is None else nn.Parameter(inner.contiguous())

    @classmethod
    def empty(cls, entry: dict[str, Any], widths: tuple[int, int]) -> SiteCorrection:
        """A site of uninitialised tensors, to be filled from a file.

        Args:
            entry: its description, as `describe` makes it.
            widths: d_in and d_out.
        """
        rank, at = entry["rank"], entry.get("position")
        return cls(
            entry["kind"],
            down=torch.empty(rank, widths[0]) if rank else None,
            up=torch.empty(widths[1], rank) if rank else None,
            bias=torch.empty(at["size"], widths[1]) if at and entry["bias"] else None,
            inner=torch.empty(at["size"], rank) if at and entry["inner"] else None,
            position=Position(at["form"], at["size"], at["last"]) if at else None,
            relu=entry["relu"],
        )

    def describe(self, name: str) -> dict[str, Any]:
        """What a file must say of a site beside its tensors."""
        entry: dict[str, Any] = {"site": name, "kind": self.kind, "rank": self.rank, "relu": self.relu}
        if self.position is not None:
            p = self.position
            entry["position"] = {"form": p.form, "size": p.size, "last": p.last}
            entry["inner"] = self.position_inner is not None
            entry["bias"] = self.position_bias is not None
        return entry

    @property
    def widths(self) -> tuple[int, int]:
        """d_in and d_out."""
        wide = self.up if self.up is not None else self.position_bias
        assert wide is not None
        out = wide.shape[0] if wide is self.up else wide.shape[1]
        return (out if self.down is None else self.down.shape[1]), out

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]

    def is_consistent(self) -> bool:
        """Whether the shapes and values of the parts fit each other."""
        parts = [p for p in (self.down, self.up, self.position_bias, self.position_inner) if p is not None]
        if any(p.dim() != 2 or not torch.isfinite(p).all() for p in parts):
            return False
        size = 0 if self.position is None else self.position.size
        wide = {p.shape[0] for p in (self.up,) if p is not None} | {
            p.shape[1] for p in (self.position_bias,) if p is not None
        }
        return (
            len(wide) <= 1
            and (self.down is None or self.up is None or self.down.shape[0] == self.up.shape[1])
            and (self.kind == "linear" or self.down is None or self.down.shape[1] in wide)
            and all(p.shape[0] == size for p in (self.position_bias, self.position_inner) if p is not None)
            and (self.position_inner is None or self.position_inner.shape[1] == self.rank)
        )

    def forward(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        bases: dict[Position, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Corrected h [..., d_out] from h, x [..., d_in] and positions [...] (needed only where there is a bias).

        Where several sites see the same positions, `bases` keeps the smooth functions from one to the next.
        """
        if self.down is not None and self.up is not None:
            inner = nn.functional.linear(x.to(self.down.dtype), self.down)
            if self.position_inner is not None:
                inner = inner + self._at(self.position_inner, positions, bases)
            h = h - nn.functional.linear(inner.relu() if self.relu else inner, self.up).to(h.dtype)
        if self.position_bias is not None:
            h = h - self._at(self.position_bias, positions, bases).to(h.dtype)
        return h

    def _at(
        self, weight: torch.Tensor, positions: torch.Tensor | None, bases: dict[Position, torch.Tensor] | None
    ) -> torch.Tensor:
        """The value at some positions [...] of rows or weights [size, n]: [..., n]."""
        assert self.position is not None
        if self.position.size == 1:
            return weight[0]
        assert positions is not None
        if self.position.form == "table":
            return nn.functional.embedding(positions.clamp(min=0, max=self.position.size - 1), weight)
        basis = None if bases is None else bases.get(self.position)
        if basis is None or basis.dtype != weight.dtype or basis.device != weight.device:
            basis = self.position.basis(positions).to(weight.dtype)
            if bases is not None:
                bases[self.position] = basis
        return basis @ weight


class Correction(nn.Module):
    """The corrections of one domain by site: `final`, or the module name of a decoder layer or linear layer."""

    def __init__(self, sites: dict[str, SiteCorrection] | None = None) -> None:
        super().__init__()
        self._names = list(sites or {})
        self._sites = nn.ModuleList((sites or {}).values())

    def items(self) -> Iterator[tuple[str, SiteCorrection]]:
        """Site names and corrections, in the order of the model."""
        for name, site in zip(self._names, self._sites, strict=True):
            assert isinstance(site, SiteCorrection)
            yield name, site

    def __len__(self) -> int:
        return len(self._names)

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def save_corrections(folder: Path, corrections: dict[str, Correction]) -> dict[str, Any]:
    """Write `corrections.safetensors` (float32) and return the description of its sites for `darts_config.json`."""
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    for domain, correction in corrections.items():
        described[domain] = []
        for name, site in correction.items():
            prefix = domain if name == "final" else f"{domain}.{name}"
            parts = {
                "down.weight": site.down,
                "up.weight": site.up,
                "position_bias": site.position_bias,
                "position_inner": site.position_inner,
            }
            tensors |= {f"{prefix}.{key}": value for key, value in parts.items() if value is not None}
            described[domain].append(site.describe(name))
    bad = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise UserError(
            f"The fit gave values that are not finite ({bad[0]}); try 'dtype: float32'. Nothing was written."
        )
    save_tensors(folder / FILE, tensors)
    return described


def load_corrections(folder: Path, described: dict[str, Any]) -> dict[str, Correction]:
    """Read what `save_corrections` wrote; anything missing, left over or of another shape is a `UserError`."""
    path = folder / FILE
    tensors = load_tensors(path, "calibrate again")
    loaded: dict[str, Correction] = {}
    try:
        for domain, entries in described.items():
            sites: dict[str, SiteCorrection] = {}
            for entry in entries:
                prefix = domain if entry["site"] == "final" else f"{domain}.{entry['site']}"
                at = entry.get("position")
                made = sites[entry["site"]] = SiteCorrection(
                    entry["kind"],
                    down=tensors.pop(f"{prefix}.down.weight") if entry["rank"] else None,
                    up=tensors.pop(f"{prefix}.up.weight") if entry["rank"] else None,
                    bias=tensors.pop(f"{prefix}.position_bias") if at and entry["bias"] else None,
                    inner=tensors.pop(f"{prefix}.position_inner") if at and entry["inner"] else None,
                    position=Position(at["form"], at["size"], at["last"]) if at else None,
                    relu=entry["relu"],
                )
                if made.rank != entry["rank"]:
                    raise ValueError(f"{entry['site']} has rank {made.rank}, not {entry['rank']}")
            loaded[domain] = Correction(sites)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} does not match darts_config.json beside it ({error}); calibrate again.") from None
    for domain, correction in loaded.items():
        for name, site in correction.items():
            if not site.is_consistent():
                raise UserError(f"{path} holds shapes that do not fit at '{domain}', '{name}'; calibrate again.")
    if tensors:
        raise UserError(f"{path} holds tensors that darts_config.json does not name ({min(tensors)}); calibrate again.")
    return loaded
