"""The positions of largest KL, their text and the likeliest tokens, against full softmaxes."""

from __future__ import annotations

import torch

from tests.drift.planted import Words, planted
from tests.tiny import D, prompt_set, slow_logits, tiny


def test_by_full_softmaxes():
    g = torch.Generator().manual_seed(1)
    prompts = prompt_set((20, 25, 18, 22, 30, 26), 8)
    noise = 0.5 * torch.randn(prompts.tokens, D, generator=g)
    drift, held = planted(lambda h, p, e: h + noise, prompts, fitted=2)
    model = tiny("llama")
    q = slow_logits(model, held.merged_states).double().log_softmax(-1)
    p = slow_logits(model, held.target).double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    order = [t for t in kl.argsort(descending=True).tolist() if held.counted[t]]
    found = drift.domains["code"].disagreements
    assert len(found) == 20
    ids = [token for s in held.prompts.sequences for token in s.ids]
    offsets = held.prompts.offsets
    for item, place in zip(found, order, strict=False):
        assert abs(item.kl["merged"] - float(kl[place])) < 1e-4
        row = int(held.prompts.sequence_index()[place])
        assert item.sequence == row + 2
        assert item.position == place - offsets[row]
        assert item.token == Words().decode([ids[place + 1]])
        assert item.before.endswith(Words().decode([ids[place]]))
        end = offsets[row + 1]
        assert item.after == Words().decode(ids[place + 2 : min(end, place + 10)])
        for name, logits in (("expert", p), ("merged", q)):
            values, tokens = logits[place].exp().topk(5)
            assert [c.text for c in item.top[name]] == [Words().decode([t]) for t in tokens.tolist()]
            assert all(abs(c.probability - v) < 1e-4 for c, v in zip(item.top[name], values.tolist(), strict=True))


def test_none_where_nothing_differs():
    drift, _ = planted(lambda h, p, e: h.clone())
    assert all(item.kl["merged"] < 1e-6 for item in drift.domains["code"].disagreements)
