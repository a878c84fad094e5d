"""Leading directions of a product against a dense singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from mergedarts.fit.eigen import leading


@pytest.mark.parametrize("count", [0, 1, 3, 20, 40], ids=lambda c: f"{c} of 40")
@pytest.mark.parametrize("parts", [1, 2])
def test_equals_a_dense_svd(parts, count):
    g = torch.Generator().manual_seed(parts)
    product = [torch.randn(25, 30, generator=g).double(), torch.randn(30, 40, generator=g).double()]
    if parts == 1:
        product = [product[0] @ product[1]]
    whole = product[0] if parts == 1 else product[0] @ product[1]
    _, s, v = torch.linalg.svd(whole)
    values, vectors = leading(product, count)
    want = torch.cat([s, torch.zeros(15, dtype=torch.float64)])[:count] ** 2
    torch.testing.assert_close(values, want, rtol=1e-9, atol=1e-8)
    inside = min(count, 25)
    along = (v[:inside] * vectors[:, :inside].T).sum(1).abs()  # up to sign
    torch.testing.assert_close(along, torch.ones(inside, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_the_same_matrix_gives_the_same_bits():
    a = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)).double()
    one, two = leading((a,), 3), leading((a.clone(),), 3)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_nothing_to_find():
    values, vectors = leading((torch.zeros(30, 64).double(),), 2)
    assert values.tolist() == [0.0, 0.0]
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(2).double())


@pytest.mark.parametrize("rank", [1, 2])
def test_more_directions_than_the_matrix_has(rank):
    g = torch.Generator().manual_seed(rank)
    a = torch.randn(60, rank, generator=g).double() @ torch.randn(rank, 64, generator=g).double()
    values, vectors = leading((a,), 4)
    torch.testing.assert_close(values, torch.linalg.svdvals(a)[:4] ** 2, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(4).double())
    assert torch.equal(vectors, leading((a,), 4)[1])
