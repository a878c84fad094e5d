"""Export as a model folder with remote code: the merged model, its corrections and its router in one.

Knows the files of such a folder; the code inside it comes from `remote`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError
from ..files import read_json, write_text
from ..repaired import Repaired
from .check import Difference, held_out_sequences, logits_by_domain
from .remote import class_name, remote_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODULE = "modeling_mergedarts"
#: `transformers serve` looks for a model of the second class before it takes the stock one.
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForDecision")


def write_hub(folder: Path, repaired: Repaired, config: dict[str, Any], domain: str | None) -> dict[str, Any]:
    """Write the model into a folder, load it back as a stranger would, and compare.

    Args:
        folder: where to write; exists and is empty.
        repaired: the repaired model, loaded.
        config: its `darts_config.json`.
        domain: the domain in use where a call does not say.

    Returns:
        Differences of logits by domain.
    """
    model, tokenizer, handle = repaired
    stock = type(model).__name__
    if not type(model).__module__.startswith("transformers."):
        raise UserError(f"{stock} is remote code itself, which cannot be wrapped; export a model of a stock class.")
    sequences = held_out_sequences(config, model, tokenizer)
    names: list[str | None] = [*handle.domains, None, *(["auto"] if handle.router is not None else [])]

    def choose(name: str | None) -> None:
        handle.domain = name

    before = logits_by_domain(model, sequences, names, choose, "original")
    save_hub(folder, repaired, domain)
    dtype, device = model.dtype, model.device
    handle.detach()
    loaded = load_hub(folder, dtype, device)

    def use(name: str | None) -> None:
        loaded.mergedarts.domain = name

    after = logits_by_domain(loaded, sequences, names, use, "export")
    return {str(name or "none"): Difference.of(before[name], after[name]).describe() for name in names}


def load_hub(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The exported model, by its own code."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=dtype, use_safetensors=True
    )
    return model.to(device).eval().requires_grad_(False)


def save_hub(folder: Path, repaired: Repaired, domain: str | None) -> None:
    model, tokenizer, handle = repaired
    stock = type(model).__name__
    sites = {
        name: [site.describe(where) | {"widths": list(site.widths)} for where, site in correction.items()]
        for name, correction in handle.corrections.items()
    }
    said: dict[str, Any] = {"sites": sites, "router": None}
    model.mergedarts_corrections = nn.ModuleList(handle.corrections.values())
    if handle.router is not None:
        said["router"] = {"depth": handle.router.depth, "sizes": handle.router.sizes}
        model.mergedarts_router = handle.router
    # By the names in memory: a file's own names are translated by the stock class's name alone.
    model.save_pretrained(folder, save_original_format=False)
    tokenizer.save_pretrained(folder)
    del model.mergedarts_corrections
    if handle.router is not None:
        del model.mergedarts_router
    path = folder / "config.json"
    settings = read_json(path)
    settings |= {
        "architectures": [class_name(stock)],
        "auto_map": {name: f"{MODULE}.{class_name(stock)}" for name in AUTO_CLASSES},
        "mergedarts": said,
        "domain": domain,
    }
    import json

    write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / f"{MODULE}.py", remote_code(stock))
