"""Drift by layer against plain passes over single sequences, with and without corrections attached."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergedarts import features
from mergedarts.correction import Correction
from mergedarts.drift.bootstrap import Resampler
from mergedarts.drift.layers import run_layers
from mergedarts.models import decoder_layers
from mergedarts.runtime import attach
from tests.tiny import LAYERS, D, head_input, prompt_set, random_site, states_after, tiny


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mamba"])
def test_by_plain_passes(family, monkeypatch):
    monkeypatch.setattr(features, "BATCH_TOKENS", 24)
    prompts = prompt_set((8, 11, 6, 9))
    merged, expert = tiny(family), tiny(family, seed=1)
    depth = list(range(LAYERS))
    theirs = [states_after(expert, s.ids, depth) for s in prompts.sequences]
    counted = torch.from_numpy(prompts.predicts())
    sums, final = run_layers(merged, prompts, counted, lambda layer, i: theirs[i][layer], "t")
    for i, s in enumerate(prompts.sequences):
        ours = states_after(merged, s.ids, depth)
        kept = torch.tensor(s.predicts)
        for layer in depth:
            off = (ours[layer] - theirs[i][layer])[kept].abs()
            assert sums.totals["drift"][i, layer] == pytest.approx(float(off.mean(1).sum()), rel=1e-3)
            size = theirs[i][layer][kept].abs().sum(1)
            assert sums.totals["relative"][i, layer] == pytest.approx(float((off.sum(1) / size).sum()), rel=1e-3)
            assert sums.tokens["drift"][i, layer] == 3
        a, b = prompts.offsets[i], prompts.offsets[i + 1]
        torch.testing.assert_close(final[a:b], head_input(merged, s.ids)[0], atol=1e-4, rtol=1e-3)


def test_points():
    prompts = prompt_set((8, 11, 6))
    merged, expert = tiny("llama"), tiny("llama", seed=1)
    theirs = [states_after(expert, s.ids, list(range(LAYERS))) for s in prompts.sequences]
    counted = torch.from_numpy(prompts.predicts())
    sums, _ = run_layers(merged, prompts, counted, lambda layer, i: theirs[i][layer], "t")
    points = sums.points(Resampler(np.array([0, 2])), np.array([0, 2]))
    assert [(p.label, p.low, p.tokens, p.sequences) for p in points] == [(str(i), i, 6, 2) for i in range(LAYERS)]
    for layer, p in enumerate(points):
        assert p.measures["drift"].value == pytest.approx(sums.totals["drift"][[0, 2], layer].sum() / 6)


def test_corrections_are_seen():
    """The state after a corrected layer is the corrected one."""
    prompts = prompt_set((8, 11))
    model = tiny("llama")
    layer = decoder_layers(model)[1][0]
    correction = Correction({layer: random_site("residual", D, D, 3, None, relu=False)})
    plain = [states_after(model, s.ids, list(range(LAYERS))) for s in prompts.sequences]
    counted = torch.from_numpy(prompts.predicts())
    with attach(model, {"code": correction}, "code"):
        sums, _ = run_layers(model, prompts, counted, lambda layer, i: plain[i][layer], "t")
    assert sums.totals["drift"][:, 0].max() < 1e-5
    assert sums.totals["drift"][:, 1:].min() > 1e-2
