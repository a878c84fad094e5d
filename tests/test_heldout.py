"""Held-out measures against plain passes of merged model and expert over the held-out sequences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mergedarts.correction import Correction, Position
from mergedarts.features import Readout, collect
from mergedarts.heads import keep_head
from mergedarts.heldout import HeldOut
from mergedarts.job import DomainJob
from mergedarts.models import ModelRef, decoder_layers
from mergedarts.prompts import PromptSet
from mergedarts.store import FeatureStore
from tests.tiny import D, head_input, prompt_set, random_site, slow_final, slow_logits, tiny

CHOSEN = [1, 3]


def held_out(prompts, family="llama", chosen=None):
    merged, expert = tiny(family), tiny(family, seed=1)
    job = SimpleNamespace(
        merged_print="merged", store=lambda name, p: FeatureStore(name, p.digest, torch.float32)
    )  # fmt: skip
    domain = DomainJob("code", ModelRef("e"), "expert", prompts, 0, ())
    store = job.store("expert", prompts)
    keep_head(expert, store)
    collect(expert, prompts, store, "e", [])
    collect(merged, prompts, job.store("merged", prompts), "m", [])
    return merged, expert, HeldOut(job, domain, merged, Readout(merged), CHOSEN if chosen is None else chosen)


def tokens_of(prompts, chosen):
    """(sequence, position) of the tokens that count: those that predict a response, else all that have a next one."""
    any_response = any(any(s.predicts) for s in prompts.sequences)
    out = []
    for i in sorted(chosen):
        s = prompts.sequences[i]
        out += [(i, t) for t in range(len(s) - 1) if s.predicts[t] or not any_response]
    return out


def expected(prompts, chosen, states_of, read, expert):
    """By token (kl, nll, l1) of final states under some head, from the definitions."""
    rows = []
    for i, t in tokens_of(prompts, chosen):
        s = prompts.sequences[i]
        target, theirs = head_input(expert, s.ids)
        state = states_of(i)[t]
        q, p = read(state).double().log_softmax(-1), theirs[t].double().log_softmax(-1)
        kl = float((p.exp() * (p - q)).sum())
        rows.append((kl, -float(q[s.ids[t + 1]]), float((state - target[t]).abs().mean()), i))
    return rows


def check(got, rows):
    assert len(got.kl) == len(rows)
    close = {"atol": 1e-4, "rtol": 1e-3}
    torch.testing.assert_close(got.kl, torch.tensor([r[0] for r in rows]).double(), **close)
    torch.testing.assert_close(got.nll, torch.tensor([r[1] for r in rows]).double(), **close)
    torch.testing.assert_close(got.l1, torch.tensor([r[2] for r in rows]).double(), **close)
    assert got.sequence.tolist() == [r[3] for r in rows]


@pytest.mark.parametrize("response", [3, None], ids=["responses", "prompts alone"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_without_correction(family, response):
    """Merged and expert, the latter by its own head and by the merged one's."""
    prompts = prompt_set((8, 11, 6, 9), response)
    merged, expert, check_on = held_out(prompts, family)
    assert len(check_on) == len(tokens_of(prompts, CHOSEN))

    def merged_states(i):
        return head_input(merged, prompts.sequences[i].ids)[0]

    def expert_states(i):
        return head_input(expert, prompts.sequences[i].ids)[0]

    def ours(h):
        return slow_logits(merged, h)

    def theirs(h):
        return slow_logits(expert, h)

    check(check_on.merged(), expected(prompts, CHOSEN, merged_states, ours, expert))
    check(check_on.expert(), expected(prompts, CHOSEN, expert_states, theirs, expert))
    check(check_on.expert_under_merged_head(), expected(prompts, CHOSEN, expert_states, ours, expert))
    assert float(check_on.expert().kl.abs().max()) < 1e-6 < float(check_on.merged().kl.min())


def test_corrected_at_the_final_site():
    """Positions are those within each sequence, not within the tokens that are measured."""
    prompts = prompt_set((8, 11, 6, 9))
    merged, expert, check_on = held_out(prompts)
    site = random_site("final", D, D, 3, Position("table", 7), relu=True)

    def states(i):
        h = head_input(merged, prompts.sequences[i].ids)[0]
        return torch.stack([slow_final(site, h[t], t) for t in range(len(h))]).detach()

    rows = expected(prompts, CHOSEN, states, lambda h: slow_logits(merged, h), expert)
    check(check_on.corrected(Correction({"final": site})), rows)


@pytest.mark.parametrize("final", [False, True], ids=["one layer", "layer and head"])
def test_corrected_in_depth(final):
    prompts = prompt_set((8, 11, 6, 9))
    merged, expert, check_on = held_out(prompts)
    name, layer = decoder_layers(merged)[1]
    deep = random_site("residual", D, D, 3, Position("table", 7), relu=False)
    last = random_site("final", D, D, 4, None, relu=True)

    def bend(_module, _args, out):
        state = out[0] if isinstance(out, tuple) else out
        bent = torch.stack([slow_final(deep, state[0, t], t) for t in range(state.shape[1])])[None]
        return (bent, *out[1:]) if isinstance(out, tuple) else bent

    def states(i):
        handle = layer.register_forward_hook(bend)
        h = head_input(merged, prompts.sequences[i].ids)[0]
        handle.remove()
        return torch.stack([slow_final(last, row, 0) for row in h]).detach() if final else h

    rows = expected(prompts, CHOSEN, states, lambda h: slow_logits(merged, h), expert)
    sites = {name: deep} | ({"final": last} if final else {})
    check(check_on.corrected(Correction(sites)), rows)
    check(check_on.merged(), expected(prompts, CHOSEN, lambda i: head_input(merged, prompts.sequences[i].ids)[0],
                                      lambda h: slow_logits(merged, h), expert))  # fmt: skip


def test_no_correction_is_the_merged_model():
    _, _, check_on = held_out(prompt_set((8, 11, 6, 9)))
    a, b = check_on.merged(), check_on.corrected(Correction())
    assert torch.equal(a.kl, b.kl)


def test_the_order_of_the_chosen_does_not_matter():
    prompts = prompt_set((8, 11, 6, 9))
    merged, _, forward = held_out(prompts, chosen=[1, 2, 3])
    _, _, backward = held_out(prompts, chosen=[3, 1, 2])
    site = random_site("residual", D, D, 3, None, relu=False)
    correction = Correction({decoder_layers(merged)[0][0]: site})
    for a, b in (
        (forward.merged(), backward.merged()),
        (forward.corrected(correction), backward.corrected(correction)),
    ):
        assert sorted(a.kl.tolist()) == pytest.approx(sorted(b.kl.tolist()), abs=1e-6)


def test_held_out_sequences_without_a_response_count_for_nothing():
    """Other sequences have responses, so the prompts of this one are not what is measured."""
    base = prompt_set((8, 11, 6, 9))
    bare = prompt_set((8, 11, 6, 9), None)
    prompts = PromptSet((base.sequences[0], bare.sequences[1], base.sequences[2], base.sequences[3]))
    _, _, check_on = held_out(prompts)
    assert set(check_on.merged().sequence.tolist()) == {3}
    _, _, none = held_out(prompts, chosen=[1])
    assert len(none) == 0
