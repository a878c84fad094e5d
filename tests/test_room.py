"""What a run will need is counted right, and compared before the work begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mergedarts import room
from mergedarts.errors import NoSpaceError, UserError
from mergedarts.models import ModelRef, load_model
from mergedarts.room import check_disk, check_features, check_memory, weight_count
from mergedarts.store import FeatureStore
from tests.tiny import prompt_set, tiny


def test_weights_are_counted_by_their_headers(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert weight_count(tmp_path) == sum(p.numel() for p in model.parameters())
    save_file({"scalar": torch.tensor(1.0)}, tmp_path / "more.safetensors")
    assert weight_count(tmp_path) == sum(p.numel() for p in model.parameters()) + 1


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 20, (4).to_bytes(8, "little") + b"[1]x", b"\0" * 8])
def test_broken_headers_count_nothing(tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    assert weight_count(tmp_path) == 0


def test_a_model_larger_than_memory_is_not_loaded(tmp_path, monkeypatch):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    size = sum(p.numel() for p in model.parameters()) * 4
    monkeypatch.setattr(room, "free_memory", lambda device: size - 1)
    monkeypatch.setattr(room.psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=r"needs .* MiB of memory in float32, and .* free on cpu; choose"):
        load_model(ModelRef(str(tmp_path)), torch.float32, torch.device("cpu"))
    check_memory("x", tmp_path, torch.bfloat16, torch.device("cpu"))


def test_disk(tmp_path):
    check_disk(tmp_path / "not" / "there", 1)
    with pytest.raises(NoSpaceError, match=r"No space left to write .*not/there \(.* GiB are needed"):
        check_disk(tmp_path / "not" / "there", 1 << 60)


def test_the_features_of_a_run_are_counted(monkeypatch):
    prompts = prompt_set((7, 5), response=None)

    def store(print_, prompts):
        return FeatureStore(print_, prompts.digest, torch.bfloat16)

    def domain(**changes):
        return SimpleNamespace(**({"prompts": prompts, "unanswered": (), "rollout": 8, "expert_print": "e"} | changes))

    def job(*domains):
        return SimpleNamespace(domains=domains, merged=ModelRef("m"), dtype=torch.bfloat16, store=store)

    seen: list[int] = []
    monkeypatch.setattr(room, "check_disk", lambda place, need: seen.append(need))
    monkeypatch.setattr("mergedarts.models.load_config", lambda ref: SimpleNamespace(hidden_size=10))
    check_features(job(domain()), 2, 1)
    check_features(job(domain(), domain(expert_print="f")), 0, 0)
    store("e", prompts).save("final", {"hidden": torch.zeros(1)})
    check_features(job(domain()), 2, 1)
    check_features(job(domain(unanswered=(1,))), 2, 0)
    store("e", prompts.subset((1,))).save("rollout-8", {"ids": torch.zeros(1)})
    check_features(job(domain(unanswered=(1,))), 2, 0)
    assert seen == [3 * 12 * 10 * 2 + 10 * 10 * 4, 2 * 12 * 10 * 2, 0, 3 * 12 * 10 * 2, 0]
