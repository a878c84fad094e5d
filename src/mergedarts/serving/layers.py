"""Corrections of one domain in a decoder as serving engines write it: flat tokens, the residual stream in two parts.

Knows what such layers are given and return, and how a `hub` export names its tensors; needs torch, and knows no engine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..correction import SiteCorrection
from ..errors import UserError

#: Before the names of an export's own tensors, those of the router among them.
OWN = "mergedarts_"
#: What a decoder layer calls the positions of its tokens.
POSITIONS = ("positions", "position_ids")
OTHER = "serve its 'lora' or 'folded' export"
CHOOSE = """--hf-overrides '{"domain": "NAME"}'"""


def chosen(config: Any) -> str | None:
    """The domain that a model's configuration names; None is the merged model as it was.

    Raises:
        UserError: the model is no `hub` export, has no such domain, or leaves the choice to its router.
    """
    said, domain = getattr(config, "mergedarts", None), getattr(config, "domain", None)
    if not isinstance(said, dict) or not isinstance(said.get("sites"), dict):
        raise UserError("This model carries no corrections; make it with 'mergedarts export --format hub'.")
    if domain in (None, "none"):
        return None
    names = ", ".join([*said["sites"], "none"])
    if domain == "auto":
        raise UserError(
            f"This export lets its router choose a domain for each prompt, which vLLM cannot; name one for the whole "
            f"server with {CHOOSE}: {names}."
        )
    if domain not in said["sites"]:
        raise UserError(f"This export has no domain '{domain}'; name one with {CHOOSE}: {names}.")
    return str(domain)


class Served:
    """The corrections of one domain in a model: at the outputs of its decoder layers, at its head, in its weights.

    Corrections of the residual stream become modules of the layers, with parameters that are loaded like any other.
    Low-rank updates of linear layers are folded into the weights before the engine sees these, rounded once.

    Args:
        model: its decoder layers are the modules of its list that is as long as the configuration says.
        config: the `config.json` of a `hub` export, as an object.

    Raises:
        UserError: the configuration names no domain to serve, or a correction that such a model cannot take.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self._final: SiteCorrection | None = None
        self._tensors: dict[str, nn.Parameter] = {}
        self._updates: dict[str, tuple[str, str]] = {}
        self._names: set[str] = set()
        self.domain = domain = chosen(config)
        if domain is None:
            return
        sites = config.mergedarts["sites"]
        before = {name for name, _ in model.named_parameters()}
        for i, entry in enumerate(sites[domain]):
            prefix = f"{OWN}corrections.{list(sites).index(domain)}._sites.{i}"
            if entry["kind"] == "linear":
                if "GPT2" in type(model).__name__:
                    raise UserError(f"Weight updates of GPT-2, which keeps weights the other way, {_cannot()}.")
                self._updates[f"{entry['site']}.weight"] = (f"{prefix}.down", f"{prefix}.up")
                continue
            site = SiteCorrection.empty(entry, entry["widths"]).requires_grad_(False)
            if entry["kind"] == "final":
                self._final = model.mergedarts_final = site
            elif not _install(model, config, entry["site"], site):
                site = SiteCorrection(site.kind)  # another process of the pipeline has this layer
            self._tensors |= {f"{prefix}.{name}": parameter for name, parameter in site.named_parameters()}
        self._names = {name for name, _ in model.named_parameters()} - before

    def parameter_names(self) -> set[str]:
        """Names in the model of the parameters that are the corrections'."""
        return self._names

    def at_head(self, output: Any, positions: torch.Tensor) -> Any:
        """The decoder's output [T, d] as it enters the head, positions [T]; what is no such state passes through."""
        if self._final is None:
            return output
        if isinstance(output, tuple):  # with states for a drafting model
            return (self.at_head(output[0], positions), *output[1:])
        return self._final(output, output, _flat(positions)) if isinstance(output, torch.Tensor) else output

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on a checkpoint's tensors by name, less the corrections' own and with updates folded in.

        The order does not matter: a weight that is updated waits for its update.

        Raises:
            UserError: a tensor is missing or has another shape than the configuration says.
        """
        parts = {part for update in self._updates.values() for part in update}
        missing = set(self._tensors) | parts | set(self._updates)
        kept: dict[str, torch.Tensor] = {}
        users = {part: weight for weight, update in self._updates.items() for part in update}
        for name, tensor in weights:
            missing.discard(name)
            if name in self._tensors:
                _fill(self._tensors[name], tensor, name)
            elif name in parts or name in self._updates:
                kept[name] = tensor
                weight = users.get(name, name)
                down, up = self._updates[weight]
                if all(part in kept for part in (weight, down, up)):
                    yield weight, _folded(kept.pop(weight), kept.pop(down), kept.pop(up), weight)
            elif not name.startswith(OWN):
                yield name, tensor
        if missing:
            raise UserError(f"The export lacks {len(missing)} of its tensors ({min(missing)}); export it again.")


def _install(model: nn.Module, config: Any, name: str, site: SiteCorrection) -> bool:
    """Have a decoder layer correct its output; False where this process does not have the layer."""
    layers = _layers(model, config)
    number = re.search(r"\.(\d+)$", name)
    if number is None or int(number[1]) >= len(layers):
        raise UserError(f"The correction's site '{name}' is not a decoder layer of {type(model).__name__}.")
    layer = layers[int(number[1])]
    if isinstance(layer, nn.Identity):
        return False
    layer.mergedarts = site
    layer.register_forward_hook(_hook(layer, site), with_kwargs=True)
    return True


def _layers(model: nn.Module, config: Any) -> nn.ModuleList:
    """The list of modules, nearest to the root, that is as long as the configuration says."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise UserError(f"No list of {count} decoder layers found in {type(model).__name__}; {OTHER}.")
    return min(lists, key=lambda item: item[0].count("."))[1]


