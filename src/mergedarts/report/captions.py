"""What to see in each figure, in words made from its numbers.

Knows points and slopes; draws nothing.
"""

from __future__ import annotations

from ..drift.slopes import verdict
from ..drift.types import DomainDrift, Point, Slope
from .text import number

LABELS = {"merged": "merged", "repaired": "repaired", "prompt": "merged, prompt tokens"}


def caption(domain: DomainDrift, axis: str) -> str:
    """The caption of a domain's figure."""
    said = {
        "position": _position,
        "since_prompt": _since,
        "entropy": _entropy,
        "position_entropy": _crossed,
        "layer": _layer,
        "turn": _turn,
        "systematic": _systematic,
    }[axis]
    return said(domain)


def _position(domain: DomainDrift) -> str:
    prompt = "prompt_position" in domain.models["merged"].axes
    tokens = "Response tokens; prompt tokens (triangles) have a drift too, but nothing is generated there. "
    return (tokens if prompt else "") + _slope(domain, "position", "position")


def _since(domain: DomainDrift) -> str:
    return "The same tokens by their place in the response. " + _slope(domain, "since_prompt", "place in the response")


def _entropy(domain: DomainDrift) -> str:
    said = f"{domain.high_entropy_tokens:.0%} of the tokens lie above 1 nat"
    if domain.high_entropy_kl is not None:
        said += f" and carry {domain.high_entropy_kl:.0%} of the merged model's KL"
    return f"{said}. {_slope(domain, 'entropy', 'nat of entropy', 'KL')}"


def _crossed(domain: DomainDrift) -> str:
    points = [p for p in domain.models["merged"].axes["position_entropy"] if p.tokens >= 20 and "kl" in p.measures]
    if not points:
        return "Means of KL; no cell has 20 tokens, so take none for more than a hint."
    worst = max(points, key=lambda p: p.measures["kl"].value or 0.0)
    return (
        "The stronger the colour, the further from the expert. Of the cells with 20 tokens or more, the merged model "
        f"is furthest at positions {worst.label} and {worst.band} nats (KL {number(worst.measures['kl'].value)}, "
        f"{worst.tokens:,} tokens of {worst.sequences} sequences). Where whole rows stand out, entropy "
        "matters; where columns do, position."
    )


def _layer(domain: DomainDrift) -> str:
    said = [
        f"{LABELS[model]} {_ends(found.axes['layer'], 'relative')}"
        for model, found in domain.models.items()
        if "layer" in found.axes
    ]
    return (
        f"Residual stream after each decoder layer, relative to the expert's ({_sample(domain)}): {'; '.join(said)}. "
        "Where the curve rises, drift is added."
    )


def _turn(domain: DomainDrift) -> str:
    said = "; ".join(f"{LABELS[m]} KL {_ends(found.axes['turn'], 'kl')}" for m, found in domain.models.items())
    return f"Responses by their turn in the conversation: {said}."


def _systematic(domain: DomainDrift) -> str:
    found = domain.systematic
    assert found is not None
    return (
        f"Fitted on {found.fitted_sequences} other sequences ({found.fitted_tokens:,} tokens) and scored on these "
        f"({_sample(domain)}): a constant vector for each position takes away {_share(found.constant.value)} of the "
        f"drift's power, the best rank-{found.rank} linear map of h {_share(found.linear.value)}, both together "
        f"{_share(found.both.value)}. The rest is out of reach of a correction of the final state of that size; below "
        "zero a form does harm."
    )


def _slope(domain: DomainDrift, key: str, each: str, what: str = "drift") -> str:
    slopes = {model: found.slopes[key] for model, found in domain.models.items() if key in found.slopes}
    merged = slopes["merged"]
    trend = {"yes": f"The {what} rises", "unknown": f"Too few sequences to tell a trend; the {what} changes"}.get(
        verdict(merged), f"The {what} falls" if (merged.slope.high or 0.0) < 0 else f"The {what} shows no clear trend"
    )
    unit = each if each.startswith("nat") else f"doubling of the {each}"
    said = "; ".join(f"{LABELS[model]} {_interval(s)}" for model, s in slopes.items())
    return f"{trend} for each {unit} ({said}; {_sample(domain)})."


def _interval(slope: Slope) -> str:
    found = slope.slope
    if found.value is None:
        return "not measured"
    ends = "" if found.low is None else f" [{found.low:+.2g}, {found.high:+.2g}]"
    return f"{found.value:+.2g}{ends}"


def _ends(points: list[Point], measure: str) -> str:
    first, last = (p for p in (points[0], points[-1]))
    return (
        f"from {number(first.measures[measure].value)} ({first.label}) to {number(last.measures[measure].value)} "
        f"({last.label})"
    )


def _sample(domain: DomainDrift) -> str:
    return f"{domain.tokens:,} tokens of {domain.sequences} sequence{'s' if domain.sequences > 1 else ''}"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"
