"""Weighted reduced-rank ridge regression with an exact solution, and its reweighted passes towards the L1 geometry.

Knows sufficient statistics and linear algebra in float64; runs no model and reads no files.

With features x [d_in], position functions f [k] and target D = h* - h [d_out], the fit minimises over L of rank r and F

    sum_t w_t (D_t - L'x_t - F'f_t)' M (D_t - L'x_t - F'f_t) + ridge sum_j s_j |M^(1/2) L_j|^2,  s_j = sum_t w_t x~_tj^2

where x~ is x less its regression on f, and M the metric of the output. With `inside`, (L, F) together have rank r, so a
position costs r parameters and not d_out; otherwise F is free. The rank-r solution is the ridge solution
projected on the leading eigenvectors of its fitted values in the metric M (Izenman 1975; with ridge Mukherjee & Zhu
2011), exact because the penalty is a quadratic form in the metric of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.linalg import lapack

from ..correction import Kind, Position, SiteCorrection
from ..distributed import add_up
from .eigen import leading

#: Condition number of the scaled input matrix beyond which a solve is not to be trusted: products of features are
#: summed in float32 blocks, so directions weaker than this are rounding.
MAX_CONDITION = 1e7
#: Share of an input's power beyond the position functions up to which it counts as constant: the rounding of the sums.
CONSTANT = 4e-6
#: Tokens whose products are summed in float32.
BLOCK = 2048
#: Blocks of 128 columns or more in which a symmetric product is made: (SPLIT + 1) / (2 SPLIT) of it is computed.
SPLIT = 4


@dataclass
class Statistics:
    """Sums over tokens, all float64: what a fit needs to know of them. They add and subtract.

    Attributes:
        xx: [d_in + k, d_in + k] of (x, f) with itself, weighted.
        xd: [d_in + k, d_out] of (x, f) with D.
        dd: [d_out, d_out] of D with itself; [0, 0] where no error is to be told from the sums.
        weight: sum of weights.
        functions: k, the number of position functions at the end of xx.
    """

    xx: torch.Tensor
    xd: torch.Tensor
    dd: torch.Tensor
    weight: float
    functions: int

    @classmethod
    def of(
        cls, x: torch.Tensor, f: torch.Tensor, d: torch.Tensor, weights: torch.Tensor, scored: bool = True
    ) -> Statistics:
        """Of tokens x [n, d_in], functions f [n, k], targets d [n, d_out] and weights [n]; with dd where `scored`."""
        return cls.plain(x, d, weights, scored).with_functions(f, x, d, weights)

    @classmethod
    def plain(cls, x: torch.Tensor, d: torch.Tensor, weights: torch.Tensor, scored: bool = True) -> Statistics:
        """Of tokens x [n, d_in], targets d [n, d_out] and weights [n], without position functions.

        Products are summed in float32 over at most a few thousand tokens, and these sums in float64.
        """
        n, own = x.shape[1], d.shape[1] if scored else 0
        xx = torch.zeros(n, n, dtype=torch.float64)
        xd = torch.zeros(n, d.shape[1], dtype=torch.float64)
        dd = torch.zeros(own, own, dtype=torch.float64)
        for p, t, w in zip(x.split(BLOCK), d.split(BLOCK), weights.to(x.device).split(BLOCK), strict=True):
            root = w.float().sqrt()[:, None]
            a, b = p.float() * root, t.float() * root
            alike, cross = products(a, b)
            xx += alike
            xd += cross
            if scored:
                dd += products(b)[0]
        return cls(xx, xd, dd, float(weights.double().sum()), 0)

    def with_functions(self, f: torch.Tensor, x: torch.Tensor, d: torch.Tensor, weights: torch.Tensor) -> Statistics:
        """The same tokens, of which `plain` made these, with position functions f [n, k] after their inputs.

        Sums with the functions, which may be nearly dependent, are wholly in float64.
        """
        n, k = x.shape[1], f.shape[1]
        xx = torch.zeros(n + k, n + k, dtype=torch.float64)
        xd = torch.zeros(n + k, d.shape[1], dtype=torch.float64)
        xx[:n, :n], xd[:n] = self.xx, self.xd
        for g, p, t, w in zip(*(part.split(BLOCK) for part in (f, x, d, weights)), strict=True) if k else ():
            heavy = g.cpu().double() * w.cpu().double()[:, None]
            xx[n:, :n] += heavy.T @ p.cpu().double()
            xx[n:, n:] += heavy.T @ g.cpu().double()
            xd[n:] += heavy.T @ t.cpu().double()
        xx[:n, n:] = xx[n:, :n].T
        return Statistics(xx, xd, self.dd, self.weight, k)

    def summed(self) -> Statistics:
        """Over the tokens of all processes."""
        xx, xd, dd, weight = add_up(self.xx, self.xd, self.dd, torch.tensor(self.weight, dtype=torch.float64))
        return Statistics(xx, xd, dd, float(weight), self.functions)

    def penalised(self, penalty: torch.Tensor) -> Statistics:
        """With a ridge [k] on the position functions, in units of weight."""
        xx = self.xx.clone()
        n = len(xx) - self.functions
        xx[n:, n:].diagonal().add_(penalty)
        return Statistics(xx, self.xd, self.dd, self.weight, self.functions)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.xx + other.xx, self.xd + other.xd, self.dd + other.dd, self.weight + other.weight, self.functions
        )

    def __sub__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.xx - other.xx, self.xd - other.xd, self.dd - other.dd, self.weight - other.weight, self.functions
        )


def products(a: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 of the float32 sums a'a [p, p] and a'b [p, q] (without b, q = 0) of a [n, p] and b [n, q].

    Of the first, which is symmetric, only what stands above some blocks along the diagonal is computed.
    """
    a = a.float()
    width = a.shape[1]
    both = a if b is None else torch.cat([a, b.float()], 1)
    rows = torch.zeros(width, both.shape[1], dtype=torch.float32, device=a.device)
    for start in range(0, width, size := max(128, -(-width // SPLIT))):
        rows[start : start + size, start:] = a[:, start : start + size].T @ both[:, start:]
    whole = rows.cpu().double()
    upper = whole[:, :width].triu()
    return upper + upper.triu(1).T, whole[:, width:]


@dataclass(frozen=True)
class Ridge:
    """The full-rank ridge solution of some statistics, from which that of any rank is read off.

    Attributes:
        whiten: [d_in, d_in] upper triangular; its inverse times the first d_in rows of `half`, each over its `scale`
            [d_in], is the full-rank map [d_in, d_out] from x~ to the predicted D.
        free: [k, d_out] map from f to it, for functions inside the rank; None where they are outside.
        centre: [d_in, k] the regression of x on f.
        half: [d_in + k', d_out] with half' half the fitted values' Gram matrix: k' = k for functions inside the rank.
        root: [d_out, d_out] upper triangular, root' root the metric.
        condition: condition number (1-norm, estimated) of the scaled input matrix that was to be solved.
        helped: whether the ridge was raised because the matrix could not be solved otherwise.
    """

    statistics: Statistics
    whiten: torch.Tensor
    scale: torch.Tensor
    free: torch.Tensor | None
    centre: torch.Tensor
    half: torch.Tensor
    root: torch.Tensor
    condition: float
    helped: bool

    def leading(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decrease [r] of the penalised weighted error in the metric by each further rank, and its vectors [d_out, r].

        The leading eigenpairs of root half' half root'.
        """
        return leading((self.half, self.root.T), rank)

    def at_rank(self, rank: int) -> Solution:
        """The solution of rank r."""
        vectors = self.leading(rank)[1]
        s = self.statistics
        n = s.xx.shape[0] - s.functions
        fitted = self.half[:n] @ (self.root.T @ vectors)
        down = (torch.linalg.solve_triangular(self.whiten, fitted, upper=True) / self.scale[:, None]).T
        up = torch.linalg.solve_triangular(self.root, vectors, upper=True)
        if self.free is not None:
            return Solution(down, up, inner=(vectors.T @ self.root @ self.free.T - down @ self.centre).T)
        if s.functions == 0:
            return Solution(down, up)
        gram = _pinv(s.xx[n:, n:])
        return Solution(down, up, functions=gram @ (s.xd[n:] - s.xx[n:, :n] @ down.T @ up.T))


@dataclass(frozen=True)
class Solution:
    """D ~ up (down x + inner' f) + functions' f, float64; inner [k, r] and functions [k, d_out] may be missing."""

    down: torch.Tensor
    up: torch.Tensor
    functions: torch.Tensor | None = None
    inner: torch.Tensor | None = None

    def factors(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as one map of (x, f), left [d_in + k, m] times right [m, d_out]."""
        rank = self.down.shape[0]
        inner = torch.zeros(k, rank, dtype=torch.float64) if self.inner is None else self.inner
        left, right = torch.cat([self.down.T, inner]), self.up.T
        if self.functions is not None:
            own = torch.cat([torch.zeros(left.shape[0] - k, k, dtype=torch.float64), torch.eye(k, dtype=torch.float64)])
            left, right = torch.cat([left, own], 1), torch.cat([right, self.functions])
        return left, right

    def site(self, kind: Kind, position: Position | None) -> SiteCorrection:
        """As what is subtracted: h' = h - (-up) (down x + inner' f) - (-functions)' f."""
        some = self.down.shape[0] > 0
        return SiteCorrection(
            kind,
            self.down.float() if some else None,
            -self.up.float() if some else None,
            None if self.functions is None else -self.functions.float(),
            position if self.functions is not None or (self.inner is not None and some) else None,
            inner=self.inner.float() if self.inner is not None and some else None,
        )


def _pinv(gram: torch.Tensor) -> torch.Tensor:
    """Inverse of the position functions' Gram matrix; they are dependent where few positions were seen."""
    inverse: torch.Tensor = torch.linalg.pinv(gram, rtol=1e-10, hermitian=True)
    return inverse


def solve(statistics: Statistics, ridge: float, metric: torch.Tensor | None = None, inside: bool = False) -> Ridge:
    """The ridge solution in the metric of the output.

    Args:
        statistics: of the tokens to fit on.
        ridge: strength relative to each input's own power, so that outlier dimensions are not favoured.
        metric: [d_out, d_out] positive definite float64; None for the Euclidean one.
        inside: whether the position functions share the rank of the low-rank part.
    """
    return _solve(statistics, ridge, _root(metric, statistics.xd.shape[1]), inside)


def _solve(statistics: Statistics, ridge: float, root: torch.Tensor, inside: bool) -> Ridge:
    s = statistics
    k = s.functions
    n = s.xx.shape[0] - k
    xx, xd = s.xx[:n, :n], s.xd[:n]
    centre = torch.zeros(n, 0, dtype=torch.float64)
    free: torch.Tensor | None = None
    if k:
        cross, inverse = s.xx[:n, n:], _pinv(s.xx[n:, n:])
        centre = cross @ inverse
        xx = xx - centre @ cross.T
        xd = xd - centre @ s.xd[n:]
        free = inverse @ s.xd[n:] if inside else None
    power = xx.diagonal().clamp(min=0)
    floor = torch.finfo(torch.float64).tiny
    # A constant input carries nothing beyond the position functions: it is left out by a unit scale and a zero row.
    dead = power <= CONSTANT * s.xx.diagonal()[:n].clamp(min=floor)
    scale = torch.where(dead, torch.ones_like(power), power.clamp(min=floor).sqrt())
    scaled = xx / scale[:, None] / scale[None, :]
    right = xd / scale[:, None]
    scaled[dead, :], scaled[:, dead], right[dead] = 0.0, 0.0, 0.0
    scaled.diagonal().add_(torch.where(dead, torch.ones_like(power), torch.full_like(power, ridge)))
    factor, condition = _factor(scaled)
    helped = condition > MAX_CONDITION
    if helped:
        values = torch.linalg.eigvalsh(scaled)
        scaled.diagonal().add_(values[-1] / MAX_CONDITION - values[0].clamp(max=0))
        factor = torch.linalg.cholesky(scaled)
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    if free is not None:
        values, vectors = torch.linalg.eigh(s.xx[n:, n:])
        half = torch.cat([half, values.clamp(min=0).sqrt()[:, None] * (vectors.T @ free)])
    return Ridge(s, factor.T, scale, free, centre, half, root, condition, helped)


def _factor(matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Cholesky factor and estimated condition number in the 1-norm (LAPACK's pocon), infinite where there is none."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed or len(matrix) == 0:
        return factor, float("inf") if failed else 1.0
    reciprocal, _ = lapack.dpocon(factor.numpy(), float(matrix.abs().sum(0).max()), uplo="L")
    return factor, 1 / reciprocal if reciprocal > 0 else float("inf")


def _root(metric: torch.Tensor | None, width: int) -> torch.Tensor:
    if metric is None:
        return torch.eye(width, dtype=torch.float64)
    lower: torch.Tensor = torch.linalg.cholesky(metric)
    return lower.T


def regularised(metric: torch.Tensor, share: float = 0.05) -> torch.Tensor:
    """A metric estimated from few tokens, with `share` of its mean eigenvalue added to each."""
    mean = metric.diagonal().mean()
    if mean <= 0:
        return torch.eye(metric.shape[0], dtype=torch.float64)
    return metric + share * mean * torch.eye(metric.shape[0], dtype=torch.float64)


def error(statistics: Statistics, solution: Solution | None, metric: torch.Tensor | None) -> float:
    """Weighted squared error, a token, of a solution (None: of no correction) in a metric.

    From the statistics alone, so that held-out folds are scored without their tokens.
    """
    s = statistics
    value = s.dd.diagonal().sum() if metric is None else (metric * s.dd).sum()
    if solution is not None:
        left, right = solution.factors(s.functions)
        seen = right if metric is None else right @ metric
        value = value - 2 * ((left.T @ s.xd) * seen).sum() + ((left.T @ s.xx @ left @ right) * seen).sum()
    return float(value) / max(s.weight, 1e-300)


def choose_ridge(
    folds: list[Statistics], ridges: tuple[float, ...], rank: int, metric: torch.Tensor | None, inside: bool = False
) -> tuple[float, dict[float, float]]:
    """The ridge of least held-out error over folds (whole sequences each); a fold's statistics are subtracted.

    Returns:
        The ridge, and the held-out error of each relative to no correction.
    """
    whole = sum(folds[1:], start=folds[0])
    root = _root(metric, whole.xd.shape[1])
    scores: dict[float, float] = {}
    for ridge in ridges:
        total, base = 0.0, 0.0
        for fold in folds:
            if fold.weight <= 0 or whole.weight - fold.weight <= 0:
                continue
            total += fold.weight * error(fold, _solve(whole - fold, ridge, root, inside).at_rank(rank), metric)
            base += fold.weight * error(fold, None, metric)
        scores[ridge] = total / base if base > 0 else 1.0
    return min(scores, key=lambda r: (scores[r], -r)), scores


def reweighted(
    x: torch.Tensor, f: torch.Tensor, d: torch.Tensor, weights: torch.Tensor, down: torch.Tensor, passes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Refit `up` and the position functions to the weighted L1 loss for a given `down`, by reweighted least squares.

    Each output coordinate has its own weights w_t / max(|residual|, eps) (iteratively reweighted least squares; eps
    falls with the passes), so the limit is the minimum of `sum_t w_t |D_t - up down x_t - F'f_t|_1`, which is convex.
    Of each coordinate the best pass is kept, so that more passes never make it worse.

    Args:
        x: [n, d_in], f: [n, k], d: [n, d_out], weights: [n], down: [r, d_in].
        passes: number of reweighted solves.

    Returns:
        up [d_out, r], functions [k, d_out], float64.
    """
    z = torch.cat([x.double() @ down.T.to(x.device), f.double()], 1)
    target, w = d.double(), weights.double()
    size = z.shape[1]
    start = torch.linalg.lstsq(z * w.sqrt()[:, None], target * w.sqrt()[:, None], driver="gelsd").solution
    coefficients = start
    residual = (target - z @ coefficients).abs()
    spread = residual.mean(0).clamp(min=1e-300)
    best, least = coefficients, (w[:, None] * residual).sum(0)
    eye = torch.eye(size, dtype=torch.float64, device=z.device)
    for step in range(passes):
        inverse = w[:, None] / torch.maximum(residual, spread * max(1e-4, 0.3 * 0.5**step))
        columns = []
        for block in range(0, target.shape[1], 64):
            v = inverse[:, block : block + 64]
            gram = torch.einsum("ni,nj,nc->cij", z, z, v) if size <= 64 else _grams(z, v)
            right = torch.einsum("ni,nc->ci", z, v * target[:, block : block + 64])
            jitter = 1e-10 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye
            columns.append(torch.linalg.solve(gram + jitter, right).T)
        coefficients = torch.cat(columns, 1)
        residual = (target - z @ coefficients).abs()
        loss = (w[:, None] * residual).sum(0)
        best, least = torch.where(loss < least, coefficients, best), torch.minimum(loss, least)
    rank: int = down.shape[0]
    return best[:rank].T.cpu(), best[rank:].cpu()


def _grams(z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.stack([(z * v[:, c : c + 1]).T @ z for c in range(v.shape[1])])
