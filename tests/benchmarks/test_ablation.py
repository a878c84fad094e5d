"""The ablation's grid, its measures by example, and its tables from made-up records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mergedarts.config import parse_run
from mergedarts.measures import TokenMeasures

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import ablation
import ablation_tables as tables


def record(correction, domain, shift, seed=0, merge=ablation.TA, samples=25, count=12):
    rng = np.random.default_rng(0)  # the same examples for all
    base = rng.random(count)
    kl = {"none": base + 1, "expert": 0 * base}.get(correction, base + 1 - shift + 0.01 * seed)
    examples = {"kl": kl.tolist(), "ewl1": kl.tolist(), "agreement": (1 - kl / 4).tolist(), "nll": kl.tolist()}
    return {
        "merge": merge, "correction": correction, "samples": samples, "seed": seed, "domain": domain,
        "parameters": 0 if correction in ("none", "expert") else 7_000, "seconds": 1.0, "examples": examples,
    }  # fmt: skip


@pytest.fixture
def result():
    records = []
    for merge in (ablation.TA, "TIES"):
        for domain in ("math", "code"):
            records += [record(name, domain, 0, merge=merge) for name in ("none", "expert")]
            records += [record("surgery", domain, 0.2, seed, merge) for seed in (0, 1)]
            records += [record("DARTS", domain, 0.5, seed, merge) for seed in (0, 1, 2)]
    records += [record("DARTS", d, 0.1, samples=10) for d in ("math", "code")]
    records += [record(n, d, 0, samples=10) for n in ("none", "expert") for d in ("math", "code")]
    return {"quick": True, "examples": 12, "records": records, "generation": []}


def test_the_tables_hold_the_numbers(result):
    text = tables.tables(result)
    none = np.mean(result["records"][0]["examples"]["kl"])
    assert f"| none | 0 | 1 | {none:.4f} | {none:.4f} |" in text
    darts = none - 0.5 + 0.01  # the mean of three seeds
    assert f"| DARTS | 7,000 | 3 | {darts:.4f} | {darts:.4f} |" in text
    assert "**TIES, code** (25 calibration prompts, 12 held-out examples)" in text
    assert f"{0.49 / none:.0%} [" in text
    assert f"| code | DARTS | {0.1 / none:.0%} [" in text  # by size


def test_claims_are_paired_by_seed_and_example(result):
    text = tables.claims_table(result, ["math", "code"], 25)
    row = next(line for line in text.splitlines() if "DARTS is better than surgery | math" in line)
    assert "| 2 |" in row
    assert "-0.3000 [-0.3000, -0.3000]" in row
    assert row.endswith("| holds |")
    assert "Holm over 8 rows" in text  # two claims have both sides, on two merges and two domains


def test_a_worse_and_an_equal_correction(result):
    for entry in result["records"]:
        if entry["correction"] == "DARTS":
            entry["examples"]["kl"] = [v + 2 for v in entry["examples"]["kl"]]
    assert "the opposite" in tables.claims_table(result, ["math"], 25)
    for entry in result["records"]:
        if entry["correction"] == "DARTS":
            entry["examples"]["kl"] = record("none", "math", 0)["examples"]["kl"]
    row = next(x for x in tables.claims_table(result, ["math"], 25).splitlines() if "better than nothing | math" in x)
    assert row.endswith("| not shown |")


def test_generation_scores(result):
    rng = np.random.default_rng(1)
    quality = rng.random(200)
    entries = [
        {"domain": "math", "metric": "exact_answer", "correction": name, "scores": (quality < c).astype(float).tolist()}
        for name, c in (("expert", 0.5), ("none", 0.2), ("DARTS", 0.35))
    ]
    text = tables.tables(result | {"records": [], "generation": entries})
    row = next(line for line in text.splitlines() if line.startswith("| math | exact_answer"))
    means = [f"{(quality < c).mean():.3f}" for c in (0.2, 0.35, 0.5)]
    assert f"| 200 | DARTS | {' | '.join(means)} |" in row


def test_tables_go_between_the_marks(result, tmp_path):
    page = tmp_path / "evidence.md"
    page.write_text("before\n<!-- a -->\nstale\n<!-- /a -->\nbetween\n<!-- b -->\nkept\n<!-- /b -->\nafter\n")
    tables.document(page, result, "a")
    text = page.read_text()
    assert text.startswith("before\n<!-- a -->\n**task")
    assert text.endswith("<!-- /a -->\nbetween\n<!-- b -->\nkept\n<!-- /b -->\nafter\n")
    assert "stale" not in text
    with pytest.raises(SystemExit, match="<!-- c -->"):
        tables.document(page, result, "c")


def test_a_part_of_the_grid_by_name():
    chosen = {"merges": ablation.TA, "corrections": "surgery;DARTS", "sizes": "5,50", "seeds": 2}
    cells = ablation.part_of(ablation.whole_grid(), argparse.Namespace(**chosen))
    assert {(c.correction, c.samples, c.seed) for c in cells} == {
        (name, *place) for name in ("surgery", "DARTS") for place in ((5, 0), (50, 0), (50, 1))
    }
    with pytest.raises(SystemExit, match="surgary"):
        ablation.part_of([], argparse.Namespace(**chosen | {"corrections": "surgary"}))


def test_means_by_example_against_loops():
    g = torch.Generator().manual_seed(0)
    sequence = torch.tensor([3, 3, 5, 5, 5, 9])
    values = [torch.rand(6, generator=g, dtype=torch.float64) for _ in range(5)]
    got = ablation.by_example(TokenMeasures(*values, sequence))
    l1, entropy, kl, agree, nll = (v.tolist() for v in values)
    for n, rows in enumerate(([0, 1], [2, 3, 4], [5])):
        assert got["kl"][n] == pytest.approx(sum(kl[i] for i in rows) / len(rows))
        assert got["nll"][n] == pytest.approx(sum(nll[i] for i in rows) / len(rows))
        assert got["agreement"][n] == pytest.approx(sum(agree[i] for i in rows) / len(rows))
        weighted = sum(entropy[i] * l1[i] for i in rows) / sum(entropy[i] for i in rows)
        assert got["ewl1"][n] == pytest.approx(weighted)


def test_the_grids():
    whole, quick = ablation.whole_grid(), ablation.quick_grid()
    assert len(set(whole)) == len(whole)
    assert len(set(quick)) == len(quick)
    assert {cell.merge for cell in whole} == set(ablation.MERGES)
    assert {cell.samples for cell in whole} == {5, 10, 25, 50, 100}
    for name in ablation.RANDOM:
        assert {c.seed for c in whole if c.correction == name and c.samples == 50} == set(range(5))
    named = {name for _, *pair in tables.CLAIMS for name in pair} - {"none"}
    assert named <= {cell.correction for cell in quick}


@pytest.mark.parametrize("name", [n for n, v in ablation.CORRECTIONS.items() if not isinstance(v, int)])
def test_every_correction_is_a_run_file(name):
    domains = {"math": {"expert": "e", "prompts": "p.jsonl"}}
    parse_run({"merged": "m", "domains": domains} | ablation.CORRECTIONS[name])


@pytest.mark.parametrize("merge", ablation.MERGES)
def test_every_merge_is_a_mergekit_config(merge, monkeypatch, tmp_path):
    import yaml
    from mergekit.config import MergeConfiguration

    seen = []
    monkeypatch.setattr(ablation, "merge_cached", lambda path: seen.append(path) or tmp_path)
    monkeypatch.setattr(ablation.testbed, "base_model", lambda: tmp_path)
    monkeypatch.setattr(ablation.testbed, "expert", lambda d: str(tmp_path / d))
    ablation.merged_model(merge)
    config = MergeConfiguration.model_validate(yaml.safe_load(seen[0].read_text()))
    assert len(config.models) == 3
