"""Positions, domains and batches over random padding, caches and lengths: each row as if it were alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergedarts import memory
from mergedarts.correction import Correction, Position
from mergedarts.features import batches, final_states
from mergedarts.memory import by_halves
from mergedarts.runtime import attach
from tests.tiny import VOCAB, D, head_input, prompt_set, random_site, tiny

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "gemma2", "gpt2")


@cache
def model_of(family):
    return tiny(family)


@cache
def corrections_of(family):
    """One domain at the final site by a table, one after the first layer by smooth functions."""
    from mergedarts.models import decoder_layers

    first = decoder_layers(model_of(family))[0][0]
    return {
        "a": Correction({"final": random_site("final", D, D, 1, Position("table", 5), relu=True)}),
        "b": Correction({first: random_site("residual", D, D, 2, Position("smooth", 3, 20), relu=False)}),
    }


def alone(family, ids, domain):
    """Logits [T, V] of one row in one pass, without padding or cache."""
    model = model_of(family)
    with attach(model, corrections_of(family), domain), torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


@given(
    st.sampled_from(FAMILIES),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=0, max_size=3),
    st.integers(0, 3),
    st.data(),
)
def test_left_padded_chunks_with_a_cache(family, lengths, chunks, extra, draw):
    """A batch padded on the left by more than it needs, prefilled in pieces, then continued in steps of any length."""
    model = model_of(family)
    width = max(lengths) + extra
    total = sum(chunks)
    generator = torch.Generator().manual_seed(draw.draw(st.integers(0, 99)))
    rows = [torch.randint(3, VOCAB, (n + total,), generator=generator) for n in lengths]
    domains = [draw.draw(st.sampled_from(["a", "b", None])) for _ in rows]
    ids, mask = torch.zeros(len(rows), width + total, dtype=torch.long), torch.zeros(len(rows), width + total).long()
    for row, (n, own) in enumerate(zip(lengths, rows, strict=True)):
        ids[row, width - n :], mask[row, width - n :] = own, 1
    # The first piece must hold a real token of each row.
    least = width - min(lengths) + 1
    cuts = sorted(
        {
            draw.draw(st.integers(least, width)),
            width,
            *(width + sum(chunks[: i + 1]) for i in range(total and len(chunks))),
        }
    )
    past, got, start = None, [], 0
    with attach(model, corrections_of(family)) as handle, torch.no_grad():
        handle.domain = domains
        for end in cuts:
            out = model(
                input_ids=ids[:, start:end], attention_mask=mask[:, :end], past_key_values=past, use_cache=True,
                position_ids=(mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, start:end],
            )  # fmt: skip
            past, start = out.past_key_values, end
            got.append(out.logits)
    found = torch.cat(got, 1)
    for row, (n, own) in enumerate(zip(lengths, rows, strict=True)):
        want = alone(family, own, domains[row])
        torch.testing.assert_close(found[row, width - n :], want, atol=5e-4, rtol=5e-3)


@given(st.sampled_from(FAMILIES), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_right_padding(family, lengths, extra, draw):
    model = model_of(family)
    generator = torch.Generator().manual_seed(draw.draw(st.integers(0, 99)))
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    domains = [draw.draw(st.sampled_from(["a", "b", None])) for _ in rows]
    width = max(lengths) + extra
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    with attach(model, corrections_of(family)) as handle, torch.no_grad():
        handle.domain = domains
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    for row, own in enumerate(rows):
        torch.testing.assert_close(found[row, : len(own)], alone(family, own, domains[row]), atol=5e-4, rtol=5e-3)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 200))
def test_batches_hold_each_sequence_once(lengths, tokens):
    prompts = prompt_set(tuple(lengths), response=None)
    found = batches(prompts, tokens)
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= tokens for b in found)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 200), st.integers(30, 200))
def test_halves_hold_each_sequence_once(monkeypatch, lengths, tokens, most):
    prompts = prompt_set(tuple(lengths), response=None)

    monkeypatch.setattr(memory, "free_cached", lambda: None)  # which takes its time in a large process

    def run(batch):
        if len(batch) * max(lengths[i] for i in batch) > most:
            raise MemoryError
        return list(batch)

    found = list(by_halves(batches(prompts, tokens), run, prompts.length, "x"))
    assert sorted(i for batch, _ in found for i in batch) == list(range(len(lengths)))
    assert all(batch == result for batch, result in found)


@given(st.sampled_from(FAMILIES), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_states_do_not_depend_on_the_batch(family, lengths):
    model, prompts = model_of(family), prompt_set(tuple(lengths), response=None)
    found = {}

    def take(batch, state):
        for row, i in enumerate(batch):
            found[i] = state[row, : lengths[i]].clone()

    final_states(model, prompts, take, "x")
    for i, sequence in enumerate(prompts.sequences):
        want, _ = head_input(model, sequence.ids)
        torch.testing.assert_close(found[i], want, atol=5e-4, rtol=5e-3)
