"""The metric `code_eval` of the library `evaluate`, judged in the sandbox instead of by the library's own means.

Knows the metric's interface, by which the harness's HumanEval and MBPP judge, and pass@k; runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import UserError
from .sandbox import run_program, warn_of_missing_walls


class SandboxedCodeEval:
    """Stands where `evaluate.load("code_eval")` gives the library's metric."""

    def compute(
        self, references: list[str], predictions: list[list[str]], k: list[int] | None = None, **_: Any
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """pass@k and the verdict on every program.

        Args:
            references: the tests of each problem.
            predictions: programs of each problem.
            k: numbers of programs of which one must pass.
        """
        results: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for i, (programs, tests) in enumerate(zip(predictions, references, strict=True)):
            verdicts = [run_program(f"{program}\n{tests}") for program in programs]
            results[i] = [
                (n, {"task_id": i, "passed": v.passed, "result": v.reason, "completion_id": n})
                for n, v in enumerate(verdicts)
            ]
        total = np.array([len(found) for found in results.values()])
        passed = np.array([sum(entry["passed"] for _, entry in found) for found in results.values()])
        ks = [n for n in k or [1, 10, 100] if (total >= n).all()]
        chances = {n: [pass_at(n, t, c) for t, c in zip(total, passed, strict=True)] for n in ks}
        return {f"pass@{n}": float(np.mean(chance)) for n, chance in chances.items()}, results


def pass_at(k: int, total: int, passed: int) -> float:
    """Chance that one of k programs drawn from `total` passes: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    if total - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(total - passed + 1, total + 1)))


@contextmanager
def sandboxed_code_eval() -> Iterator[None]:
    """Inside, `evaluate.load("code_eval")` gives the sandboxed metric."""
    warn_of_missing_walls()
    with _loading(SandboxedCodeEval):
        yield


@contextmanager
def refused_code_eval(task: str) -> Iterator[None]:
    """Inside, `evaluate.load("code_eval")` is a `UserError`."""

    def refuse() -> SandboxedCodeEval:
        raise UserError(f"The task '{task}' runs code that the models write; allow it with --allow-code-execution.")

    with _loading(refuse):
        yield


def sandboxed(task: Any) -> bool:
    """Whether the functions by which a harness task judges reach the sandboxed metric, and the library's nowhere."""
    import evaluate

    judges = [getattr(judge, "__self__", judge) for judge in task._metric_fn_list.values()]  # kept as bound calls
    held = [value for judge in judges for value in getattr(judge, "__globals__", {}).values()]
    ours = any(isinstance(value, SandboxedCodeEval) for value in held)
    return ours and not any(isinstance(value, evaluate.EvaluationModule) for value in held)


@contextmanager
def _loading(make: Callable[[], SandboxedCodeEval]) -> Iterator[None]:
    import evaluate

    load = evaluate.load

    def instead(path: str, *args: Any, **kwargs: Any) -> Any:
        return make() if path == "code_eval" else load(path, *args, **kwargs)

    evaluate.load = instead
    try:
        yield
    finally:
        evaluate.load = load
