"""`mergedarts evaluate`: the field's own evaluators on repaired, merged and expert models."""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import UserError
from .main import app, clean, emit, out, quiet_libraries


@app.command()
def evaluate(
    folders: list[Path] = typer.Argument(..., metavar="DIR...", help="A repaired model, or one for each seed."),
    tasks: str = typer.Option(..., help="Tasks or groups of lm-evaluation-harness, with commas between."),
    route: str = typer.Option("", help="The domain of each task: gsm8k=math,humaneval=code."),
    include_path: list[Path] = typer.Option([], help="Folder of further task files; may be given again."),
    limit: int | None = typer.Option(None, min=1, help="Examples a task, from its start."),
    num_fewshot: int | None = typer.Option(None, min=0, help="Examples in the prompt; the task's own number if open."),
    apply_chat_template: bool = typer.Option(False, "--apply-chat-template", help="Ask as a user in a chat."),
    batch_size: int = typer.Option(1, min=1, help="Requests at a time."),
    router: bool = typer.Option(False, "--router", help="Let the repaired model's router choose the domain."),
    target: Path | None = typer.Option(None, "--out", metavar="DIR", help="Folder for table, plot and answers."),
    allow_code_execution: bool = typer.Option(
        False, "--allow-code-execution", help="Run code that the models write, in a sandbox."
    ),
    merged: str | None = typer.Option(None, help="Where the merged model is now, if it has moved."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:1, mps."),
    dtype: str | None = typer.Option(None, help="bfloat16, float16 or float32; the calibration's if open."),
    trust_remote_code: bool = typer.Option(False, help="Let models run code of their own."),
    as_json: bool = typer.Option(False, "--json", help="Print the comparisons as JSON."),
) -> None:
    """Score repaired, merged and expert models by lm-evaluation-harness and compare them example by example."""
    quiet_libraries()
    from ..evaluation.harness import Settings, check_installed

    check_installed()
    from ..evaluation import report
    from ..evaluation.compare import Models, evaluate_repaired
    from ..files import check_replaceable

    if target is not None:
        check_replaceable(target, report.MARKER)
    models = Models(folders, merged, device, dtype, trust_remote_code, router)
    settings = Settings(tuple(include_path), limit, num_fewshot, apply_chat_template, batch_size, allow_code_execution)
    result = evaluate_repaired(models, _names(tasks), _pairs(route), settings)
    if target is not None:
        report.write(result, target)
    if as_json:
        emit(result.as_json())
        return
    out.print(report.table(result))
    for line in report.legend(result):
        out.print(clean(line), highlight=False, markup=False, soft_wrap=True)
    if target is not None:
        out.print(clean(f"table, plot and answers written to {target}"), highlight=False, markup=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError("--tasks is empty; name one or more tasks, such as --tasks gsm8k,ifeval.")
    return names


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        task, equals, domain = (piece.strip() for piece in part.partition("="))
        if not (task and equals and domain):
            raise UserError(f"--route has '{part}'; write TASK=DOMAIN, with commas between.")
        if pairs.setdefault(task, domain) != domain:
            raise UserError(f"--route gives '{task}' two domains, '{pairs[task]}' and '{domain}'.")
    return pairs
