"""Exports of a repaired model, for tools that have never heard of mergedarts.

Knows the forms, their folders and when one is refused; each form is in a module beside this one.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import __version__
from ..checksums import write_sums
from ..domains import LEAST_GAIN, split_of
from ..errors import UserError
from ..features import Readout
from ..files import write_text
from ..folders import check_replaceable, new_folder
from ..heldout import HeldOut
from ..job import Job, run_expert
from ..measures import TokenMeasures, bootstrap, ratio
from ..models import ModelRef, load_model, load_tokenizer
from ..progress import say
from ..repaired import job_of, load, read_config, read_corrections
from .card import export_card
from .hub import write_hub
from .lora import fold, lora_of, write_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Form = Literal["hub", "lora", "folded"]
MARKER = "mergedarts_export.json"
#: Share of the full correction's gain below which a LoRA is refused.
LEAST_KEPT = 0.5
#: Of a LoRA that is fitted to do the job of a correction of the residual stream.
RANK = 8


def export(
    folder: str | Path,
    form: Form,
    out: str | Path,
    *,
    domain: str | None = None,
    rank: int = RANK,
    force: bool = False,
    merged: str | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Export a repaired model, load the export back, and compare it with the original on held-out prompts.

    Args:
        folder: the repaired model.
        form: `hub`, a model folder with remote code; `lora`, a PEFT adapter a domain; `folded`, a plain checkpoint.
        out: the folder to write; an earlier export there is replaced when the new one is whole.
        domain: `hub`: the domain in use where a call does not say (`auto` where there is a router, else none);
            `lora`: one domain, or all, each in a folder of its name; `folded`: the one to fold in.
        rank: of the LoRA that is fitted where a correction is not one by nature.
        force: write a LoRA that keeps less than half of what the correction gains.
        merged: where the merged model is now, if it has moved.

    Returns:
        What `mergedarts_export.json` holds: the form, and the differences by domain.

    Raises:
        UserError: an unknown domain, a correction that cannot be exported so, or one that would lose too much.
    """
    folder, out = Path(folder), Path(out)
    config = read_config(folder)
    known = list(config["domains"])
    every = form == "lora" and domain in (None, "all")
    allowed = {"hub": [*known, "auto", "none"], "lora": [*known, "all"], "folded": known}[form]
    if domain is not None and domain not in allowed:
        raise UserError(f"{folder} has no domain '{domain}' to export; choose one of {', '.join(allowed)}.")
    if form == "folded" and domain is None:
        raise UserError(f"A folded export holds one domain; choose it with --domain: {', '.join(known)}.")
    check_replaceable(out, MARKER)
    said: dict[str, Any] = {"format": form, "mergedarts": __version__, "merged": config["merged"]["model"]}
    with new_folder(out, MARKER) as target:
        if form == "hub":
            repaired = load(folder, merged=merged, device=device)
            if domain == "auto" and repaired.handle.router is None:
                raise UserError(f"{folder} has no router, so 'auto' cannot be its domain; name one, or none.")
            default = domain or ("auto" if repaired.handle.router is not None else "none")
            said["domain"] = default
            said["logits"] = write_hub(target, repaired, config, None if default == "none" else default)
        else:
            said["domains"] = {}
            shipped = [name for name, entry in config["domains"].items() if entry["shipped"]]
            job = job_of(folder, device, merged)
            for name in shipped if every else [str(domain)]:
                place = target / name if every else target
                said["domains"][name] = _low_rank(job, folder, name, form, place, rank, force)
        write_text(target / MARKER, json.dumps(said, indent=2, ensure_ascii=False) + "\n")
        card = export_card(said, config, out.name)
        write_text(target / "README.md", card)
        for name in said.get("domains", {}):
            if (target / name).is_dir():
                write_text(target / name / "README.md", card)
                write_sums(target / name)  # each adapter is a folder that is used by itself
        write_sums(target)
    return said


def _low_rank(job: Job, folder: Path, name: str, form: Form, place: Path, rank: int, force: bool) -> dict[str, Any]:
    """Write one domain as an adapter or folded, and measure it as loaded back."""
    domain = next(d for d in job.domains if d.name == name)
    domain, expert = run_expert(job, domain, [])
    del expert
    fitted, held = split_of(job, domain)
    model = job.load(job.merged)
    full = read_corrections(folder)[name]
    found, fitted_anew = lora_of(job, domain, model, full, fitted, rank)
    check = HeldOut(job, domain, model, Readout(model), held or fitted)
    before, after = check.merged(), check.corrected(full)
    del check
    place.mkdir(exist_ok=True)
    if form == "lora":
        write_adapter(place, model, found, str(job.merged))
        loaded = _with_adapter(model, place)
    else:
        fold(model, found)
        model.save_pretrained(place)
        load_tokenizer(job.merged).save_pretrained(place)
        del model
        gc.collect()
        loaded = load_model(ModelRef(str(place)), job.dtype, job.device)
    exported = HeldOut(job, domain, loaded, Readout(loaded), held or fitted).running()
    table = _cost(before, after, exported)
    kept = table["kept"]
    say(f"{name}: keeps {kept:.0%} of the gain" if kept is not None else f"{name}: no gain to keep")
    if kept is not None and kept < LEAST_KEPT and not force:
        raise UserError(
            f"As a LoRA the correction of '{name}' keeps {kept:.0%} of its gain on held-out prompts; give a higher "
            "--rank, or write it all the same with --force."
        )
    described = {
        "sites": len(dict(found.items())),
        "rank": max(site.rank for _, site in found.items()),
        "parameters": found.parameter_count,
        "fitted": fitted_anew,
    }
    return table | described


def _with_adapter(model: PreTrainedModel, place: Path) -> PreTrainedModel:
    """The model with an adapter on, as PEFT loads it."""
    from peft import PeftModel

    wrapped: PreTrainedModel = PeftModel.from_pretrained(model, str(place)).get_base_model()
    return wrapped.eval()


def _cost(before: TokenMeasures, after: TokenMeasures, exported: TokenMeasures) -> dict[str, Any]:
    """Held-out KL of merged model, full correction and export, the shares closed, and how much of the gain is kept."""
    samples = {"merged": before, "corrected": after, "exported": exported}
    kl = {key: float(sample.means()["kl"] or 0.0) for key, sample in samples.items()}
    out: dict[str, Any] = {"kl": kl, "tokens": len(before.kl), "sequences": int(before.sequence.unique().numel())}
    gain = kl["merged"] - kl["corrected"]
    out["share_closed"] = (
        {key: 1 - kl[key] / kl["merged"] for key in ("corrected", "exported")} if kl["merged"] else None
    )
    out["kept"] = (kl["merged"] - kl["exported"]) / gain if gain > LEAST_GAIN else None
    if out["kept"] is not None and out["sequences"] > 1:
        out["kept_ci"] = list(
            bootstrap(
                samples,
                lambda m: ratio(m["merged"]["kl"] - m["exported"]["kl"], m["merged"]["kl"] - m["corrected"]["kl"]),
            )
        )
    return out


def push(out: str | Path, repository: str, api: Any = None) -> str:
    """Put an export on the Hugging Face hub, as a private repository where there is none yet.

    Args:
        repository: `user/name`.
        api: a `huggingface_hub.HfApi`, for another endpoint or token than the environment's.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = api or HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(out), commit_message="Export of mergedarts"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise UserError(f"{repository} could not be written on the hub ({reason}); the export is in {out}.") from None
