"""`mergedarts diagnose`: where a merge drifted from its experts, before and after a repair."""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import UserError
from .main import app, clean, emit, out, quiet_libraries

_PAIR = "NAME=VALUE"


@app.command()
def diagnose(
    source: Path | None = typer.Argument(None, metavar="[DARTS.yml | DIR]", help="A run file, or a repaired model."),
    target: Path | None = typer.Option(
        None, "--out", metavar="DIR", help="Folder for report.html, drift.json, figures."
    ),
    merged: str | None = typer.Option(None, help="The merged model, without a run file or where it has moved."),
    expert: list[str] = typer.Option([], metavar=_PAIR, help="A domain's expert, such as math=./math-expert."),
    prompts: list[str] = typer.Option(
        [], metavar=_PAIR, help="A domain's calibration prompts, such as math=math.jsonl."
    ),
    held_out: list[str] = typer.Option(
        [], "--held-out", metavar=_PAIR, help="Examples to measure a domain on, in place of the share held out."
    ),
    examples: int = typer.Option(50, min=1, help="Examples a domain, from the start of a file."),
    layers: bool = typer.Option(True, help="Measure after every layer too (one more pass over the measured examples)."),
    device: str | None = typer.Option(None, help="auto, cpu, cuda, cuda:1, mps."),
    dtype: str | None = typer.Option(None, help="bfloat16, float16 or float32."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Let models run their own code."),
    as_json: bool = typer.Option(False, "--json", help="Print drift.json's content."),
) -> None:
    """Measure drift by position, entropy and layer on held-out examples, and write a report of it."""
    from ..config import parse_run, read_run_file

    experts, texts = _pairs(expert, "--expert"), _pairs(prompts, "--prompts")
    held = {name: Path(text).absolute() for name, text in _pairs(held_out, "--held-out").items()}
    if target is not None:
        from ..report import check_writable

        check_writable(target)
    given = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code or None}
    if source is not None and source.is_dir():
        quiet_libraries()
        from .. import drift as drifts

        found = drifts.diagnose_repaired(
            source, prompts=texts, experts=experts, held_out=held, examples=examples, merged=merged, layers=layers,
            device=device or "auto", dtype=dtype, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    else:
        if source is not None:
            if merged or experts or texts:
                raise UserError(f"{source} says which models and prompts; leave --merged, --expert and --prompts out.")
            run, base = read_run_file(source, given), source.parent
        else:
            domains = {name: {"expert": experts.get(name), "prompts": texts.get(name)} for name in experts | texts}
            for name, parts in domains.items():
                for key, value in parts.items():
                    if value is None:
                        raise UserError(f"Domain '{name}' has no {key}; add '--{key} {name}=...'.")
            if merged is None or not domains:
                raise UserError(
                    "Name a run file or a repaired model, or give --merged MODEL, --expert NAME=MODEL and "
                    "--prompts NAME=FILE."
                )
            settings = {name: parts | {"samples": examples} for name, parts in domains.items()}
            chosen = {key: value for key, value in given.items() if value is not None}
            run, base = parse_run({"merged": merged, "domains": settings} | chosen, "the command line"), Path.cwd()
        quiet_libraries()
        from .. import drift as drifts

        found = drifts.diagnose(run, base, held_out=held, examples=examples, layers=layers)
    if target is not None:
        from ..report import PAGE, write_report

        write_report(found, target)
    if as_json:
        emit(found.to_json())
        return
    from .tables import drift_table

    out.print(drift_table(found))
    for answer in found.answers.values():
        out.print(clean(answer.sentence), highlight=False, markup=False, soft_wrap=True)
    if target is not None:
        out.print(clean(f"report written to {target / PAGE}"), highlight=False, markup=False, soft_wrap=True)


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` options by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"{option} {text} is not of the form NAME=VALUE, such as math={value or 'PATH'}.")
        if name in found:
            raise UserError(f"{option} is given twice for '{name}'.")
        found[name] = value
    return found
