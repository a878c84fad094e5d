"""`mergedarts evaluate`: the field's own evaluators on repaired, merged and expert models."""

from __future__ import annotations

from pathlib import Path

import typer

from ..errors import UserError
from .main import app, clean, emit, out, quiet_libraries


@app.command()
def evaluate(
    folders: list[Path] = typer.Argument(..., metavar="DIR...", help="A repaired model, or one for each seed."),
    tasks: str = typer.Option("", help="Tasks or groups of lm-evaluation-harness, with commas between."),
    route: str = typer.Option("", help="The domain of each task: gsm8k=math,humaneval=code."),
    include_path: list[Path] = typer.Option([], help="Folder of further task files; may be given again."),
    limit: int | None = typer.Option(None, min=1, help="Examples a task, from its start."),
    num_fewshot: int | None = typer.Option(None, min=0, help="Examples in the prompt; the task's own number if open."),
    apply_chat_template: bool = typer.Option(False, "--apply-chat-template", help="Ask as a user in a chat."),
    batch_size: int = typer.Option(1, min=1, help="Requests at a time."),
    router: bool = typer.Option(False, "--router", help="Let the repaired model's router choose the domain."),
    target: Path | None = typer.Option(None, "--out", metavar="DIR", help="Folder for table, plot and answers."),
    alpaca_eval: Path | None = typer.Option(None, metavar="OUT.json", help="Write outputs for alpaca_eval to judge."),
    instructions: Path | None = typer.Option(None, metavar="FILE", help="Its instructions, JSON or JSON lines."),
    max_new_tokens: int = typer.Option(256, min=1, help="Tokens of an output at most."),
    judge: str | None = typer.Option(None, help="Judge the outputs here: a causal LM, or an OpenAI-compatible URL."),
    annotations: str = typer.Option("", help="alpaca_eval's verdicts: repaired=FILE,merged=FILE,expert=FILE."),
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
    from datasets.utils.logging import disable_progress_bar

    from ..evaluation import alpaca, report
    from ..evaluation.compare import Models, evaluate_repaired
    from ..folders import check_replaceable

    disable_progress_bar()
    if target is not None:
        check_replaceable(target, report.MARKER)
    models = Models(folders, merged, device, dtype, trust_remote_code, router)
    settings = Settings(tuple(include_path), limit, num_fewshot, apply_chat_template, batch_size, allow_code_execution)
    names, routes = _names(tasks), _pairs(route, "--route", "TASK=DOMAIN")
    own = routes.pop(alpaca.TASK, None)
    if not names and alpaca_eval is None:
        raise UserError("Nothing to evaluate; name tasks with --tasks, or a file with --alpaca-eval.")
    result = evaluate_repaired(models, names, routes, settings)
    places: dict[str, Path] = {}
    if alpaca_eval is not None:
        asked = alpaca.Asked(alpaca_eval, instructions, max_new_tokens, limit, judge, annotations_of(annotations))
        places, row = alpaca.run(models, own, asked)
        result = result if row is None else result.plus(row)
    if target is not None:
        report.write(result, target)
    if as_json:
        emit(result.as_json())
        return
    lines = [f"{name}: {place}" for name, place in places.items()]
    if result.rows:
        out.print(report.table(result))
        lines += report.legend(result)
    for line in lines:
        out.print(clean(line), highlight=False, markup=False, soft_wrap=True)
    if target is not None:
        out.print(clean(f"table, plot and answers written to {target}"), highlight=False, markup=False, soft_wrap=True)


def annotations_of(text: str) -> dict[str, Path]:
    """Verdict files by model."""
    found = {name: Path(file) for name, file in _pairs(text, "--annotations", "MODEL=FILE").items()}
    if found and set(found) != {"repaired", "merged", "expert"}:
        raise UserError("--annotations needs all three: repaired=FILE,merged=FILE,expert=FILE.")
    return found


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _pairs(text: str, option: str, form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"{option} has '{part}'; write {form}, with commas between.")
        if pairs.setdefault(key, value) != value:
            raise UserError(f"{option} gives '{key}' twice, as '{pairs[key]}' and '{value}'.")
    return pairs
