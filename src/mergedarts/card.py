"""The model card of a repaired model: how it was made, what was measured, how to load it.

Knows the contents of `darts_config.json` and Markdown; measures nothing.
"""

from __future__ import annotations

from typing import Any


def model_card(config: dict[str, Any], name: str) -> str:
    """Markdown text of the README.md in the folder of a repaired model."""
    merged, added = config["merged"], config["parameters"]
    settings = config["settings"]
    lines = [
        "---",
        "library_name: mergedarts",
        "tags: [mergedarts, model-merging, representation-surgery]",
        "---",
        "",
        f"# {shown(name)}",
        "",
        f"Corrections for the merged model `{quoted(merged['model'])}`, made with mergedarts {config['mergedarts']}. "
        f"They add {added['added']:,} parameters, {added['share']:.3%} of the model's {merged['parameters']:,}, "
        f"for {len(config['domains'])} domain(s).",
        "",
        "## Held-out measures",
        "",
        "Means over the response tokens of held-out calibration sequences, against each domain's expert. KL and NLL in "
        "nats a token; share = part of the merged-to-expert KL that is closed, with a 95% bootstrap interval over "
        "sequences.",
        "",
        "| domain | sequences | tokens | KL merged | KL repaired | share closed | agreement "
        "| NLL merged / repaired / expert | parameters |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for domain, entry in config["domains"].items():
        lines.append(_row(domain, entry))
    fit, correction = settings["fit"], settings["correction"]
    lines += [
        "",
        "## How it was made",
        "",
        f"Preset `{settings['preset']}`; fit `{fit['method']}`, loss `{fit['loss']}`, seed {fit['seed']}, "
        f"{fit['holdout']:.0%} of the sequences held out; form `{correction['form']}`; dtype `{settings['dtype']}`; "
        f"budget {settings['budget']:.3%} of the model's parameters.",
        "",
    ]
    for domain, entry in config["domains"].items():
        lines.append(
            f"- **{domain}**: expert `{quoted(entry['expert'])}`, {entry['sequences']['fit']} sequences fitted."
        )
        if not entry["shipped"]:
            lines.append("  Not improved on held-out prompts, so it ships **uncorrected**.")
        lines += [f"  {shown(line)}" for line in [*considered(entry), *entry["notes"]]]
    lines += _routing(config)
    lines += [
        "",
        "## Use",
        "",
        "```python",
        "import mergedarts",
        "",
        f'model, tokenizer, handle = mergedarts.load("{quoted(name)}", domain="{next(iter(config["domains"]))}")',
        "```",
        "",
    ]
    return "\n".join(lines)


def considered(entry: dict[str, Any]) -> list[str]:
    """What the fit of a domain chose, and the held-out errors it chose by, a line for each choice."""
    choices = entry.get("choices", {})
    places = choices.get("probes", [choices] if "held_out_error" in choices else [])
    lines = []
    if share := choices.get("svd_share_kl"):
        tried = ", ".join(f"{name}: {kl:.4f}" for name, kl in share.items())
        lines.append(
            f"share of the budget for weight updates: {choices['svd_share']:g} (KL of kept-back thirds {tried})."
        )
    for place in places:
        where = f"layer {place['layer']}" if "layer" in place else "final site"
        errors = ", ".join(f"{name}: {error:.3f}" for name, error in place["held_out_error"].items())
        lines.append(f"at {where}: position {place['position']}, ridge {place['ridge']:g} (fold errors {errors}).")
    return lines


def describe_routing(routing: dict[str, Any] | None) -> list[str]:
    """What a person is told of a router, a line each."""
    if routing is None:
        return ["none; a domain has to be named"]
    if routing.get("note") is not None:
        return [routing["note"]]
    depth, layers = routing["depth"], routing["layers"]
    where = "the input of the first layer" if depth == 0 else f"the states after layer {depth - 1}"
    cost = (
        f"runs the prompt through {depth} of {layers} layers once more"
        if routing["second_pass"]
        else "costs no second pass"
    )
    held = routing["held_out"]
    lines = [f"reads {where} of {layers}, {cost}; {routing['parameters']:,} numbers"]
    if held["sequences"]:
        lines.append(f"{held['accuracy']:.1%} of {held['sequences']} held-out prompts right")
    return lines


def _routing(config: dict[str, Any]) -> list[str]:
    """The card's section on the router."""
    routing = config.get("router")
    lines = [
        "",
        "## Router",
        "",
        *(f"{shown(line)[0].upper()}{shown(line)[1:]}." for line in describe_routing(routing)),
    ]
    if routing is None or routing.get("note") is not None:
        return lines
    columns = [*config["domains"], "unsure"]
    lines += [
        "",
        "How often each choice is made for held-out prompts of a domain, and the KL to its expert under that choice "
        "(unsure is uncorrected):",
        "",
        "| prompts of | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in routing["held_out"]["chosen"].items():
        kl = routing["kl"].get(name, {})
        cells = (f"{row[c]} ({kl[c]:.4f})" if c in kl else str(row[c]) for c in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _row(domain: str, entry: dict[str, Any]) -> str:
    table = entry["held_out"]
    if table is None:
        return f"| {domain} | 0 | 0 | not measured | | | | | {entry['parameters']:,} |"
    before, after, expert = table["merged"], table["repaired"], table["expert"]
    share = "" if table["share_closed"] is None else f"{table['share_closed']:.0%}"
    if ci := table.get("share_closed_ci"):
        share += f" [{ci[0]:.0%}, {ci[1]:.0%}]"
    return (
        f"| {domain} | {before['sequences']} | {before['tokens']} | {before['kl']:.4f} | {after['kl']:.4f} | {share} "
        f"| {before['agreement']:.1%} → {after['agreement']:.1%} "
        f"| {before['nll']:.3f} / {after['nll']:.3f} / {expert['nll']:.3f} | {entry['parameters']:,} |"
    )


def shown(value: str) -> str:
    """Text that Markdown and HTML show as it is."""
    flat = "".join(c if c.isprintable() else " " for c in value)
    for mark in "&<>":
        flat = flat.replace(mark, {"&": "&amp;", "<": "&lt;", ">": "&gt;"}[mark])
    return flat.replace("|", "\\|")


def quoted(value: str) -> str:
    """Text inside a code span or block."""
    return "".join(c if c.isprintable() and c not in '`"\\' else " " for c in value)
