"""Export as a LoRA: a standard PEFT adapter, or the same folded into the weights of a plain checkpoint.

Knows low-rank updates of linear layers and how PEFT names them; a correction of another kind is not its affair.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..correction import Correction
from ..errors import UserError
from ..fit.linear import linear_layers, weight_of
from ..job import DomainJob, Job
from ..store import save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def lora_of(job: Job, domain: DomainJob, model: PreTrainedModel, correction: Correction) -> Correction:
    """A domain's correction as low-rank updates of linear layers (sites of kind `linear` without position).

    Args:
        job: the run that made it, and what is needed to fit anew.
        model: the merged model, uncorrected.

    Raises:
        UserError: the correction is not a LoRA.
    """
    sites = dict(correction.items())
    if not sites:
        raise UserError(f"Domain '{domain.name}' ships uncorrected, so there is nothing to export; export another one.")
    if any(site.kind != "linear" or site.relu or site.position is not None for site in sites.values()):
        raise UserError(
            f"The correction of '{domain.name}' acts on the residual stream, which a LoRA cannot; calibrate with "
            "'correction: {form: linear}' for these exports, or export as 'hub'."
        )
    return correction


def write_adapter(folder: Path, model: PreTrainedModel, correction: Correction, base: str) -> None:
    """Write a PEFT adapter: W + B A with A = down and B = -up.

    All modules are given the largest rank, padded with zeros, and alpha equal to it: servers differ in whose rank they
    divide alpha by.

    Args:
        base: name of the merged model, for `adapter_config.json`.
    """
    from peft import LoraConfig

    sites = dict(correction.items())
    rank = max(site.rank for site in sites.values())
    layers = linear_layers(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, site in sites.items():
        assert site.down is not None
        assert site.up is not None
        extra = rank - site.rank
        a, b = site.down.detach().float(), -site.up.detach().float()
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.cat([a, a.new_zeros(extra, a.shape[1])])
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.cat([b, b.new_zeros(b.shape[0], extra)], 1)
    settings = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        target_modules=sorted(sites),
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base,
        fan_in_fan_out=any(not isinstance(layers[name], torch.nn.Linear) for name in sites),
    )
    settings.save_pretrained(str(folder))
    save_tensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})


@torch.no_grad()
def fold(model: PreTrainedModel, correction: Correction) -> None:
    """Add low-rank updates to the weights of a model, the sum made in float32 and rounded once."""
    layers = linear_layers(model)
    for name, site in correction.items():
        assert site.down is not None
        assert site.up is not None
        weight = weight_of(layers[name])  # a view, also where it is kept the other way round
        update = site.up.to(weight.device).float() @ site.down.to(weight.device).float()
        weight.copy_((weight.float() - update).to(weight.dtype))
