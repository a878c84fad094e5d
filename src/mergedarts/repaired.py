"""The folder of a repaired model: written whole, checked when read, loaded for use.

Knows the files of `architecture.md`; does not know how corrections are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .card import model_card
from .correction import Correction, load_corrections, save_corrections
from .errors import UserError
from .files import new_folder, read_json, write_text
from .models import DTYPES, ModelRef, fingerprint, load_model, load_tokenizer, pick_device
from .runtime import Handle, attach

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "darts_config.json"
FORMAT = 1


@dataclass(frozen=True)
class Repaired:
    """A repaired model in memory: unpacks to model, tokenizer and handle."""

    model: PreTrainedModel
    tokenizer: Any
    handle: Handle

    def __iter__(self) -> Any:
        return iter((self.model, self.tokenizer, self.handle))


def write_repaired(out: Path, config: dict[str, Any], corrections: dict[str, Correction]) -> None:
    """Write corrections, `darts_config.json` and the model card; the old folder stands until the new one is whole."""
    import json

    with new_folder(out, CONFIG) as folder:
        full = {"format": FORMAT, **config, "sites": save_corrections(folder, corrections)}
        write_text(folder / CONFIG, json.dumps(full, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / "README.md", model_card(full, out.name))


def read_config(folder: Path) -> dict[str, Any]:
    """The `darts_config.json` of a repaired model, checked for its format."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a repaired model (it has no {CONFIG}); make one with 'mergedarts calibrate'.")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or not {"format", "merged", "domains", "sites"} <= set(config):
        raise UserError(f"{folder / CONFIG} lacks what a repaired model needs; calibrate again.")
    if config["format"] != FORMAT:
        raise UserError(f"{folder} has format {config['format']}, this mergedarts reads {FORMAT}; update it.")
    return config


def read_corrections(folder: Path) -> dict[str, Correction]:
    """The corrections of a repaired model by domain."""
    return load_corrections(folder, read_config(folder)["sites"])


def load(
    folder: str | Path,
    *,
    merged: str | None = None,
    domain: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> Repaired:
    """Load a repaired model.

    Args:
        folder: what `calibrate` wrote.
        merged: where the merged model is now, if it has moved.
        domain: the domain to begin with; None is the uncorrected model.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        dtype: `bfloat16`, `float16` or `float32`; None takes that of the calibration.

    Returns:
        Model, tokenizer and handle; `model, tokenizer, handle = load(...)` works.

    Raises:
        UserError: the folder is not a repaired model, or the merged model is missing or another one.
    """
    folder = Path(folder)
    config = read_config(folder)
    corrections = read_corrections(folder)
    made_for = config["merged"]
    ref = ModelRef.parse(merged or made_for["model"], trust_remote_code=made_for.get("trust_remote_code", False))
    if merged is None and ref.model.startswith("/") and not Path(ref.model).exists():
        raise UserError(f"The merged model of {folder} is gone from {ref.model}; say where it is with 'merged'.")
    if fingerprint(ref) != made_for["fingerprint"]:
        raise UserError(
            f"The corrections in {folder} were made for another model than {ref} is now; calibrate on this one again."
        )
    torch_dtype: torch.dtype = DTYPES[dtype or config["settings"]["dtype"]]
    model = load_model(ref, torch_dtype, pick_device(device))
    return Repaired(model, load_tokenizer(ref), attach(model, corrections, domain))
