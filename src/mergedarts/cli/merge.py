"""`mergedarts merge`: run a mergekit config."""

from __future__ import annotations

from pathlib import Path

import typer

from .main import app, clean, emit, out, quiet_libraries


@app.command()
def merge(
    config: Path = typer.Argument(..., metavar="MERGE.yml", help="A mergekit config; experts may be 'model+adapter'."),
    target: Path = typer.Argument(..., metavar="OUT", help="Folder for the merged model."),
    trust_remote_code: bool = typer.Option(False, help="Let models run code of their own."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Merge models as a mergekit config says."""
    quiet_libraries()
    from .. import merging

    merging.merge(config, target, trust_remote_code)
    if as_json:
        emit({"merged": str(target)})
    else:
        out.print(clean(f"merged model written to {target}"), highlight=False, markup=False, soft_wrap=True)
