"""Does the drift grow with position, and do high-entropy positions matter more: slopes, and the answers in sentences.

Knows values by token and sums by sequence; every interval is over sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..measures import HIGH_ENTROPY
from .bins import Array
from .bootstrap import DRAWS, Estimate, draws
from .tokens import Places, Series
from .types import Answer, DomainDrift, ModelDrift, Slope

#: Below this many sequences even a unanimous sign can be chance: 2 * 0.5^5 > 5%.
MIN_SEQUENCES = 6

QUESTIONS = {
    "position": "Does the drift grow with position?",
    "entropy": "Do high-entropy positions matter more?",
}
UNITS = {
    "position": "drift for each doubling of the position",
    "since_prompt": "drift for each doubling of the position since the prompt's end",
    "entropy": "nats of KL for each nat of the expert's entropy",
}


@dataclass(frozen=True)
class SlopeSums:
    """Of one domain and model, by sequence [s]: tokens and sums of x, y, x^2 and xy, both about a common origin.

    Attributes:
        sums: [s, 5] in that order.
        origin: of y, which was taken off it.
    """

    sums: Array
    origin: float


def slope(parts: list[SlopeSums], unit: str) -> Slope:
    """The least-squares slope of y against x over tokens, each domain about its own means.

    The interval is over sequences, drawn inside each domain.
    """
    total, counted = np.zeros(2), np.zeros((2, DRAWS))
    for seed, part in enumerate(parts):
        total += _moments(part.sums.sum(0))
        counted += _moments(draws(len(part.sums), DRAWS, seed) @ part.sums)
    tokens = sum(float(p.sums[:, 0].sum()) for p in parts)
    sequences = sum(len(p.sums) for p in parts)
    mean = sum(p.origin * float(p.sums[:, 0].sum()) + float(p.sums[:, 2].sum()) for p in parts) / tokens
    if total[1] <= 0:
        return Slope(Estimate(None), mean, unit, int(tokens), sequences)
    value = float(total[0] / total[1])
    if min(len(part.sums) for part in parts) < 2:
        return Slope(Estimate(value), mean, unit, int(tokens), sequences)
    valid = counted[1] > 0
    low, high = np.percentile(counted[0][valid] / counted[1][valid], [2.5, 97.5])
    return Slope(Estimate(value, float(low), float(high)), mean, unit, int(tokens), sequences)


def _moments(sums: Array) -> Array:
    """[2, ...] sums of dx dy and of dx^2 about the means, from sums [..., 5]; rounding counts as no spread."""
    n, x, y, xx, xy = np.moveaxis(sums, -1, 0)
    spread = xx - x * x / n
    spread = np.where(spread > 1e-9 * xx, spread, 0.0)
    return np.stack([np.where(spread > 0, xy - x * y / n, 0.0), spread])


def slope_sums(places: Places, values: Series) -> dict[str, SlopeSums]:
    """By key of `UNITS`, over the counted tokens of one model (`since_prompt` over those of responses)."""
    doublings = np.log2(1.0 + np.maximum(places.position, 0)), np.log2(1.0 + np.maximum(places.since, 0))
    kept, inside = places.counted, places.counted & (places.since >= 0)
    found = {"position": _sums(places.sequence[kept], doublings[0][kept], values["drift"][kept])}
    if inside.any():
        found["since_prompt"] = _sums(places.sequence[inside], doublings[1][inside], values["drift"][inside])
    found["entropy"] = _sums(places.sequence[kept], places.entropy[kept], values["kl"][kept])
    return found


def _sums(sequence: Array, x: Array, y: Array) -> SlopeSums:
    index = np.unique(sequence, return_inverse=True)[1]
    origin = float(y.mean())
    x, y = x - x.mean(), y - origin
    return SlopeSums(np.stack([np.bincount(index, v) for v in (np.ones_like(x), x, y, x * x, x * y)], 1), origin)


def verdict(slope: Slope) -> str:
    """`yes` where the slope's interval lies above zero, `unknown` where too few sequences are behind it, else `no`."""
    if slope.sequences < MIN_SEQUENCES or slope.slope.low is None:
        return "unknown"
    return "yes" if slope.slope.low > 0 else "no"


