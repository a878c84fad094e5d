"""What writes last to the residual stream, and the sweep that updates its weight."""

from __future__ import annotations

import copy

import pytest
import torch

from mergedarts.config import PositionForm
from mergedarts.errors import UserError
from mergedarts.fit.sweep import SweepSettings, sweep
from mergedarts.fit.writers import writers
from mergedarts.models import decoder_layers
from mergedarts.runtime import attach
from tests.tiny import LAYERS, prompt_set, states_after, tiny


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "mlp.down_proj"), ("mistral", "mlp.down_proj"), ("qwen2", "mlp.down_proj"),
        ("qwen3", "mlp.down_proj"), ("phi3", "mlp.down_proj"), ("gpt2", "mlp.c_proj"),
        ("gpt_neox", "mlp.dense_4h_to_h"), ("mamba", "mixer.out_proj"), ("falcon_h1", "feed_forward.down_proj"),
    ],
)  # fmt: skip
def test_the_last_writer(family, name):
    model = tiny(family)
    found = writers(model)
    assert list(found) == list(range(LAYERS))
    for i, (prefix, _) in enumerate(decoder_layers(model)):
        assert found[i] == (f"{prefix}.{name}", model.get_submodule(f"{prefix}.{name}"))


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "mixtral"])
def test_a_norm_or_experts_between(family):
    with pytest.raises(UserError, match="No linear layer writes straight"):
        writers(tiny(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_planted_updates_are_found_at_their_rank(family):
    """An expert that differs by rank 2 in what writes to the stream: the sweep's updates make its states."""
    merged = tiny(family)
    expert = copy.deepcopy(merged)
    g = torch.Generator().manual_seed(0)
    for _, module in writers(expert).values():
        out, into = module.weight.shape
        module.weight += 0.2 * torch.randn(out, 2, generator=g) @ torch.randn(2, into, generator=g) / into**0.5
    prompts = prompt_set((31, 40, 26, 35, 38, 29))
    targets = {i: torch.cat([states_after(expert, s.ids, [i])[i] for s in prompts.sequences]) for i in range(LAYERS)}
    settings = SweepSettings(
        dict.fromkeys(range(LAYERS), 2), (PositionForm(form="none"),), False, (1e-9,), writers=writers(merged)
    )
    got = sweep(
        merged, prompts, lambda i: targets[i], lambda i: torch.ones(prompts.tokens), lambda i: None, settings, "t"
    ).correction
    assert [(name, site.kind, site.rank) for name, site in got.items()] == [
        (name, "linear", 2) for name, _ in writers(merged).values()
    ]
    ids = torch.tensor([prompt_set((24,)).sequences[0].ids])
    bare, want = merged(ids).logits, expert(ids).logits
    with attach(merged, {"x": got}, "x"):
        after = merged(ids).logits
    assert (bare - want).abs().max() > 0.3
    assert (after - want).abs().max() < 0.01 * (bare - want).abs().max()
