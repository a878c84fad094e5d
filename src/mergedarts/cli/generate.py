"""`mergedarts generate`: text from a repaired model."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from ..errors import UserError
from .main import app, clean, emit, out, quiet_libraries


@app.command()
def generate(
    folder: Path = typer.Argument(..., metavar="DIR", help="A repaired model."),
    domain: str = typer.Option(
        ..., "--domain", help="A domain of the model, 'auto' to choose by the prompt, 'none' for no correction."
    ),
    prompt: str | None = typer.Option(None, "--prompt", help="The prompt; read from stdin where it is not given."),
    max_new_tokens: int = typer.Option(256, min=1, help="Tokens to write at most."),
    merged: str | None = typer.Option(None, help="Where the merged model is now, if it has moved."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:1, mps."),
    trust_remote_code: bool = typer.Option(False, help="Let the merged model run code of its own."),
    as_json: bool = typer.Option(False, "--json", help="Print prompt, domain and text as JSON."),
) -> None:
    """Answer a prompt, greedily, with one domain's correction."""
    from ..repaired import load, read_config

    known = read_config(folder)["domains"]
    if domain not in ("none", "auto") and domain not in known:
        raise UserError(f"{folder} has no domain '{domain}'; choose one of {', '.join(known)}, auto or none.")
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise UserError("The prompt is empty; give --prompt TEXT or write it to stdin.")
    from ..prompts import MAX_CHARACTERS, check_text

    check_text(text, "the prompt")
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"The prompt has more than {MAX_CHARACTERS:,} characters; cut it.")
    quiet_libraries()
    from ..generation import answer

    repaired = load(
        folder,
        merged=merged,
        domain=None if domain == "none" else domain,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    written = answer(repaired.model, repaired.tokenizer, text, max_new_tokens)
    chosen = repaired.handle.chosen
    used = domain if chosen is None else chosen[0] or "none"
    if as_json:
        emit({"domain": used, "prompt": text, "text": written})
    else:
        out.print(clean(written), highlight=False, markup=False, soft_wrap=True)
