"""Runs lm-evaluation-harness on one model and task after another, and keeps what each example scored.

Knows the harness's tasks, its evaluator and the store of results; knows no statistics and no tables.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..claims import made_once
from ..errors import UserError
from ..files import cache_dir, digest_text
from .code_eval import refused_code_eval, sandboxed, sandboxed_code_eval

if TYPE_CHECKING:
    from .lm import CausalLM

FORMAT = "1"
#: The harness's own seeds: of Python, numpy, torch and of the choice of few-shot examples.
SEEDS = (0, 1234, 1234, 1234)


@dataclass(frozen=True)
class Settings:
    """What is asked of the harness.

    Attributes:
        include: folders of further task files.
        limit: examples a task, from its start; None for all.
        fewshot: examples in the prompt; None for the task's own number.
        chat: put prompts through the chat template.
        batch_size: requests at a time.
        allow_code: run the code that models write, where a task judges by that.
    """

    include: tuple[Path, ...] = ()
    limit: int | None = None
    fewshot: int | None = None
    chat: bool = False
    batch_size: int = 1
    allow_code: bool = False


@dataclass(frozen=True)
class TaskScores:
    """Scores of one model on one task.

    Attributes:
        examples: ids of the examples, in the order of the scores.
        scores: by metric and filter, one number an example.
        higher_is_better: by metric and filter.
        aggregate: the harness's own figures, by metric and filter.
        left_out: metrics that are not a mean over examples, which paired statistics need.
        answers: what the model answered, by example, as the harness logs it.
    """

    examples: list[int]
    scores: dict[tuple[str, str], list[float]]
    higher_is_better: dict[tuple[str, str], bool]
    aggregate: dict[tuple[str, str], float]
    left_out: list[str]
    answers: list[Any]


def check_installed() -> None:
    """Raise `UserError` where the harness is not installed."""
    if find_spec("lm_eval") is None:
        raise UserError("Evaluation needs lm-evaluation-harness; pip install 'mergedarts[eval]'.")


class Tasks:
    """The tasks of a run, by name, loaded anew for each model.

    Args:
        names: tasks, groups or tags of the harness or of the folders of `settings.include`.

    Raises:
        UserError: a task that is not there, whose data cannot be loaded, or that runs code without leave.
    """

    def __init__(self, names: list[str], settings: Settings) -> None:
        check_installed()
        self.settings = settings
        self._asked = names
        self._manager: Any = _task_manager(names, settings.include) if names else None
        self._members: dict[str, list[str]] = {}
        for name in names:
            self._members[name] = list(self._load(name))
        shared = [task for task in self.names if sum(task in m for m in self._members.values()) > 1]
        if shared:
            raise UserError(f"The task '{shared[0]}' is asked for twice; name it or its group, not both.")

    @property
    def names(self) -> list[str]:
        """Every single task, the members of groups among them."""
        return [task for members in self._members.values() for task in members]

    def asked_as(self, task: str) -> str:
        """The name by which a task was asked for: its own or its group's."""
        return next(name for name, members in self._members.items() if task in members)

    def load(self, task: str) -> Any:
        """A fresh task, ready to be run."""
        return self._load(self.asked_as(task))[task]

    def _load(self, name: str) -> dict[str, Any]:
        try:
            with sandboxed_code_eval() if self.settings.allow_code else refused_code_eval(name):
                loaded = self._manager.load([name])["tasks"]
        except UserError:
            raise
        except Exception as error:  # tasks are data and code of others, and fail in their own ways
            raise UserError(
                f"The task '{name}' cannot be loaded ({type(error).__name__}: {_first_line(error)}); without the hub, "
                "give a task file whose data are on disk, by --include-path."
            ) from error
        for task in loaded.values():
            if getattr(task, "UNSAFE_CODE", False):
                self._check_code(task)
            if self.settings.fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", self.settings.fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(seed=SEEDS[3])
        return dict(loaded)

    def _check_code(self, task: Any) -> None:
        if not self.settings.allow_code:
            raise UserError(
                f"The task '{task.task_name}' runs code that the models write; allow it with --allow-code-execution."
            )
        if not sandboxed(task):
            raise UserError(
                f"The task '{task.task_name}' runs code that the models write by means of its own; only tasks that "
                "judge by the metric 'code_eval' run here, in a sandbox."
            )


