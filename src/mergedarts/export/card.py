"""The model card of an export: what it is, how to load it, and how it differs from the repaired model.

Knows the contents of `mergedarts_export.json` and Markdown; measures nothing.
"""

from __future__ import annotations

from typing import Any

from ..card import quoted, shown

_USE = {
    "hub": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
model.generate(**inputs, domain="{domain}")  # or a list with one domain a row; "auto", "none"
```

`domain` is an argument of `forward` and `generate`; where it is not given, `domain` in config.json says
(`from_pretrained(..., domain="{domain}")` sets it). Without `trust_remote_code` the uncorrected merge is loaded.
""",
    "lora": """```python
from peft import PeftModel

model = PeftModel.from_pretrained(merged_model, "{name}")
```
""",
    "folded": """A plain checkpoint of its architecture, with no code of its own; it answers as domain `{domain}`.
""",
}


def export_card(said: dict[str, Any], config: dict[str, Any], name: str) -> str:
    """Markdown text of the README.md of an export."""
    form = said["format"]
    domain = next(iter(said.get("domains") or config["domains"]))
    lines = [
        "---",
        f"library_name: {'peft' if form == 'lora' else 'transformers'}",
        "tags: [mergedarts, model-merging]",
        "---",
        "",
        f"# {shown(name)}",
        "",
        f"The merged model `{quoted(config['merged']['model'])}` repaired by mergedarts {config['mergedarts']} and "
        f"exported as `{form}`. Domains: {', '.join(said.get('domains') or config['domains'])}.",
        "",
        "## Use",
        "",
        _USE[form].format(name=quoted(name), domain=domain),
        "## Checked against the repaired model",
        "",
        *(_logits(said["logits"]) if form == "hub" else _costs(said["domains"])),
    ]
    return "\n".join(lines) + "\n"


def _logits(differences: dict[str, Any]) -> list[str]:
    lines = [
        "Logits of the export as loaded back against those of the repaired model, on held-out prompts: a domain's own, "
        "or all domains' where none is named.",
        "",
        "| domain in use | tokens | largest absolute difference | KL, nats a token |",
        "|---|---|---|---|",
    ]
    return lines + [
        f"| {name} | {d['tokens']} | {d['largest']:.3g} | {d['kl']:.3g} |" for name, d in differences.items()
    ]


def _costs(domains: dict[str, Any]) -> list[str]:
    lines = [
        "KL to the expert in nats a token over response tokens of held-out sequences, of the merged model, of the full "
        "correction and of this export as loaded back; kept = the export's gain over the full correction's, with a 95% "
        "bootstrap interval over sequences.",
        "",
        "| domain | sequences | tokens | KL merged | KL corrected | KL exported | kept | rank | made |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {name} | {d['sequences']} | {d['tokens']} | {d['kl']['merged']:.4f} | {d['kl']['corrected']:.4f} "
        f"| {d['kl']['exported']:.4f} | {kept(d)} | {d['rank']} "
        f"| {'fitted to the same states' if d['fitted'] else 'the correction itself'} |"
        for name, d in domains.items()
    ]


def kept(d: dict[str, Any]) -> str:
    """The share of the gain that an export keeps, as text."""
    if d["kept"] is None:
        return "no gain"
    low_high = f" [{d['kept_ci'][0]:.0%}, {d['kept_ci'][1]:.0%}]" if "kept_ci" in d else ""
    return f"{d['kept']:.0%}{low_high}"
