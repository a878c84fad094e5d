"""Corrections by loops, their format on disk bit by bit, and what is said of a folder that does not fit."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mergedarts.correction import (
    FILE,
    Correction,
    Position,
    SiteCorrection,
    load_corrections,
    save_corrections,
)
from mergedarts.errors import UserError
from tests.tiny import slow_final

D_IN, D_OUT, RANK = 6, 4, 2
POSITIONS = {
    "none": None,
    "one row": Position("table", 1),
    "table": Position("table", 3),
    "smooth": Position("smooth", 4, 10),
}


def site(kind="residual", position="none", low=True, inside=False, relu=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    d_in = D_IN if kind == "linear" else D_OUT
    where = POSITIONS[position]
    down = torch.randn(RANK, d_in, generator=g) if low else None
    up = torch.randn(D_OUT, RANK, generator=g) if low else None
    bias = torch.randn(where.size, D_OUT, generator=g) if where and not inside else None
    inner = torch.randn(where.size, RANK, generator=g) if where and inside else None
    return SiteCorrection(kind, down, up, bias, where, relu, inner)


def cosines(p, size, last):
    u = math.log(1 + min(p, last)) / math.log(1 + last)
    return [math.cos(math.pi * j * u) for j in range(size)]


def value_at(weight, position, p):
    """A row of a table, or a weighted sum of cosines, at position p: in plain Python."""
    if position.form == "table":
        return [float(v) for v in weight[min(p, position.size - 1)]]
    f = cosines(p, position.size, position.last)
    return [sum(f[j] * float(weight[j, i]) for j in range(position.size)) for i in range(weight.shape[1])]


def by_hand(s, h, x, p):
    out = [float(v) for v in h]
    if s.down is not None:
        z = [sum(float(s.down[i, j]) * float(x[j]) for j in range(len(x))) for i in range(RANK)]
        if s.position_inner is not None:
            z = [a + b for a, b in zip(z, value_at(s.position_inner, s.position, p), strict=True)]
        if s.relu:
            z = [max(a, 0.0) for a in z]
        out = [out[o] - sum(float(s.up[o, i]) * z[i] for i in range(RANK)) for o in range(D_OUT)]
    if s.position_bias is not None:
        out = [a - b for a, b in zip(out, value_at(s.position_bias, s.position, p), strict=True)]
    return out


@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", ["final", "residual", "linear"])
def test_forward_by_hand(kind, position, inside, relu):
    """Positions within the table, at its end and far past it; within `last` and past it."""
    s = site(kind, position, inside=inside, relu=relu)
    g = torch.Generator().manual_seed(1)
    places = torch.tensor([[0, 1, 2, 3], [9, 10, 11, 5000]])
    h = torch.randn(2, 4, D_OUT, generator=g)
    x = torch.randn(2, 4, D_IN, generator=g) if kind == "linear" else h
    got = s(h, x, places)
    for b in range(2):
        for t in range(4):
            want = by_hand(s, h[b, t], x[b, t], int(places[b, t]))
            assert got[b, t].tolist() == pytest.approx(want, abs=1e-5)


def test_bias_alone():
    s = site(position="table", low=False)
    h = torch.zeros(1, 4, D_OUT)
    got = s(h, h, torch.tensor([[0, 1, 2, 7]]))
    for t, row in enumerate([0, 1, 2, 2]):
        assert torch.equal(got[0, t], -s.position_bias[row])
    assert s.rank == 0


def test_positions_past_the_end_are_those_at_the_end():
    h = torch.randn(1, 3, D_OUT)
    for position, end in (("table", 2), ("smooth", 10)):
        s = site(position=position)
        at_end = s(h, h, torch.full((1, 3), end))
        assert torch.equal(s(h, h, torch.full((1, 3), 10**6)), at_end)
        assert not torch.allclose(s(h, h, torch.full((1, 3), end - 1)), at_end)


@pytest.mark.parametrize("last", [0, 1, 9])
def test_basis(last):
    got = Position("smooth", 3, last).basis(torch.arange(12))
    for p in range(12):
        want = [1.0, 1.0, 1.0] if last == 0 else cosines(p, 3, last)
        assert got[p].tolist() == pytest.approx(want, abs=1e-5)


def test_agrees_with_the_reference_of_other_tests():
    s = site("final", "table", relu=True)
    h = torch.randn(3, D_OUT)
    got = s(h, h, torch.tensor([0, 2, 9]))
    for t, p in enumerate((0, 2, 9)):
        torch.testing.assert_close(got[t], slow_final(s, h[t], p))


@pytest.mark.parametrize(
    "parts",
    [{"down": torch.zeros(1, 2)}, {"bias": torch.zeros(1, 2)}, {"position": Position("table", 1)}],
    ids=["down alone", "bias without position", "position without bias"],
)
def test_halves_are_refused(parts):
    with pytest.raises(ValueError):
        SiteCorrection("final", **parts)


def test_parameter_count():
    c = Correction({"final": site("final", "table"), "model.layers.1": site("residual", "smooth", inside=True)})
    assert c.parameter_count == (RANK * D_OUT * 2 + 3 * D_OUT) + (RANK * D_OUT * 2 + 4 * RANK)
    assert [name for name, _ in c.items()] == ["final", "model.layers.1"]


def all_corrections():
    return {
        "code": Correction(
            {
                "model.layers.0": site("residual", "smooth", inside=True, seed=1),
                "model.layers.1": site("residual", "one row", low=False, seed=2),
                "model.layers.1.mlp.down_proj": site("linear", "none", seed=3),
                "final": site("final", "table", relu=True, seed=4),
            }
        ),
        "none_shipped": Correction(),
        "maths-2": Correction({"final": site("final", "none", seed=5)}),
    }


def test_round_trip_is_bit_equal(tmp_path):
    made = all_corrections()
    described = save_corrections(tmp_path, made)
    loaded = load_corrections(tmp_path, described)
    assert list(loaded) == list(made)
    for domain, correction in made.items():
        got = dict(loaded[domain].items())
        assert list(got) == [name for name, _ in correction.items()]
        for name, want in correction.items():
            assert (got[name].kind, got[name].relu, got[name].position) == (want.kind, want.relu, want.position)
            a, b = got[name].state_dict(), want.state_dict()
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) and a[k].dtype == torch.float32 for k in a)


def test_description_is_json(tmp_path):
    import json

    described = save_corrections(tmp_path, all_corrections())
    assert json.loads(json.dumps(described)) == described


def changed(path, change):
    """The description of a saved folder with one change; tensors stay."""
    described = copy.deepcopy(path)
    change(described)
    return described


def entry(described, at=3):
    return described["code"][at]


MISMATCHES = {
    "rank 0": lambda d: entry(d).update(rank=0),
    "no position": lambda d: entry(d).pop("position"),
    "another site": lambda d: entry(d).update(site="model.layers.7"),
    "no kind": lambda d: entry(d).pop("kind"),
    "domain left out": lambda d: d.pop("maths-2"),
    "site left out": lambda d: d["code"].pop(0),
    "bias not named": lambda d: entry(d).update(bias=False),
    "an inner that is not there": lambda d: entry(d).update(inner=True),
    "not a list": lambda d: d.update(code=5),
    "not a mapping": lambda d: d["code"].__setitem__(0, "final"),
    "rank of another shape": lambda d: entry(d).update(rank=RANK + 3),
    "table of another length": lambda d: entry(d)["position"].update(size=17),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_description_that_does_not_fit_is_said(name, tmp_path):
    described = save_corrections(tmp_path, all_corrections())
    with pytest.raises(UserError, match="calibrate again") as caught:
        load_corrections(tmp_path, changed(described, MISMATCHES[name]))
    assert FILE in str(caught.value)


def test_tensors_that_do_not_fit_each_other_are_said(tmp_path):
    """`up` of another rank than `down`: not a correction that fails at the first token."""
    from safetensors.torch import load_file, save_file

    described = save_corrections(tmp_path, all_corrections())
    tensors = load_file(tmp_path / FILE)
    tensors["code.up.weight"] = torch.zeros(D_OUT, RANK + 1)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(UserError, match="calibrate again"):
        load_corrections(tmp_path, described)


def test_a_missing_or_broken_file_is_named(tmp_path):
    described = save_corrections(tmp_path, all_corrections())
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-5])
    with pytest.raises(UserError, match=f"{FILE} is not a whole"):
        load_corrections(tmp_path, described)
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match=f"{FILE} is missing"):
        load_corrections(tmp_path, described)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_written(tmp_path, bad):
    made = all_corrections()
    with torch.no_grad():
        dict(made["code"].items())["final"].up[0, 0] = bad
    with pytest.raises(UserError, match="code.up.weight"):
        save_corrections(tmp_path, made)
    assert list(tmp_path.iterdir()) == []