def _hook(layer: nn.Module, site: SiteCorrection) -> Callable[..., Any]:
    """What corrects a layer's output.

    A layer that takes a residual returns (hidden, residual), and the stream is their sum; of any other the first output
    is the stream. What is subtracted is a function of the stream, and is subtracted from `hidden`.
    """
    names = list(inspect.signature(layer.forward).parameters)
    place, key = next(((names.index(key), key) for key in POSITIONS if key in names), (-1, ""))
    parted = "residual" in names
    if place < 0 and site.position is not None and site.position.size > 1:
        raise UserError(f"Layers of {type(layer).__name__} are not told positions, so this correction {_cannot()}.")

    def correct(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        positions = None
        if place >= 0:
            positions = _flat(kwargs[key] if key in kwargs else args[place])
        if not isinstance(output, tuple):
            return layer.mergedarts(output, output, positions)
        hidden, residual = output[0], output[1]
        stream = hidden + residual if parted and residual is not None else hidden
        return (layer.mergedarts(hidden, stream, positions), *output[1:])

    return correct


def _flat(positions: torch.Tensor) -> torch.Tensor:
    """[T] positions; of rotary embeddings in several axes the first, which counts tokens where all are text."""
    return positions if positions.dim() == 1 else positions[0]


def _fill(parameter: nn.Parameter, tensor: torch.Tensor, name: str) -> None:
    if parameter.shape != tensor.shape:
        raise UserError(
            f"{name} of the export has shape {list(tensor.shape)}, but its config.json says {list(parameter.shape)}; "
            "export it again."
        )
    parameter.copy_(tensor)


def _folded(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """A weight [d_out, d_in] less up down, the sum made in float32 and rounded once."""
    if not weight.is_floating_point() or weight.shape != (up.shape[0], down.shape[1]):
        raise UserError(f"The weight {name} is quantized or of another shape than its update, so that it {_cannot()}.")
    update = up.to(weight.device).float() @ down.to(weight.device).float()
    return (weight.float() - update).to(weight.dtype)


def _cannot() -> str:
    return f"cannot be served here; {OTHER}"
