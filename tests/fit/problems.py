"""Small regression problems for the fits, in float64 numpy. Knows nothing of the package."""

from __future__ import annotations

import numpy as np

KINDS = ["none", "constant", "smooth", "table"]
WEIGHTS = ["ones", "uneven", "some zero"]


def functions(kind, positions):
    """[n, k] position functions, written out."""
    if kind == "none":
        return np.zeros((len(positions), 0))
    if kind == "constant":
        return np.ones((len(positions), 1))
    if kind == "table":
        return np.array([[float(min(p, 2) == j) for j in range(3)] for p in positions])
    u = np.log1p(np.minimum(positions, 9)) / np.log(10)
    return np.stack([np.cos(np.pi * j * u) for j in range(3)], 1)


def problem(kind="smooth", weights="uneven", n=36, d_in=5, d_out=4, seed=0, noise=0.5):
    """Correlated inputs of uneven scale, a target that depends on them and on the position, and a metric."""
    rng = np.random.default_rng(seed)
    positions = np.arange(n) % 12
    f = functions(kind, positions)
    x = rng.normal(size=(n, d_in)) @ rng.normal(size=(d_in, d_in)) * rng.uniform(0.3, 3, d_in) + rng.normal(size=d_in)
    d = 0.5 * x @ rng.normal(size=(d_in, d_out)) + f @ rng.normal(size=(f.shape[1], d_out)) + rng.normal(size=d_out)
    d = d + noise * rng.normal(size=(n, d_out))
    w = {"ones": np.ones(n), "uneven": rng.uniform(0.1, 3, n), "some zero": (np.arange(n) % 4 > 0) * 1.5}[weights]
    a = rng.normal(size=(d_out, d_out + 2))
    return x, f, d, w, a @ a.T + 0.1 * np.eye(d_out)
