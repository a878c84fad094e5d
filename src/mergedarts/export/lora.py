"""Export as a LoRA: a standard PEFT adapter, or the same folded into the weights of a plain checkpoint.

Knows low-rank updates of linear layers and how PEFT names them; how they are fitted where a correction is of another
kind is the affair of `fit`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..correction import Correction
from ..errors import UserError
from ..features import Readout
from ..fit import expert_extras, fit_domain, layers_needed
from ..fit.linear import linear_layers, weight_of
from ..fit.plan import wants_entropy
from ..job import DomainJob, Job, run_expert
from ..store import save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_lora(correction: Correction) -> bool:
    """Whether a correction is low-rank updates of linear layers and nothing else."""
    return all(site.kind == "linear" and not site.relu and site.position is None for _, site in correction.items())


def lora_job(job: Job, rank: int) -> Job:
    """The run with low-rank updates of some rank where the residual stream is written, in place of its own form."""
    form = job.run.correction.model_copy(update={"form": "linear", "sites": "all", "rank": rank, "position": "auto"})
    fit = job.run.fit.model_copy(update={"method": "closed-form", "objective": "states", "loss": "auto"})
    return replace(job, run=job.run.model_copy(update={"correction": form, "fit": fit}))


def lora_of(
    job: Job, domain: DomainJob, model: PreTrainedModel, correction: Correction, fitted: list[int], rank: int
) -> tuple[Correction, bool]:
    """A domain's correction as low-rank updates of linear layers.

    Where it is not one by nature, updates of the layers that write to the residual stream are fitted in closed form to
    the same states of the expert on the same sequences, in the same metric, in one sweep.

    Args:
        job: the run that made the correction.
        model: the merged model, uncorrected.
        fitted: the sequences the correction was fitted on.
        rank: of the updates that are fitted.

    Returns:
        The updates, and whether they were fitted anew.

    Raises:
        UserError: the domain has no correction, or the model has no layer that writes straight to the stream.
    """
    if not correction:
        raise UserError(f"Domain '{domain.name}' ships uncorrected, so there is nothing to export; export another one.")
    if is_lora(correction):
        return correction, False
    linear = lora_job(job, rank)
    domain, expert = run_expert(linear, domain, layers_needed(linear), entropies=wants_entropy(linear))
    expert_extras(linear, domain, fitted, expert)
    del expert
    return fit_domain(linear, domain, model, Readout(model), fitted).correction, True


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
