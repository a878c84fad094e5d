"""The bridge to AlpacaEval: outputs in the format that `alpaca_eval` judges, and its verdicts read back.

Knows the two formats; the judging is alpaca_eval's or a judge's of `judge`, the statistics are `statistics`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..claims import made_once
from ..config import Domain
from ..errors import UserError
from ..features import continuations
from ..files import cache_dir, digest_text, read_json, write_text
from ..models import ModelRef, eos_ids
from ..progress import bar
from ..prompts import Example, PromptSet, encode, read_examples
from .compare import Models, Row
from .judge import Judge, open_judge, preference
from .statistics import compare

TASK = "alpaca_eval"
MAX_TOKENS = 2048


@dataclass(frozen=True)
class Asked:
    """What a user asks of the bridge.

    Attributes:
        out: the file of the repaired model's outputs; the others stand beside it.
        instructions: the file of instructions.
        new_tokens: length of an output at most.
        limit: instructions, from the start of the file.
        judge: a model or an address; None where alpaca_eval is to judge.
        annotations: its verdicts by model, where it has judged.
    """

    out: Path
    instructions: Path | None
    new_tokens: int
    limit: int | None
    judge: str | None
    annotations: dict[str, Path]


def run(models: Models, domain: str | None, asked: Asked) -> tuple[dict[str, Path], Row | None]:
    """Write the outputs of the three models; with verdicts on them, also compare.

    Returns:
        The files of outputs by model, and the row of the table where there are verdicts.
    """
    domains = list(models.domains)
    domain = domains[0] if domain is None and len(domains) == 1 else domain
    if domain not in domains:
        raise UserError(f"Outputs for alpaca_eval need a domain; add --route {TASK}=DOMAIN of {', '.join(domains)}.")
    if len(models.folders) > 1:
        raise UserError("The outputs for alpaca_eval are of one repaired model; give one folder.")
    if asked.instructions is None:
        raise UserError("The outputs for alpaca_eval need instructions; give --instructions FILE.")
    if asked.judge and asked.annotations:
        raise UserError("Give --judge or --annotations, not both.")
    instructions = read_instructions(asked.instructions, asked.limit)
    judge = open_judge(asked.judge, models.device) if asked.judge else None
    written = outputs(models, domain, instructions, asked.new_tokens)
    places = write_outputs(asked.out, instructions, written)
    verdicts = judge_outputs(judge, places, instructions, written) if judge else asked.annotations
    if not verdicts:
        return places, None
    scores = {name: read_annotations(verdicts[name], instructions, written[name]) for name in written}
    compared = compare(scores["merged"], scores["repaired"], scores["expert"])
    return places, Row(TASK, domain, "win rate", "none", True, compared)


@dataclass(frozen=True)
class Instruction:
    """An instruction and the answer that others are measured against, where there is one."""

    text: str
    reference: str | None


def read_instructions(path: Path, limit: int | None) -> list[Instruction]:
    """Instructions from AlpacaEval's own JSON list (`instruction`, `output`), or from a prompt file of the project."""
    if path.suffix.lower() == ".json" and isinstance(rows := read_json(path), list):
        try:
            found = [Instruction(str(row["instruction"]), row.get("output")) for row in rows]
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: each entry needs 'instruction' (and 'output', for a reference).") from None
    else:
        domain = Domain(expert="", prompts=str(path), samples=100_000)
        turns = [example.turns for example in read_examples(domain, TASK, Path.cwd())]
        found = [Instruction(t[0][1], t[1][1] if len(t) > 1 else None) for t in turns]
    if not found:
        raise UserError(f"{path} holds no instructions.")
    return found[:limit]