def evaluate(tasks: Tasks, task: str, model: str, make: Callable[[], CausalLM]) -> TaskScores:
    """Scores of a model on a task, from the store where they are there.

    Args:
        model: what decides the model's answers: fingerprints, domain, dtype, device.
        make: gives the model ready to run; called only where the scores are not in the store.
    """
    ready, settings = tasks.load(task), tasks.settings
    path = cache_dir() / "evaluations" / f"{_key(ready, model, settings)}.checked"

    def work() -> str:
        return json.dumps(_run(ready, make(), settings), default=str, ensure_ascii=False)

    return _scores(json.loads(made_once(path, work)))


def _run(task: Any, lm: CausalLM, settings: Settings) -> dict[str, Any]:
    """What the harness makes of one task: figures and logged samples."""
    import lm_eval

    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    torch.manual_seed(SEEDS[2])
    name = task.task_name
    with sandboxed_code_eval() if settings.allow_code else nullcontext():
        found = lm_eval.evaluate(
            lm=lm,
            task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
            limit=settings.limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            confirm_run_unsafe_code=settings.allow_code,
        )
    return {
        "task": name,
        "results": found["results"][name],
        "higher_is_better": found["higher_is_better"][name],
        "samples": found["samples"][name],
    }


def _key(task: Any, model: str, settings: Settings) -> str:
    """Digest of all that decides the scores: the model, the task with its data, the settings, the harness."""
    documents = [document for _, document in task.doc_iterator(limit=settings.limit)]
    shots = list(task.fewshot_docs() or []) if task.get_config("num_fewshot") else []
    parts = [task.dump_config(), documents, shots, settings.limit, settings.chat, settings.batch_size]
    return digest_text(FORMAT, version("lm_eval"), model, *(json.dumps(part, default=str) for part in parts))


def _scores(found: dict[str, Any]) -> TaskScores:
    values: dict[tuple[str, str], list[Any]] = {}
    ids: dict[str, list[int]] = {}
    answers: dict[str, list[Any]] = {}
    for sample in sorted(found["samples"], key=lambda sample: int(sample["doc_id"])):
        by = str(sample["filter"])
        ids.setdefault(by, []).append(int(sample["doc_id"]))
        answers.setdefault(by, []).append(sample["resps"])
        for metric in sample["metrics"]:
            values.setdefault((metric, by), []).append(sample[metric])
    aggregate = {(m, f): found["results"].get(f"{m},{f}") for m, f in values}
    kept = {key: [float(v) for v in each] for key, each in values.items() if _is_mean(each, aggregate[key])}
    first = next(iter(ids))
    return TaskScores(
        ids[first],
        kept,
        {key: found["higher_is_better"].get(key[0]) is not False for key in kept},
        {key: float(value) for key, value in aggregate.items() if isinstance(value, int | float)},
        [f"{metric} ({by})" for metric, by in values if (metric, by) not in kept],
        answers[first],
    )


def _is_mean(values: list[Any], aggregate: Any) -> bool:
    """Whether a metric is a mean over examples: only then do an example's scores say what the metric does."""
    if not all(isinstance(v, bool | int | float) for v in values) or not isinstance(aggregate, int | float):
        return False
    return bool(np.isclose(np.mean([float(v) for v in values]), aggregate, rtol=1e-9, atol=1e-12))


def _task_manager(names: list[str], include: tuple[Path, ...]) -> Any:
    """The harness's index of tasks; its own 14,000 are read only where the folders given do not have them all."""
    from lm_eval.tasks import TaskManager

    for folder in include:
        if not folder.is_dir():
            raise UserError(f"The folder of task files {folder} does not exist; check --include-path.")
    paths = [str(folder) for folder in include]
    manager = TaskManager(include_path=paths, include_defaults=False) if paths else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=paths or None)
    missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        known = (
            ", ".join(sorted(TaskManager(include_path=paths, include_defaults=False).all_tasks)[:20]) if paths else ""
        )
        raise UserError(
            f"There is no task '{missing[0]}'; 'lm_eval ls tasks' lists the harness's"
            + (f", and --include-path has {known}." if known else ", and --include-path adds your own.")
        )
    return manager


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else "no reason given"
