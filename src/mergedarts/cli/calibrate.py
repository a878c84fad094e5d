"""`mergedarts calibrate`: the main job."""

from __future__ import annotations

from pathlib import Path

import typer

from .main import app, clean, emit, out, quiet_libraries


@app.command()
def calibrate(
    run_file: Path = typer.Argument(..., metavar="DARTS.yml", help="The run file."),
    target: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for the repaired model."),
    preset: str | None = typer.Option(None, help="'default', 'paper' or 'surgery'; wins over the run file's."),
    budget: str | None = typer.Option(None, help="Share of the model's parameters to add at most, such as 0.1%."),
    device: str | None = typer.Option(None, help="auto, cpu, cuda, cuda:1, mps."),
    dtype: str | None = typer.Option(None, help="bfloat16, float16 or float32."),
    router: bool | None = typer.Option(
        None, "--router/--no-router", help="Fit a router for domain 'auto', or leave it out."
    ),
    stream: bool | None = typer.Option(
        None, "--stream/--no-stream", help="Read layers from disk as they run; by default where a model does not fit."
    ),
    strict: bool | None = typer.Option(None, "--strict", help="Fail where a domain is not improved."),
    trust_remote_code: bool | None = typer.Option(None, "--trust-remote-code", help="Let models run their own code."),
    ray: str | None = typer.Option(
        None, "--ray", metavar="[ADDRESS]", help="A Ray task for each domain: here, or on the cluster at ADDRESS."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print darts_config.json's content."),
) -> None:
    """Fit corrections for every domain of a merged model and write the repaired model."""
    from ..config import read_run_file

    given = {
        "preset": preset, "budget": _number(budget), "device": device, "dtype": dtype, "router": router,
        "stream": stream, "strict": strict, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    run = read_run_file(run_file, given)
    quiet_libraries()
    from .. import repair
    from ..card import describe_routing
    from ..distributed import rank
    from .tables import held_out_table

    result = repair.calibrate(run, target, run_file.parent, ray)
    if rank() > 0:
        return
    if as_json:
        emit(result)
    else:
        out.print(held_out_table(result))
        for line in describe_routing(result["router"]):
            out.print(clean(f"router: {line}"), highlight=False, markup=False, soft_wrap=True)
        out.print(clean(f"repaired model written to {target}"), highlight=False, markup=False, soft_wrap=True)


def _number(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
