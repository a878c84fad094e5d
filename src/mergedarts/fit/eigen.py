"""Leading singular directions of a product of matrices.

Knows when a few of many are found by Lanczos and when a dense solve is as good; knows nothing of what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from threadpoolctl import ThreadpoolController

#: Below this share of the width, the leading directions are found without a dense decomposition.
FEW = 1 / 8


def leading(product: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest squared singular values [count], falling, of a product A, and their right vectors [n, count].

    Args:
        product: float64 matrices on the CPU whose product, from left to right, is A [m, n].
        count: how many; at most n.
    """
    width = product[-1].shape[1]
    if all(bool(p.any()) for p in product) and 0 < count < FEW * width:

        def gram(v: np.ndarray) -> np.ndarray:
            w = torch.from_numpy(v)
            for part in reversed(product):
                w = part @ w
            for part in product:
                w = part.T @ w
            return w.numpy()

        start = np.random.default_rng(0).standard_normal(width)  # fixed, so that the same matrix gives the same bits
        with _openblas().limit(limits=1):
            found = eigsh(LinearOperator((width, width), gram, dtype=np.float64), count, v0=start)
        values, vectors = (torch.from_numpy(a.copy()) for a in found)
    else:
        whole = product[0]
        for part in product[1:]:
            whole = whole @ part
        values, vectors = torch.linalg.eigh(whole.T @ whole)
    order = values.argsort(descending=True)[:count]
    return values[order].clamp(min=0), vectors[:, order]


@cache
def _openblas() -> ThreadpoolController:
    """SciPy's threads, which wait for the next call spinning, and so would take the cores from PyTorch's."""
    return ThreadpoolController().select(internal_api="openblas")
