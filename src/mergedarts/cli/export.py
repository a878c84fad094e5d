"""`mergedarts export`: a repaired model for other tools."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import typer

from .main import app, clean, emit, out, quiet_libraries


class Form(str, Enum):
    """What an export is written as."""

    hub = "hub"
    lora = "lora"
    folded = "folded"


@app.command()
def export(
    folder: Path = typer.Argument(..., metavar="DIR", help="A repaired model."),
    form: Form = typer.Option(..., "--format", help="A model folder with remote code, PEFT adapters, or a checkpoint."),
    target: Path = typer.Option(..., "--out", metavar="OUT", help="Folder to write."),
    domain: str | None = typer.Option(
        None, help="hub: the domain in use by default (auto, none); lora: one, or all; folded: the one to fold in."
    ),
    rank: int = typer.Option(8, min=1, help="Of the LoRA that is fitted where a correction is not one by nature."),
    force: bool = typer.Option(False, "--force", help="Write a LoRA that keeps less than half of the gain."),
    merged: str | None = typer.Option(None, help="Where the merged model is now, if it has moved."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:1, mps."),
    push_to_hub: str | None = typer.Option(None, metavar="USER/NAME", help="Put it on the Hugging Face hub, private."),
    as_json: bool = typer.Option(False, "--json", help="Print mergedarts_export.json's content."),
) -> None:
    """Write a repaired model for other tools, and compare what they will load with the original."""
    quiet_libraries()
    from .. import export as exports
    from .tables import export_table

    said = exports.export(
        folder, form.value, target, domain=domain, rank=rank, force=force, merged=merged, device=device
    )
    pushed = exports.push(target, push_to_hub) if push_to_hub else None
    if as_json:
        emit(said | ({"pushed": pushed} if pushed else {}))
        return
    out.print(export_table(said))
    out.print(clean(f"written to {target}"), highlight=False, markup=False, soft_wrap=True)
    if pushed:
        out.print(clean(f"pushed to {pushed}"), highlight=False, markup=False, soft_wrap=True)