def outputs(models: Models, domain: str, instructions: list[Instruction], new_tokens: int) -> dict[str, list[str]]:
    """Greedy answers of the repaired model, the merged model and the expert, each kept on disk when it is whole."""
    mode = "auto" if models.router else domain
    makers: dict[str, tuple[str, Callable[[], Any]]] = {
        "repaired": (models.print_of(0, mode), lambda: models.repaired(0, domain, 1)),
        "merged": (models.print_of(None, ""), lambda: models.repaired(0, None, 1)),
        "expert": (models.expert_print(domain), lambda: models.expert(domain, 1)),
    }
    texts = [instruction.text for instruction in instructions]
    written = {}
    for name, (print_, make) in makers.items():
        path = cache_dir() / "outputs" / f"{digest_text(print_, str(new_tokens), *texts)}.checked"

        def work(make: Callable[[], Any] = make) -> str:
            return json.dumps(_answers(make(), texts, new_tokens), ensure_ascii=False)

        written[name] = list(json.loads(made_once(path, work)))
    return written


def _answers(lm: Any, texts: list[str], new_tokens: int) -> list[str]:
    tokenizer = lm.tokenizer
    eos = eos_ids(ModelRef(str(lm.model.config._name_or_path)), tokenizer)
    examples = [Example((("user", text),)) for text in texts]
    prompts = PromptSet(tuple(encode(examples, tokenizer, eos, MAX_TOKENS)))
    written = continuations(lm.model, prompts, eos, new_tokens, lm.title)
    new = [after.ids[len(before) :] for before, after in zip(prompts.sequences, written, strict=True)]
    return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in new]


def write_outputs(path: Path, instructions: list[Instruction], written: dict[str, list[str]]) -> dict[str, Path]:
    """Write one file a model, the repaired model's at `path`; returns them by model."""
    places = {name: path if name == "repaired" else path.with_suffix(f".{name}.json") for name in written}
    for name, place in places.items():
        rows = [
            {"instruction": instruction.text, "output": output, "generator": f"{path.stem}, {name}"}
            for instruction, output in zip(instructions, written[name], strict=True)
        ]
        write_text(place, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    return places


def references(instructions: list[Instruction], written: dict[str, list[str]]) -> list[str]:
    """What outputs are judged against: the references of the file, or the merged model's outputs where it has none."""
    given = [instruction.reference for instruction in instructions]
    return written["merged"] if any(text is None for text in given) else [str(text) for text in given]


def judge_outputs(
    judge: Judge, places: dict[str, Path], instructions: list[Instruction], written: dict[str, list[str]]
) -> dict[str, Path]:
    """Let a judge compare every output with its reference, and write its verdicts as alpaca_eval does."""
    against = references(instructions, written)
    found = {}
    with bar(f"judge {judge.name}"[:60], len(written) * len(instructions), "pairs") as advance:
        for name, outputs_ in written.items():
            rows = []
            for instruction, reference, output in zip(instructions, against, outputs_, strict=True):
                value = 1.5 if output == reference else preference(judge, instruction.text, reference, output)
                rows.append(
                    {"instruction": instruction.text, "output_1": reference, "output_2": output,
                     "annotator": judge.name, "preference": value}
                )  # fmt: skip
                advance(1)
            found[name] = places[name].with_suffix(".annotations.json")
            write_text(found[name], json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    return found


def read_annotations(path: Path, instructions: list[Instruction], written: list[str]) -> list[float]:
    """Scores from 0 (the reference is better) to 1 (the output is), in the order of the instructions.

    Raises:
        UserError: not annotations, an instruction without a verdict, or a verdict on another output.
    """
    rows = read_json(path)
    try:
        verdicts = {(str(row["instruction"]), str(row["output_2"])): row["preference"] for row in rows}
    except (KeyError, TypeError):
        raise UserError(f"{path} is not alpaca_eval's annotations.json; it lacks 'output_2' or 'preference'.") from None
    scores = []
    for instruction, output in zip(instructions, written, strict=True):
        value = verdicts.get((instruction.text, output))
        if not isinstance(value, int | float) or math.isnan(value):
            raise UserError(
                f"{path} has no verdict on this model's output for {instruction.text[:60]!r}; judge the outputs again."
            )
        # alpaca_eval writes 1 where the reference wins, 2 where the output does, 1.5 (once 0) for a draw.
        scores.append(0.5 if value == 0 else float(value) - 1)
    return scores
