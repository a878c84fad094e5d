"""`mergedarts info`: what a repaired model is."""

from __future__ import annotations

from pathlib import Path

import typer

from .main import app, clean, emit, out


@app.command()
def info(
    folder: Path = typer.Argument(..., metavar="DIR", help="A repaired model."),
    as_json: bool = typer.Option(False, "--json", help="Print darts_config.json's content."),
) -> None:
    """Show a repaired model's origin, domains, size, settings and held-out figures."""
    from ..repaired import read_config, read_corrections, read_router

    config = read_config(folder)
    read_corrections(folder), read_router(folder)  # a folder whose parts do not match is said here, not at serving time
    if as_json:
        emit(config)
        return
    from ..card import considered, describe_routing
    from .tables import held_out_table, routing_table

    merged, settings = config["merged"], config["settings"]
    fit, correction = settings["fit"], settings["correction"]
    lines = [
        f"merged model  {merged['model']} ({merged['parameters']:,} parameters)",
        f"fit           preset {settings['preset']}, {fit['method']}, loss {fit['loss']}, seed {fit['seed']}, "
        f"form {correction['form']}, budget {settings['budget']:.3%}",
    ]
    for name, entry in config["domains"].items():
        sites = config["sites"][name]
        where = "none (ships uncorrected)" if not entry["shipped"] else _sites(sites)
        lines.append(
            f"{name:<13} expert {entry['expert']}; {entry['sequences']['fit']} sequences fitted; sites: {where}"
        )
        lines += [f"{'':<13} {line}" for line in considered(entry)]
        lines += [f"{'':<13} note: {note}" for note in entry["notes"]]
    lines += [f"{'router':<13} {line}" for line in describe_routing(config.get("router"))]
    for line in lines:
        out.print(clean(line), highlight=False, markup=False, soft_wrap=True)
    out.print(held_out_table(config))
    if (config.get("router") or {}).get("kl"):
        out.print(routing_table(config))


def _sites(sites: list[dict[str, object]]) -> str:
    if len(sites) == 1:
        return f"{sites[0]['site']} of rank {sites[0]['rank']}"
    ranks: dict[str, list[int]] = {}
    for site in sites:
        ranks.setdefault(str(site["kind"]), []).append(int(str(site["rank"])))
    return "; ".join(f"{len(of)} {kind}, ranks {min(of)} to {max(of)}" for kind, of in ranks.items())
