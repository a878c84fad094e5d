"""Text of prompts, tokens and names made visible: control characters, escapes and hidden marks as signs.

Knows characters; escaping for HTML is the template's.
"""

from __future__ import annotations

_SIGNS = {"\n": "↵", "\t": "⇥"}


def visible(text: str, spaces: bool = False) -> str:
    r"""The text in printable characters alone (an escape is `\x1b`); with `spaces`, spaces are shown too."""
    return "".join(_sign(c, spaces) for c in text)


def _sign(c: str, spaces: bool) -> str:
    if c == " ":
        return "␣" if spaces else c
    if c in _SIGNS:
        return _SIGNS[c]
    if c.isprintable():
        return c
    return c.encode("unicode_escape").decode("ascii")


def number(value: float | None, kind: str = "") -> str:
    """A value for people: `share` as a percentage, otherwise three significant digits; empty for None."""
    if value is None:
        return ""
    if kind == "share":
        return f"{value:.0%}"
    if value == 0:
        return "0"
    return f"{value:.4f}" if 0.001 <= abs(value) < 10 else f"{value:.3g}"
