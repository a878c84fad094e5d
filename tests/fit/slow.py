"""Slow references of the fits: loops, dense solves and brute force in float64 numpy. Knows nothing of the package."""

from __future__ import annotations

import numpy as np


def tilde(x, f, w):
    """x less its weighted regression on f, one column at a time."""
    out = np.array(x, dtype=np.float64)
    root = np.sqrt(w)
    for j in range(x.shape[1] if f.shape[1] else 0):
        c = np.linalg.lstsq(f * root[:, None], x[:, j] * root, rcond=None)[0]
        out[:, j] -= f @ c
    return out


def powers(x, f, w):
    """s_j = sum_t w_t x~_tj^2."""
    return np.array([sum(w[t] * v[t] ** 2 for t in range(len(w))) for v in tilde(x, f, w).T])


def half(metric):
    """Symmetric square root of a metric."""
    values, vectors = np.linalg.eigh(metric)
    return vectors @ np.diag(np.sqrt(values)) @ vectors.T


def objective(x, f, d, w, metric, ridge, dense):
    """The penalised weighted error of a map [d_in + k, d_out], token by token."""
    n = x.shape[1]
    total = 0.0
    for t in range(len(w)):
        r = d[t] - dense[:n].T @ x[t] - dense[n:].T @ f[t]
        total += w[t] * (r @ metric @ r)
    s = powers(x, f, w)
    for j in range(n):
        total += ridge * s[j] * (dense[j] @ metric @ dense[j])
    return total


def kronecker(x, f, d, w, metric, ridge):
    """The full-rank minimum by one solve for all of vec(B): (M kron (Phi'W Phi + ridge S)) vec B = vec(Phi'W D M)."""
    phi = np.concatenate([x, f], 1)
    gram = phi.T @ (w[:, None] * phi)
    gram += np.diag(np.concatenate([ridge * powers(x, f, w), np.zeros(f.shape[1])]))
    right = phi.T @ (w[:, None] * d) @ metric
    vec = np.linalg.lstsq(np.kron(metric, gram), right.T.reshape(-1), rcond=None)[0]
    return vec.reshape(d.shape[1], phi.shape[1]).T


def augmented(x, f, d, w, metric, ridge):
    """Rows of the least-squares problem in whitened outputs, the ridge as further rows: (x rows, f rows, d rows)."""
    root, m = np.sqrt(w)[:, None], half(metric)
    rows = np.diag(np.sqrt(ridge * powers(x, f, w)))
    zero_f, zero_d = np.zeros((x.shape[1], f.shape[1])), np.zeros((x.shape[1], d.shape[1]))
    return np.concatenate([root * x, rows]), np.concatenate([root * f, zero_f]), np.concatenate([root * d @ m, zero_d])


def truncated(x, f, d, w, metric, ridge, rank, inside):
    """The rank-r minimum by lstsq on augmented rows and the SVD of their fitted values: [d_in + k, d_out]."""
    xa, fa, da = augmented(x, f, d, w, metric, ridge)
    m = half(metric)
    if inside:
        both = np.concatenate([xa, fa], 1)
        full = np.linalg.lstsq(both, da, rcond=None)[0]
        v = np.linalg.svd(both @ full)[2][:rank].T
        return full @ v @ v.T @ np.linalg.inv(m)
    centred, rest = xa, da
    if f.shape[1]:
        centred = xa - fa @ np.linalg.lstsq(fa, xa, rcond=None)[0]
        rest = da - fa @ np.linalg.lstsq(fa, da, rcond=None)[0]
    full = np.linalg.lstsq(centred, rest, rcond=None)[0]
    v = np.linalg.svd(centred @ full)[2][:rank].T
    low = full @ v @ v.T
    free = np.linalg.lstsq(fa, da - xa @ low, rcond=None)[0] if f.shape[1] else np.zeros((0, d.shape[1]))
    return np.concatenate([low, free]) @ np.linalg.inv(m)


def alternating(x, f, d, w, metric, ridge, rank, inside, starts=3, iterations=600):
    """The same by brute force: alternate exact solves for either factor from random starts; the best of them."""
    xa, fa, da = augmented(x, f, d, w, metric, ridge)
    if inside:
        xa, fa = np.concatenate([xa, fa], 1), fa[:, :0]
    rng = np.random.default_rng(0)
    n, out = xa.shape[1], d.shape[1]
    free = np.kron(fa, np.eye(out))
    best, found = np.inf, None
    for _ in range(starts):
        p = rng.normal(size=(n, rank))
        last = np.inf
        for _ in range(iterations):
            solved = np.linalg.lstsq(np.concatenate([xa @ p, fa], 1), da, rcond=None)[0]
            q = solved[:rank].T
            design = np.concatenate([np.kron(xa, q), free], 1)
            solved = np.linalg.lstsq(design, da.reshape(-1), rcond=None)[0]
            p, g = solved[: n * rank].reshape(n, rank), solved[n * rank :].reshape(-1, out)
            loss = ((da - xa @ p @ q.T - fa @ g) ** 2).sum()
            if last - loss < 1e-13 * loss:
                break
            last = loss
        if loss < best:
            best, found = loss, np.concatenate([p @ q.T, g])
    return found @ np.linalg.inv(half(metric))
