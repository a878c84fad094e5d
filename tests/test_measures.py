"""Measures against loops over tokens and vocabulary, and the interval against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mergedarts import features
from mergedarts.features import Readout
from mergedarts.measures import TokenMeasures, bootstrap, measure
from tests.tiny import VOCAB, D, slow_logits, tiny

N = 40


def log_softmax(values):
    top = max(values)
    z = top + math.log(sum(math.exp(v - top) for v in values))
    return [v - z for v in values]


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    ours, theirs = torch.randn(N, D, generator=g), torch.randn(N, D, generator=g)
    theirs[::4] = ours[::4] + 0.01 * theirs[::4]
    follow = torch.randint(0, VOCAB, (N,), generator=g)
    return ours, theirs, follow, torch.arange(N) // 7


@pytest.mark.parametrize("rows", [None, VOCAB, 80, 120], ids=["same head", "other head", "fewer rows", "more rows"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_measures_by_hand(family, rows, monkeypatch):
    """KL over the rows both have, each renormalised over them; NLL over the model's own vocabulary; small chunks."""
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 1)
    model = tiny(family)
    ours, theirs, follow, sequence = inputs()
    head = None if rows is None else (0.3 * torch.randn(rows, D, generator=torch.Generator().manual_seed(5)), None)
    (got,) = measure(Readout(model), [(ours, None)], theirs, head, follow, sequence)
    q = slow_logits(model, ours).double()
    p = slow_logits(model, theirs).double() if head is None else capped(model, theirs @ head[0].T).double()
    both = min(VOCAB, rows or VOCAB)
    for t in range(N):
        log_p, log_q = log_softmax(p[t, :both].tolist()), log_softmax(q[t, :both].tolist())
        kl = sum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
        assert float(got.kl[t]) == pytest.approx(kl, abs=2e-5, rel=1e-4)
        assert bool(got.agree[t]) == (log_p.index(max(log_p)) == log_q.index(max(log_q)))
        assert float(got.nll[t]) == pytest.approx(-log_softmax(q[t].tolist())[int(follow[t])], abs=2e-5, rel=1e-4)
        l1 = sum(abs(float(ours[t, j]) - float(theirs[t, j])) for j in range(D)) / D
        assert float(got.l1[t]) == pytest.approx(l1, rel=1e-5)
        own = log_softmax(p[t].tolist())
        assert float(got.entropy[t]) == pytest.approx(-sum(math.exp(a) * a for a in own), rel=1e-4)
    assert 0 < float(got.agree.mean()) < 1
    assert got.sequence.tolist() == sequence.tolist()


def capped(model, logits):
    cap = getattr(model.config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def test_states_read_by_another_head():
    """The expert by its own head: no distance from itself, and its own likelihood."""
    model, (_, theirs, follow, sequence) = tiny("llama"), inputs()
    head = (0.3 * torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(5)), None)
    got, copy = measure(Readout(model), [(theirs, head), (theirs.clone(), head)], theirs, head, follow, sequence)
    assert float(got.kl.abs().max()) < 1e-6
    assert float(got.agree.min()) == 1.0
    for t in (0, N - 1):
        want = -log_softmax((theirs[t] @ head[0].T).tolist())[int(follow[t])]
        assert float(got.nll[t]) == pytest.approx(want, rel=1e-5)
    for name in ("kl", "agree", "nll", "l1"):
        torch.testing.assert_close(getattr(copy, name), getattr(got, name), atol=1e-6, rtol=0)


def test_several_states_at_once_are_each_as_alone(monkeypatch):
    """With heads of other lengths among them, in chunks that do not divide the tokens."""
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 1)
    model, (ours, theirs, follow, sequence) = tiny("llama"), inputs()
    small, large = (
        (0.3 * torch.randn(rows, D, generator=torch.Generator().manual_seed(rows)), None) for rows in (VOCAB, 120)
    )
    for expert in (None, small, large):
        read = [(ours, None), (theirs, None), (theirs, expert), (ours, large)]
        together = measure(Readout(model), read, theirs, expert, follow, sequence)
        for pair, found in zip(read, together, strict=True):
            (alone,) = measure(Readout(model), [pair], theirs, expert, follow, sequence)
            for name in ("kl", "agree", "nll", "l1", "entropy", "sequence"):
                assert torch.equal(getattr(found, name), getattr(alone, name))
    assert float(together[0].kl.min()) > 0 == float(together[2].kl.max())