def high_entropy(places: Places, kl: Array) -> tuple[float, float | None]:
    """Share of counted tokens above 1 nat of entropy, and the share of the KL that they carry."""
    high, total = places.counted & (places.entropy > HIGH_ENTROPY), kl[places.counted].sum()
    return float(high.sum() / places.counted.sum()), float(kl[high].sum() / total) if total > 0 else None


def answers(domains: dict[str, DomainDrift], sums: dict[str, dict[str, dict[str, SlopeSums]]]) -> dict[str, Answer]:
    """Both answers for the merge as a whole.

    Args:
        domains: for what each says on its own.
        sums: by domain, model and question.
    """
    out = {}
    for key, question in QUESTIONS.items():
        whole = {
            model: slope([sums[d][model][key] for d in domains], UNITS[key]) for model in next(iter(sums.values()))
        }
        merged = whole["merged"]
        said = f"{question} {_said(key, merged)}"
        if merged.slope.value is not None:
            said += f" ({merged.tokens:,} tokens of {merged.sequences} sequences{_by_domain(domains, key)})"
        said += "."
        if key == "entropy":
            said += _share(domains)
        after = whole.get("repaired")
        if after is not None and after.slope.value is not None:
            said += f" After the repair: {_number(after)}."
        out[key] = Answer(question, verdict(merged), said, merged)
    return out


def _said(key: str, found: Slope) -> str:
    what, each, x = {
        "position": ("drift", "doubling of the position", "position"),
        "entropy": ("KL", "nat of the expert's entropy", "entropy"),
    }[key]
    if found.slope.value is None:
        return f"Not known: all measured tokens have the same {x}"
    low, high, answer = found.slope.low, found.slope.high, verdict(found)
    if answer == "unknown":
        few = "1 sequence is" if found.sequences == 1 else f"{found.sequences} sequences are"
        return f"Not known: {few} too few to tell; the slope is {_number(found)} for each {each}"
    assert low is not None
    assert high is not None
    if answer == "yes":
        share = f", {found.slope.value / found.mean:.0%} of its mean" if found.mean and key == "position" else ""
        return f"Yes: the {what} rises by {_number(found)} for each {each}{share}"
    if high < 0:
        return f"No: the {what} falls, by {_number(found, -1)} for each {each}"
    return f"No: the slope of the {what} is {_number(found)} for each {each}, and its interval holds zero"


def _number(found: Slope, sign: int = 1) -> str:
    slope = found.slope
    assert slope.value is not None
    if slope.low is None or slope.high is None:
        return f"{sign * slope.value:.2g}"
    low, high = sorted((sign * slope.low, sign * slope.high))
    return f"{sign * slope.value:.2g} [{low:.2g}, {high:.2g}]"


def _by_domain(domains: dict[str, DomainDrift], key: str) -> str:
    if len(domains) == 1:
        return ""
    merged: dict[str, ModelDrift] = {name: d.models["merged"] for name, d in domains.items()}
    by: dict[str, list[str]] = {}
    for name, model in merged.items():
        by.setdefault(verdict(model.slopes[key]), []).append(name)
    return "; " + ", ".join(f"{answer} in {_and(names)}" for answer, names in by.items())


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _share(domains: dict[str, DomainDrift]) -> str:
    tokens = sum(d.tokens for d in domains.values())
    high = sum(d.high_entropy_tokens * d.tokens for d in domains.values())
    kl = {name: d.tokens * (d.models["merged"].overall.measures["kl"].value or 0.0) for name, d in domains.items()}
    total = sum(kl.values())
    if total <= 0 or high == 0:
        return ""
    carried = sum(kl[name] * (d.high_entropy_kl or 0.0) for name, d in domains.items())
    return f" The {high / tokens:.0%} of tokens above {HIGH_ENTROPY:g} nat carry {carried / total:.0%} of the KL."
