"""The closed form against dense solves and brute force, all float64, from here or `slow`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergedarts.fit.closed_form import Solution, Statistics, choose_ridge, error, regularised, solve
from tests.fit import slow
from tests.fit.problems import KINDS, WEIGHTS, problem


def statistics(x, f, d, w):
    """Exact sums in float64, so that `solve` is tested apart from `Statistics.of`."""
    phi = np.concatenate([x, f], 1)
    xx, xd, dd = phi.T @ np.diag(w) @ phi, phi.T @ np.diag(w) @ d, d.T @ np.diag(w) @ d
    return Statistics(*(torch.tensor(a) for a in (xx, xd, dd)), float(w.sum()), f.shape[1])


def dense_of(ridge, rank, k):
    left, right = ridge.at_rank(rank).factors(k)
    return (left @ right).numpy()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_sums_over_tokens(kind, weights):
    x, f, d, w, _ = problem(kind, weights)
    got = Statistics.of(*(torch.tensor(a).float() for a in (x, f, d)), torch.tensor(w))
    x, f, d = (a.astype(np.float32).astype(np.float64) for a in (x, f, d))
    size = x.shape[1] + f.shape[1]
    xx, xd, dd = np.zeros((size, size)), np.zeros((size, d.shape[1])), np.zeros((d.shape[1], d.shape[1]))
    for t in range(len(w)):
        phi = np.concatenate([x[t], f[t]])
        xx += w[t] * np.outer(phi, phi)
        xd += w[t] * np.outer(phi, d[t])
        dd += w[t] * np.outer(d[t], d[t])
    for name, want in (("xx", xx), ("xd", xd), ("dd", dd)):
        value = getattr(got, name)
        assert value.dtype == torch.float64
        np.testing.assert_allclose(value.numpy(), want, atol=1e-5 * np.abs(want).max(), rtol=0)
    assert got.weight == pytest.approx(w.sum(), rel=1e-6)
    assert got.functions == f.shape[1]


def test_statistics_of_more_tokens_than_a_block():
    """5000 tokens are summed in blocks; none is lost or taken twice."""
    rng = np.random.default_rng(1)
    x, d, w = rng.normal(size=(5000, 2)), rng.normal(size=(5000, 1)), rng.uniform(0, 1, 5000)
    got = Statistics.of(torch.tensor(x), torch.zeros(5000, 0), torch.tensor(d), torch.tensor(w))
    want = sum(w[t] * np.outer(x[t], x[t]) for t in range(5000))
    np.testing.assert_allclose(got.xx.numpy(), want, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(got.dd.numpy(), [[float((w * d[:, 0] ** 2).sum())]], rtol=1e-5)


@pytest.mark.parametrize("width", [1, 127, 129, 300, 577])
def test_statistics_of_widths_about_a_block(width):
    """Of symmetric sums a half is computed in blocks of columns, and mirrored."""
    rng = np.random.default_rng(4)
    x, d = (torch.tensor(rng.normal(size=(20, n))) for n in (width, width + 1))
    got = Statistics.plain(x, d, torch.full((20,), 2.0))
    for value, a, b in ((got.xx, x, x), (got.xd, x, d), (got.dd, d, d)):
        torch.testing.assert_close(value, 2 * a.T @ b, rtol=0, atol=1e-4)
        assert a is not b or torch.equal(value, value.T)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("length", [300, 5000])
def test_statistics_of_bfloat16_states(weights, length):
    """States in bfloat16 are not rounded again, however uneven the weights; nor are sums of an input of large mean."""
    rng = np.random.default_rng(2)
    w = {"ones": np.ones(length), "uneven": rng.uniform(0.1, 3, length), "some zero": (np.arange(length) % 4 > 0) * 1.5}
    w = torch.tensor(w[weights])
    # Outlier dimensions as decoder states have them, one of which hardly varies.
    size, mean = torch.ones(32), np.zeros(32)
    size[1:4], mean[1] = torch.tensor([300.0, 0.01, 20.0]), 50
    x = (torch.tensor(rng.normal(mean, size=(length, 32))) * size).bfloat16()
    d, f = torch.tensor(rng.normal(size=(length, 16))).bfloat16(), torch.tensor(rng.normal(size=(length, 2))).float()
    got = Statistics.of(x, f, d, w)
    p, t = ((part.double() * w[:, None].sqrt()) for part in (x, d))
    for value, a, b in ((got.xx[:32, :32], p, p), (got.xd[:32], p, t), (got.dd, t, t)):
        assert float(((value - a.T @ b).abs() / (a.norm(dim=0)[:, None] * b.norm(dim=0))).max()) < 2e-6
    heavy = f.double() * w[:, None]
    torch.testing.assert_close(got.xx[32:, :32], heavy.T @ x.double(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.xd[32:], heavy.T @ d.double(), rtol=1e-9, atol=1e-9)


def test_inputs_that_do_not_vary_are_left_out_whatever_the_weights():
    """In bfloat16 too: an input times the root of its weight, were it rounded, would follow the weights."""
    rng = np.random.default_rng(3)
    w = torch.where(torch.arange(4000) % 3 > 0, 1.0, 0.2137).double()
    x = torch.tensor(rng.normal(size=(4000, 64))).bfloat16()
    x[:, 1:7] = torch.tensor([1234.0, 777.0, 3.3, -51.0, 0.07, 9000.0])
    d = (x.float()[:, :1] + w[:, None].float() + torch.tensor(rng.normal(size=(4000, 2))).float()).bfloat16()
    one = torch.ones(4000, 1)
    found = solve(Statistics.of(x, one, d, w), 0.01, inside=True).at_rank(2)
    left, right = found.factors(1)
    assert float((left @ right)[1:7].abs().max()) == 0
    assert float((left @ right)[0, 0]) == pytest.approx(1, abs=0.05)


def test_statistics_add_and_subtract():
    x, f, d, w, _ = problem()
    parts = [statistics(x[i::3], f[i::3], d[i::3], w[i::3]) for i in range(3)]
    rest = statistics(*(np.concatenate([a[1::3], a[2::3]]) for a in (x, f, d, w)))
    whole = statistics(x, f, d, w)
    for got, want in ((parts[0] + parts[1] + parts[2], whole), (whole - parts[0], rest)):
        for name in ("xx", "xd", "dd"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-10)
        assert got.weight == pytest.approx(want.weight)
        assert got.functions == want.functions


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_is_the_generalised_least_squares_solution(kind, weights, ridge, inside):
    x, f, d, w, metric = problem(kind, weights)
    want = slow.kronecker(x, f, d, w, metric, ridge)
    for m in (torch.tensor(metric), None, torch.tensor(metric).inverse()):
        got = dense_of(solve(statistics(x, f, d, w), ridge, m, inside), 4, f.shape[1])
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("shape", [(3, 6), (7, 2), (1, 4), (4, 1)], ids=str)
def test_full_rank_of_other_shapes(shape, inside):
    """More outputs than inputs, and the reverse; full rank is reached at d_in (+ k inside), and stays there beyond."""
    x, f, d, w, metric = problem(d_in=shape[0], d_out=shape[1])
    want = slow.kronecker(x, f, d, w, metric, 0.1)
    ridge = solve(statistics(x, f, d, w), 0.1, torch.tensor(metric), inside)
    full = min(shape[1], shape[0] + (f.shape[1] if inside else 0))
    for rank in {full, shape[1]}:
        np.testing.assert_allclose(dense_of(ridge, rank, f.shape[1]), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("kind", "ridge"), [("none", 0.2), ("constant", 0.0), ("smooth", 0.2), ("table", 1.0)])
def test_low_rank_is_the_minimum_found_by_brute_force(kind, ridge, rank, inside):
    x, f, d, w, metric = problem(kind, n=28)
    want = slow.alternating(x, f, d, w, metric, ridge, rank, inside)
    got = dense_of(solve(statistics(x, f, d, w), ridge, torch.tensor(metric), inside), rank, f.shape[1])
    inner = got if inside else got[: x.shape[1]]
    assert np.linalg.matrix_rank(inner, tol=1e-9) <= rank
    losses = [slow.objective(x, f, d, w, metric, ridge, b) for b in (got, want)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_low_rank_depends_on_the_metric(inside):
    """At low rank the metric chooses the directions; with the wrong one the error in it is higher."""
    x, f, d, w, metric = problem()
    errors = []
    for m in (torch.tensor(metric), None):
        dense = dense_of(solve(statistics(x, f, d, w), 0.0, m, inside), 1, f.shape[1])
        errors.append(slow.objective(x, f, d, w, metric, 0.0, dense))
    assert errors[0] < 0.99 * errors[1]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_gains_are_the_decreases_of_the_objective(kind, inside):
    x, f, d, w, metric = problem(kind)
    ridge = solve(statistics(x, f, d, w), 0.2, torch.tensor(metric), inside)
    losses = [slow.objective(x, f, d, w, metric, 0.2, dense_of(ridge, r, f.shape[1])) for r in range(5)]
    gains = ridge.leading(4)[0]
    np.testing.assert_allclose(gains.numpy(), -np.diff(losses), rtol=1e-8, atol=1e-9 * losses[0])
    assert (gains.diff() <= 1e-9).all()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("m", ["metric", None])
def test_few_of_many_directions_are_the_leading_ones(inside, m):
    """Where the rank is far below the width the eigenpairs come from Lanczos: the same as of the dense matrix."""
    x, f, d, w, metric = problem(n=60, d_in=24, d_out=40, seed=5)
    use = torch.tensor(metric) if m else None
    ridge = solve(statistics(x, f, d, w), 0.1, use, inside)
    want = slow.truncated(x, f, d, w, metric if m else np.eye(40), 0.1, 3, inside)
    np.testing.assert_allclose(dense_of(ridge, 3, f.shape[1]), want, rtol=1e-7, atol=1e-9 * np.abs(want).max())


@pytest.mark.parametrize("reference", ["truncated", "alternating"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_reference_of_the_sweep_is_right(inside, reference):
    """The faster reference, which tests of the sweep use, agrees with brute force (no code of the package here)."""
    x, f, d, w, metric = problem(n=28)
    a = slow.truncated(x, f, d, w, metric, 0.2, 2, inside)
    b = getattr(slow, reference)(x, f, d, w, metric, 0.2, 2, inside)
    assert slow.objective(x, f, d, w, metric, 0.2, a) == pytest.approx(slow.objective(x, f, d, w, metric, 0.2, b))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_site_applies_what_was_solved(kind, inside):
    """The module subtracts; the solution predicts D = h* - h; together they give h + prediction."""
    from mergedarts.correction import Position

    x, f, d, w, metric = problem(kind, d_in=4)
    forms = {
        "none": None,
        "constant": Position("table", 1),
        "smooth": Position("smooth", 3, 9),
        "table": Position("table", 3),
    }
    solution = solve(statistics(x, f, d, w), 0.1, torch.tensor(metric), inside).at_rank(2)
    site = solution.site("residual", forms[kind])
    h = torch.tensor(x).float()
    got = site(h, h, torch.arange(len(x)) % 12).detach().numpy()
    left, right = solution.factors(f.shape[1])
    dense = (left @ right).numpy()
    np.testing.assert_allclose(got, x + x @ dense[:4] + f @ dense[4:], rtol=2e-4, atol=2e-4 * np.abs(x).max())


@pytest.mark.parametrize("m", ["metric", None])
def test_error_is_a_mean_over_tokens(m):
    x, f, d, w, metric = problem()
    use = metric if m else np.eye(4)
    made = np.random.default_rng(3)
    solution = Solution(
        torch.tensor(made.normal(size=(2, 8 - f.shape[1]))), torch.tensor(made.normal(size=(4, 2))),
        torch.tensor(made.normal(size=(f.shape[1], 4))), torch.tensor(made.normal(size=(f.shape[1], 2))),
    )  # fmt: skip
    dense = np.concatenate([
        (solution.up @ solution.down).T.numpy(), (solution.functions + solution.inner @ solution.up.T).numpy()
    ])  # fmt: skip
    total = 0.0
    for t in range(len(w)):
        r = d[t] - dense.T @ np.concatenate([x[t], f[t]])
        total += w[t] * r @ use @ r
    got = error(statistics(x, f, d, w), solution, torch.tensor(metric) if m else None)
    assert got == pytest.approx(total / w.sum(), rel=1e-10)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("rank", [1, 4])
def test_choose_ridge_equals_refits_without_each_fold(rank, inside):
    x, f, d, w, metric = problem(n=30, d_in=6, noise=3.0, seed=4)
    folds = [range(0, 8), range(8, 19), range(19, 30)]
    ridges = (0.0, 0.05, 0.5, 5.0)
    m = torch.tensor(metric)
    chosen, scores = choose_ridge(
        [statistics(*(a[list(i)] for a in (x, f, d, w))) for i in folds], ridges, rank, m, inside
    )
    want = {}
    for ridge in ridges:
        total = base = 0.0
        for held in folds:
            rest = [t for t in range(30) if t not in held]
            dense = slow.truncated(x[rest], f[rest], d[rest], w[rest], metric, ridge, rank, inside)
            for t in held:
                r = d[t] - dense.T @ np.concatenate([x[t], f[t]])
                total += w[t] * r @ metric @ r
                base += w[t] * d[t] @ metric @ d[t]
        want[ridge] = total / base
    assert scores == pytest.approx(want, rel=1e-6)
    assert chosen == min(want, key=want.get)
    assert len({round(v, 6) for v in want.values()}) == 4  # the ridges differ, so the choice means something


def test_choose_ridge_leaves_out_a_fold_without_weight():
    x, f, d, w, metric = problem()
    empty = statistics(x[:0], f[:0], d[:0], w[:0])
    folds = [statistics(x[i::2], f[i::2], d[i::2], w[i::2]) for i in range(2)]
    m = torch.tensor(metric)
    assert choose_ridge([*folds, empty], (0.1, 1.0), 2, m) == choose_ridge(folds, (0.1, 1.0), 2, m)


def test_regularised_adds_a_share_of_the_mean_eigenvalue():
    a = np.random.default_rng(0).normal(size=(5, 2))
    values = np.linalg.eigvalsh(a @ a.T)
    got = np.linalg.eigvalsh(regularised(torch.tensor(a @ a.T), 0.1).numpy())
    np.testing.assert_allclose(got, values + 0.1 * values.mean(), atol=1e-12)
    assert torch.equal(regularised(torch.zeros(3, 3, dtype=torch.float64)), torch.eye(3, dtype=torch.float64))


def ill(name):
    """Inputs that a plain normal-equation solve fails on: (x, f, d, w), float64 with float32 values."""
    rng = np.random.default_rng(7)
    n = 6 if name == "few tokens" else 60
    x = rng.normal(size=(n, 9))
    f = np.ones((n, 1))
    if name == "constant":
        x[:, 2] = 3.0
    if name == "zero":
        x[:, 2] = 0.0
    if name == "duplicate":
        x[:, 4] = x[:, 1]
    if name == "sum":
        x[:, 4] = x[:, 1] + x[:, 0] - 2 * x[:, 3]
    if name == "outlier":
        x[:, 5] = 1e4 * (1 + 0.1 * x[:, 5])
    if name == "outlier duplicate":
        x[:, 5] *= 1e4
        x[:, 6] = x[:, 5] + 20 * x[:, 6]
    d = x[:, :4] @ rng.normal(size=(4, 3)) + 0.1 * rng.normal(size=(n, 3)) + 1.0
    return tuple(a.astype(np.float32).astype(np.float64) for a in (x, f, d, rng.uniform(0.5, 2, n)))


@pytest.mark.parametrize("how", ["exact", "of tokens"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize(
    ("name", "helped"),
    [("constant", False), ("zero", False), ("duplicate", True), ("sum", True), ("outlier", False),
     ("outlier duplicate", False), ("few tokens", True)],
)  # fmt: skip
def test_ill_conditioned_inputs_without_ridge(name, helped, inside, how):
    """Fitted values stay those of a pseudo-inverse, on the tokens and (where they are determined) beside them."""
    x, f, d, w = ill(name)
    if how == "exact":
        sums = statistics(x, f, d, w)
    else:
        sums = Statistics.of(*(torch.tensor(a).float() for a in (x, f, d)), torch.tensor(w))
    ridge = solve(sums, 0.0, None, inside)
    assert ridge.helped == helped
    dense = dense_of(ridge, 3, 1)
    assert np.isfinite(dense).all()
    root = np.sqrt(w)[:, None]
    phi = np.concatenate([x, f], 1)
    want = np.linalg.lstsq(phi * root, d * root, rcond=1e-6)[0]
    np.testing.assert_allclose(phi @ dense, phi @ want, atol=0.02 * d.std())


@pytest.mark.parametrize("how", ["exact", "of tokens"])
@pytest.mark.parametrize("name", ["sum", "few tokens"])
def test_directions_without_data_get_little(name, how):
    """Where the tokens do not determine the map, a helped solve stays as small as a minimum-norm one."""
    x, f, d, w = ill(name)
    if how == "exact":
        sums = statistics(x, f, d, w)
    else:
        sums = Statistics.of(*(torch.tensor(a).float() for a in (x, f, d)), torch.tensor(w))
    dense = dense_of(solve(sums, 0.0, None), 3, 1)
    root = np.sqrt(w)[:, None]
    want = np.linalg.lstsq(np.concatenate([x, f], 1) * root, d * root, rcond=1e-6)[0]
    new = np.random.default_rng(1).normal(size=(200, 9))
    assert np.abs(new @ dense[:9]).mean() < 3 * np.abs(new @ want[:9]).mean()


def test_no_tokens_no_correction():
    nothing = statistics(np.zeros((0, 3)), np.zeros((0, 1)), np.zeros((0, 3)), np.zeros(0))
    for inside in (False, True):
        assert np.array_equal(dense_of(solve(nothing, 0.0, None, inside), 2, 1), np.zeros((4, 3)))


def test_sums_that_tell_no_error_fit_the_same():
    g = torch.Generator().manual_seed(0)
    x, d, w = (torch.randn(50, n, generator=g) for n in (6, 4, 1))
    given = (x, torch.ones(50, 1), d, w[:, 0].abs())
    scored, plain = Statistics.of(*given), Statistics.of(*given, scored=False)
    assert plain.dd.numel() == 0
    one, other = (solve(plain + plain - plain, 0.1).at_rank(2), solve(scored, 0.1).at_rank(2))
    assert torch.equal(one.down, other.down)
    assert torch.equal(one.up, other.up)