def sample(seed, n=50, sequences=8, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    return TokenMeasures(
        torch.rand(n, generator=g).double(),
        2 * torch.rand(n, generator=g).double(),
        torch.rand(n, generator=g).double() + shift,
        (torch.rand(n, generator=g) > 0.4).double(),
        torch.rand(n, generator=g).double(),
        torch.randint(0, sequences, (n,), generator=g) * 3 + 2,
    )


def means_by_hand(s, tokens):
    rows = [(float(s.l1[t]), float(s.entropy[t]), float(s.kl[t]), float(s.agree[t]), float(s.nll[t])) for t in tokens]
    high = [r[2] for r in rows if r[1] > 1.0]
    return {
        "ewl1": sum(r[0] * r[1] for r in rows) / sum(r[1] for r in rows),
        "kl": sum(r[2] for r in rows) / len(rows),
        "kl_high": sum(high) / len(high) if high else None,
        "agreement": sum(r[3] for r in rows) / len(rows),
        "nll": sum(r[4] for r in rows) / len(rows),
    }


def test_means():
    s = sample(0)
    got = s.means()
    for name, value in means_by_hand(s, range(50)).items():
        assert got[name] == pytest.approx(value, rel=1e-9)
    assert got["tokens"] == 50
    assert got["sequences"] == len(set(s.sequence.tolist()))


def test_means_without_entropy():
    """No token above 1 nat: None. No entropy at all: the weighted loss is 0, not a division by it."""
    s = sample(0)
    low = TokenMeasures(s.l1, torch.full_like(s.entropy, 1.0), s.kl, s.agree, s.nll, s.sequence).means()
    assert low["kl_high"] is None
    none = TokenMeasures(s.l1, torch.zeros_like(s.entropy), s.kl, s.agree, s.nll, s.sequence).means()
    assert none["ewl1"] == 0.0


@pytest.mark.parametrize("name", ["ewl1", "kl", "kl_high", "agreement", "nll"])
def test_bootstrap_equals_resampled_tokens(name):
    """The same draws of whole sequences, with their tokens laid out one after another."""
    a, b = sample(0), sample(1)
    b = TokenMeasures(b.l1, b.entropy, b.kl, b.agree, b.nll, a.sequence)
    got = bootstrap({"a": a, "b": b}, lambda m: m["a"][name] - m["b"][name], draws=150, seed=3)
    ids = sorted(set(a.sequence.tolist()))
    tokens = {i: [t for t in range(50) if int(a.sequence[t]) == i] for i in ids}
    rng = np.random.default_rng(3)
    values = []
    for _ in range(150):
        drawn = [t for i in rng.integers(0, len(ids), len(ids)) for t in tokens[ids[i]]]
        values.append(means_by_hand(a, drawn)[name] - means_by_hand(b, drawn)[name])
    assert got == pytest.approx(tuple(np.percentile(values, [2.5, 97.5])), rel=1e-9)


def test_bootstrap_is_paired():
    """A constant difference has an interval of no width, however noisy the tokens; the level has one."""
    a = sample(0)
    b = TokenMeasures(a.l1, a.entropy, a.kl + 0.25, a.agree, a.nll, a.sequence)
    low, high = bootstrap({"a": a, "b": b}, lambda m: m["b"]["kl"] - m["a"]["kl"], draws=200)
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.25)
    low, high = bootstrap({"a": a}, lambda m: m["a"]["kl"], draws=200)
    assert high - low > 0.02


@pytest.mark.slow
def test_bootstrap_covers():
    """Nominal 95% intervals hold the true mean in most of 150 simulations, though tokens of a sequence are alike."""
    rng = np.random.default_rng(0)
    hits = narrow = 0
    for trial in range(150):
        effect = rng.normal(size=40)
        sequence = np.repeat(np.arange(40), 6)
        kl = torch.tensor(1.0 + effect[sequence] + 0.3 * rng.normal(size=240))
        one = torch.ones(240, dtype=torch.float64)
        s = TokenMeasures(one, one, kl, one, one, torch.tensor(sequence))
        low, high = bootstrap({"a": s}, lambda m: m["a"]["kl"], draws=200, seed=trial)
        hits += low <= 1.0 <= high
        spread = 1.96 * float(kl.std()) / math.sqrt(240)
        narrow += float(kl.mean()) - spread <= 1.0 <= float(kl.mean()) + spread
    assert 0.88 * 150 <= hits <= 149
    assert narrow < 0.75 * 150  # an interval over tokens would not do
