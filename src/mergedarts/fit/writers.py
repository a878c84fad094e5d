"""Finds the linear layer that writes last to the residual stream in each decoder layer, without a table of families.

Knows how to tell by trying; fits nothing. What is added to such a layer's output is added to the state after the
decoder layer, so a low-rank update of its weight can correct that state from the layer's own input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError
from ..features import hooked, state_of
from ..models import decoder_layers
from .linear import linear_layers, weight_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens of the trial run.
TRIAL = 8


@torch.inference_mode()
def writers(model: PreTrainedModel) -> dict[int, tuple[str, nn.Module]]:
    """By decoder layer, name and module of its last writer.

    Raises:
        UserError: a decoder layer has none, as where a norm stands between its linear layers and the stream.
    """
    width = model.get_output_embeddings().weight.shape[1]
    blocks = decoder_layers(model)
    modules = linear_layers(model)
    ids = torch.arange(1, TRIAL + 1, device=next(model.parameters()).device)[None]
    shift = torch.linspace(-1, 1, width)
    found: dict[int, tuple[str, nn.Module]] = {}
    for index, (prefix, block) in enumerate(blocks):
        plain = _after(model, block, ids)
        for name, module in reversed(list(modules.items())):
            if not name.startswith(prefix + ".") or weight_of(module).shape[0] != width:
                continue
            moved = _after(model, block, ids, module.register_forward_hook(lambda m, i, o: o + shift.to(o)))
            if moved is not None and plain is not None and _moved_by(shift, plain, moved):
                found[index] = (name, module)
                break
        if index not in found:
            raise UserError(
                f"No linear layer writes straight to the residual stream in {prefix}, so 'form: linear' cannot correct "
                "it; use 'form: residual' or 'form: svd' for this model."
            )
    return found


def _moved_by(shift: torch.Tensor, plain: torch.Tensor, moved: torch.Tensor) -> bool:
    """Whether states [1, T, d] have moved by a shift [d], as far as their dtype can tell beside large values."""
    rounding = 2 * torch.finfo(plain.dtype).eps * torch.maximum(plain.abs(), moved.abs()).float()
    error = (moved.float() - plain.float() - shift.to(plain.device)).abs()
    told = error <= 0.02 * (1 + shift.to(plain.device).abs()) + rounding
    # What a layer adds may be larger than what comes of it, and then hides the shift in a few places.
    return bool(told.float().mean() > 0.9)


def _after(model: PreTrainedModel, block: nn.Module, ids: torch.Tensor, *hooks: Any) -> torch.Tensor | None:
    """[1, T, d] the stream after a decoder layer, with hooks in place that are removed again."""
    states: list[torch.Tensor] = []
    with hooked(block.register_forward_hook(lambda m, i, o: states.append(state_of(o))), *hooks):
        model.get_decoder()(input_ids=ids, use_cache=False)
    return states[-1] if states else None
