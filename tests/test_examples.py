"""The files in `examples/`: read by both schemas, their settings run on tiny models, their figures recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from mergedarts.config import DatasetPrompts, parse_run, read_run_file
from mergedarts.merging import resolved_config
from tests.tiny import FAMILIES

ROOT = Path(__file__).resolve().parents[1] / "examples"
#: Architecture of each folder, and N, d, L, domains of its models, from their published configurations.
MODELS = {
    "llama-2-7b": ("llama", 6.74e9, 4096, 32, 3),
    "llama-3.1-8b": ("llama", 8.03e9, 4096, 32, 3),
    "gemma-2-9b": ("gemma2", 9.24e9, 3584, 42, 3),
    "qwen2.5-7b": ("qwen2", 7.62e9, 3584, 28, 2),
}


def test_every_folder_is_known():
    assert {p.name for p in ROOT.iterdir() if p.is_dir()} == set(MODELS)
    text = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in text for name in MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_both_files_are_read_and_name_the_same_experts(name):
    from mergekit.config import MergeConfiguration

    run = read_run_file(ROOT / name / "darts.yml")
    config = resolved_config(ROOT / name / "merge.yml")
    merge = MergeConfiguration.model_validate(yaml.safe_load(yaml.safe_dump(config)))
    assert merge.merge_method == "task_arithmetic"
    experts = [domain.expert for domain in run.domains.values()]
    assert experts == [str(model.model) for model in merge.models]
    assert len(experts) == MODELS[name][4]
    assert str(merge.base_model) not in experts
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", expert) for expert in [*experts, str(merge.base_model)])
    assert all(isinstance(domain.prompts, DatasetPrompts) for domain in run.domains.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_settings_calibrate_a_tiny_model_of_the_architecture(name, tmp_path):
    """All but models and prompts are the run file's own; the budget is that of a tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import mergedarts
    from tests.e2e.conftest import changed, make_tokenizer, save, write_lines
    from tests.tiny import _COMMON

    family = MODELS[name][0]
    torch.manual_seed(0)
    shape = _COMMON | FAMILIES[family] | {"vocab_size": 304, "eos_token_id": 2, "bos_token_id": None}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
    model = made.eval().requires_grad_(False)
    tokenizer = make_tokenizer()
    save(model, tokenizer, tmp_path / "merged")
    save(changed(model, 1, share=0.5), tokenizer, tmp_path / "expert")
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": f"what is {i} times {i + 3}?"} for i in range(8)])
    settings = yaml.safe_load((ROOT / name / "darts.yml").read_text())
    for domain in settings["domains"].values():
        domain |= {"expert": str(tmp_path / "expert"), "prompts": str(prompts), "samples": 8, "rollout": 12}
    run = parse_run(settings | {"merged": str(tmp_path / "merged"), "budget": 0.3, "device": "cpu"})
    found = mergedarts.calibrate(run, tmp_path / "out")
    assert set(found["domains"]) == set(run.domains)
    for entry in found["domains"].values():
        assert entry["held_out"]["repaired"]["kl"] < entry["held_out"]["merged"]["kl"]
    loaded, _, handle = mergedarts.load(tmp_path / "out", domain=next(iter(run.domains)))
    ids = torch.tensor([[5, 6, 7]])
    corrected = loaded(input_ids=ids).logits
    handle.domain = None
    assert not torch.equal(corrected, loaded(input_ids=ids).logits)


def test_the_expected_figures_follow_from_the_shapes():
    text = (ROOT / "README.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| \w+.*e9", line)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(rows) == len(MODELS)
    tokens = 17_500
    for row, (_, parameters, width, layers, domains) in zip(rows, MODELS.values(), strict=True):
        assert (float(row[1]), int(row[2]), int(row[3])) == (parameters, width, layers)
        assert row[4] == f"{2 * parameters * 1.16 / 1e9:.0f} + {8 * width**2 * layers / 1e9:.1f} GB"
        assert row[5] == f"{2 * tokens * width * (layers + 1) * domains / 1e9:.0f} GB"
        assert row[6] == f"{4 * width**2 * layers * domains / 1e9:.1f} GB"
        assert float(row[7]) == pytest.approx(parameters / 1000, rel=0.01)
