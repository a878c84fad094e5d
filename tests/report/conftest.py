"""A diagnosis with every figure: chats of several turns, a repair, layers, and texts that are no good for a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mergedarts.drift import Drift
from mergedarts.prompts import PromptSet, TokenSequence
from mergedarts.report import write_report
from mergedarts.report.figures import Picture, pictures
from tests.drift.planted import planted
from tests.tiny import D


def chat(seed: int) -> TokenSequence:
    """Three turns of a length that differs from chat to chat."""
    g = torch.Generator().manual_seed(seed)
    marks: list[bool] = []
    for _ in range(3):
        marks += [False] * int(torch.randint(4, 12, (1,), generator=g)) + [True] * 8
    return TokenSequence(tuple(torch.randint(3, 30, (len(marks),), generator=g).tolist()), (*marks[:-1], False))


@pytest.fixture(scope="session")
def drift(tmp_path_factory: pytest.TempPathFactory) -> Drift:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEDARTS_CACHE", str(tmp_path_factory.mktemp("cache")))
        prompts = PromptSet(tuple(chat(i) for i in range(24)))
        noise = 0.4 * torch.randn(prompts.tokens, D, generator=torch.Generator().manual_seed(1))
        found, _ = planted(
            lambda h, p, e: h + 0.3 + noise, prompts, fitted=14, repair=lambda h: h - 0.3,
            layers={"merged": [0.1, 0.2, 0.4], "repaired": [0.1, 0.05, 0.1]},
        )  # fmt: skip
    return found


@pytest.fixture(scope="session")
def drawn(drift: Drift) -> list[Picture]:
    return pictures("code", drift.domains["code"])


@pytest.fixture(scope="session")
def written(drift: Drift, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report's folder."""
    folder = tmp_path_factory.mktemp("report") / "out"
    write_report(drift, folder)
    return folder
