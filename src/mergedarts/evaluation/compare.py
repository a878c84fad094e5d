"""Repaired, merged and expert models on the same tasks, compared example by example.

Knows which model answers which task and holds one in memory at a time; the running is `harness`'s, the statistics are
`statistics`'s.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..checksums import digest_files
from ..errors import UserError
from ..files import digest_text
from ..job import return_memory
from ..models import DTYPES, ModelRef, fingerprint, load_model, load_tokenizer, pick_device
from ..progress import say
from ..repaired import CONFIG, read_config
from .harness import Settings, Tasks, TaskScores, evaluate
from .statistics import Comparison, compare, holm

if TYPE_CHECKING:
    from .lm import CausalLM


@dataclass(frozen=True)
class Row:
    """One metric of one task: three models compared."""

    task: str
    domain: str
    metric: str
    filter: str
    higher_is_better: bool
    comparison: Comparison

    @property
    def label(self) -> str:
        """The metric, with the filter that read the answer where the task has one."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


@dataclass(frozen=True)
class Evaluation:
    """Rows of the table, what is to be said beside it, and every model's answers.

    Attributes:
        rows: in the order of the tasks; p-values corrected over all of them.
        notes: what was left out, and why.
        answers: one entry a task, example and model.
        harness: the harness's own figures by task and model.
        about: versions, models and settings.
    """

    rows: list[Row]
    notes: list[str]
    answers: list[dict[str, Any]]
    harness: dict[str, dict[str, dict[str, float]]]
    about: dict[str, Any]

    def plus(self, row: Row) -> Evaluation:
        """With a further row; p-values corrected anew."""
        return replace(self, rows=_corrected([*self.rows, row]))

    def as_json(self) -> dict[str, Any]:
        """All but the answers, as plain data."""
        rows = [_plain(asdict(row)) for row in self.rows]
        return self.about | {"rows": rows, "notes": self.notes, "harness": self.harness}


class Models:
    """The models of some repaired folders: fits of one recipe on one merged model with several seeds, or one fit.

    Args:
        folders: repaired models.
        merged: where the merged model is now, if it has moved.
        device: where models run.
        dtype: of their weights; that of the calibration where it is None.
        trust_remote_code: let models run code of their own.
        router: let the repaired model's router choose the domain.
    """

    def __init__(
        self,
        folders: list[Path],
        merged: str | None = None,
        device: str = "auto",
        dtype: str | None = None,
        trust_remote_code: bool = False,
        router: bool = False,
    ) -> None:
        self.folders, self.merged, self.device, self.router = folders, merged, device, router
        self._trust = trust_remote_code
        self._loaded: dict[str, CausalLM] = {}
        self.configs = [read_config(folder) for folder in folders]
        for folder, config in zip(folders[1:], self.configs[1:], strict=True):
            if config["merged"]["fingerprint"] != self.configs[0]["merged"]["fingerprint"]:
                raise UserError(f"{folder} repairs another merged model than {folders[0]}; evaluate it by itself.")
            if set(config["domains"]) != set(self.domains):
                raise UserError(f"{folder} has other domains than {folders[0]}; evaluate it by itself.")
        self.dtype = dtype or str(self.configs[0]["settings"]["dtype"])
        if self.dtype not in DTYPES:
            raise UserError(f"'{self.dtype}' is not a dtype here; choose one of {', '.join(DTYPES)}.")
        weights = [digest_files(list(folder.glob("*.safetensors")), folder) for folder in folders]
        if len(set(weights)) < len(weights):
            raise UserError("Two of the folders hold the same corrections; give each seed once.")

    @property
    def domains(self) -> dict[str, Any]:
        domains: dict[str, Any] = self.configs[0]["domains"]
        return domains

    def print_of(self, folder: int | None, domain: str) -> str:
        """What decides the answers of a repaired model with a domain; of the merged model where `folder` is None."""
        parts = [self.configs[0]["merged"]["fingerprint"], self.dtype, pick_device(self.device).type]
        if folder is not None:
            root = self.folders[folder]
            parts += [digest_files([root / CONFIG, *root.glob("*.safetensors")], root), domain]
        return digest_text(*parts)

    def expert_print(self, domain: str) -> str:
        return digest_text(self.domains[domain]["expert_fingerprint"], self.dtype, pick_device(self.device).type)

    def find_expert(self, domain: str) -> ModelRef:
        """The expert of a domain; a `UserError` where it is gone or another one."""
        entry = self.domains[domain]
        ref = ModelRef.parse(entry["expert"], trust_remote_code=self._trust)
        if fingerprint(ref) != entry["expert_fingerprint"]:
            raise UserError(
                f"The expert {ref} is not the one '{domain}' was calibrated on; put that back in its place."
            )
        return ref

    def repaired(self, folder: int, domain: str | None, batch_size: int) -> CausalLM:
        """A repaired model set to a domain; to None, it is the merged model."""
        from .lm import MergedartsLM

        lm = self._only(f"repaired {folder}", partial(self._load_repaired, folder, batch_size))
        assert isinstance(lm, MergedartsLM)
        lm.handle.domain = "auto" if self.router and domain is not None else domain
        lm.title = "merged" if domain is None else f"repaired, {domain}"
        return lm

    def expert(self, domain: str, batch_size: int) -> CausalLM:
        return self._only(f"expert {domain}", partial(self._load_expert, domain, batch_size))

    def _load_repaired(self, folder: int, batch_size: int) -> CausalLM:
        from .lm import MergedartsLM

        return MergedartsLM(
            str(self.folders[folder]), None, self.merged, self.device, self.dtype, self._trust, batch_size=batch_size
        )

    def _load_expert(self, domain: str, batch_size: int) -> CausalLM:
        from .lm import CausalLM

        ref = self.find_expert(domain)
        base = ModelRef.parse(self.merged or self.configs[0]["merged"]["model"])
        model = load_model(ref, DTYPES[self.dtype], pick_device(self.device))
        # The merged model's tokenizer for all: the same prompt, token for token, where templates differ.
        return CausalLM(f"expert, {domain}", pretrained=model, tokenizer=load_tokenizer(base), batch_size=batch_size)

    def _only(self, name: str, make: Callable[[], CausalLM]) -> CausalLM:
        if name not in self._loaded:
            self._loaded.clear()
            gc.collect()
            return_memory()
            say(f"loading {name}")
            self._loaded[name] = make()
        return self._loaded[name]


