"""The demo, end to end, with tiny models in place of the testbed."""

from __future__ import annotations

import pytest
import torch

from mergedarts import demo, parse_run, testbed

from .conftest import World, ran

pytestmark = pytest.mark.slow


@pytest.fixture
def small(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "DOMAINS", ("code", "maths"))
    for name, value in (("base_model", world.base), ("merged_model", world.merged)):
        monkeypatch.setattr(testbed, name, lambda value=value: value)
    monkeypatch.setattr(testbed, "expert", world.expert)
    monkeypatch.setattr(testbed, "prompts", lambda domain, part: world.prompts("code"))  # which have responses
    monkeypatch.setattr(demo, "parse_run", lambda given: parse_run(given | {"budget": 0.5}))


def this_cpu(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)


@pytest.mark.usefixtures("small")
def test_every_model_is_measured_in_float32_where_bfloat16_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    this_cpu(monkeypatch, native=False)
    told = ran("demo", "--samples", 10, "--examples", 4, "--json")
    assert told.code == 0, told.err
    data = told.json
    assert data["dtype"] == "float32"
    assert set(data["domains"]) == {"code", "maths"}
    for rows in data["domains"].values():
        assert list(rows) == ["merged", "surgery", "darts", "repaired", "expert"]
        assert rows["expert"]["kl"] < rows["repaired"]["kl"] < rows["merged"]["kl"]


@pytest.mark.usefixtures("small")
def test_tables_and_answers_in_bfloat16_where_the_cpu_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    this_cpu(monkeypatch, native=True)
    shown = ran("demo", "--samples", 10, "--examples", 4)
    assert shown.code == 0, shown.err
    for words in ("; bfloat16; peak memory", "code: prompt", "maths: prompt", "where the merge drifted", "gap closed"):
        assert words in shown.out