def check_routes(routes: dict[str, str], tasks: Tasks, domains: dict[str, Any]) -> dict[str, str]:
    """The domain of every single task, from the routes of tasks and groups as they were asked for.

    Raises:
        UserError: a task without a domain, a domain that is not there, or a route of no task.
    """
    known = {*tasks.names, *(tasks.asked_as(name) for name in tasks.names)}
    for task, domain in routes.items():
        if domain not in domains:
            raise UserError(f"--route {task}={domain}: there is no domain '{domain}'; there are {', '.join(domains)}.")
        if task not in known:
            raise UserError(f"--route {task}={domain}: '{task}' is not among the tasks; there are {', '.join(known)}.")
    out: dict[str, str] = {}
    for task in tasks.names:
        chosen = routes.get(task) or routes.get(tasks.asked_as(task))
        if chosen is None and len(domains) > 1:
            raise UserError(f"Task '{task}' has no domain; add --route {tasks.asked_as(task)}=DOMAIN.")
        out[task] = chosen or next(iter(domains))
    return out


def evaluate_repaired(models: Models, names: list[str], routes: dict[str, str], settings: Settings) -> Evaluation:
    """Run every task on the repaired model, the merged model and the domain's expert, and compare them.

    Args:
        models: the repaired model, or one for each seed.
        names: tasks or groups.
        routes: the domain of each task or group.
        settings: of the harness.

    Raises:
        UserError: a task, route, model or expert that is not there.
    """
    tasks = Tasks(names, settings)
    domain_of = check_routes(routes, tasks, models.domains)
    for domain in set(domain_of.values()):
        models.find_expert(domain)  # said before hours of work
    size = settings.batch_size
    scores: dict[tuple[str, str], TaskScores] = {}
    mode = "auto" if models.router else ""
    for i in range(len(models.folders)):
        for task, domain in domain_of.items():
            make = partial(models.repaired, i, domain, size)
            scores[task, f"repaired {i}"] = evaluate(tasks, task, models.print_of(i, mode or domain), make)
    for task in domain_of:
        scores[task, "merged"] = evaluate(
            tasks, task, models.print_of(None, ""), partial(models.repaired, 0, None, size)
        )
    for task, domain in sorted(domain_of.items(), key=lambda item: item[1]):
        make = partial(models.expert, domain, size)
        scores[task, "expert"] = evaluate(tasks, task, models.expert_print(domain), make)
    rows, notes = _rows(domain_of, scores, len(models.folders))
    named = {"merged": "merged", "expert": "expert"} | {
        f"repaired {i}": "repaired" if len(models.folders) == 1 else str(folder)
        for i, folder in enumerate(models.folders)
    }
    return Evaluation(
        rows,
        notes,
        [entry for (task, model), found in scores.items() for entry in _answers(task, named[model], found)],
        {
            task: {
                name: {f"{m},{f}": value for (m, f), value in scores[task, model].aggregate.items()}
                for model, name in named.items()
            }
            for task in domain_of
        },
        {
            "mergedarts": __version__,
            "lm_eval": version("lm_eval"),
            "repaired": [str(folder) for folder in models.folders],
            "merged": str(models.configs[0]["merged"]["model"]),
            "experts": {domain: models.domains[domain]["expert"] for domain in sorted(set(domain_of.values()))},
            "router": models.router,
            "dtype": models.dtype,
            "settings": asdict(settings) | {"include": [str(folder) for folder in settings.include]},
        },
    )


def _rows(
    domain_of: dict[str, str], scores: dict[tuple[str, str], TaskScores], seeds: int
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    for task, domain in domain_of.items():
        merged, expert = scores[task, "merged"], scores[task, "expert"]
        repaired = [scores[task, f"repaired {i}"] for i in range(seeds)]
        common = [key for key in merged.scores if all(key in found.scores for found in (*repaired, expert))]
        for metric, by in common:
            compared = compare(
                merged.scores[metric, by], [found.scores[metric, by] for found in repaired], expert.scores[metric, by]
            )
            rows.append(Row(task, domain, metric, by, merged.higher_is_better[metric, by], compared))
        left = sorted({name for found in (merged, expert, *repaired) for name in found.left_out})
        if left:
            notes.append(f"{task}: {', '.join(left)} is no mean over examples and cannot be compared by example.")
    return _corrected(rows), notes


def _corrected(rows: list[Row]) -> list[Row]:
    corrected = holm([row.comparison for row in rows])
    return [replace(row, comparison=comparison) for row, comparison in zip(rows, corrected, strict=True)]


def _plain(value: Any) -> Any:
    """The value as JSON has it: null for an end of an interval that is not finite."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _answers(task: str, model: str, found: TaskScores) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "example": example,
            "model": model,
            "answers": found.answers[n],
            "scores": {f"{m},{f}": values[n] for (m, f), values in found.scores.items()},
        }
        for n, example in enumerate(found.examples)
    ]
