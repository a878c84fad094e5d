"""Text of prompts, tokens and names made visible: control characters, escapes and hidden marks as signs.

Knows characters; escaping for HTML is the template's.
"""

from __future__ import annotations

_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def visible(text: str, spaces: bool = False) -> str:
    """The text in printable characters alone; with `spaces`, spaces are shown too (for single tokens)."""
    return "".join(_sign(c, spaces) for c in text)


def _sign(c: str, spaces: bool) -> str:
    if c == " ":
        return "␣" if spaces else c
    if c in _SIGNS:
        return _SIGNS[c]
    if c.isprintable():
        return c
    return chr(0x2400 + ord(c)) if ord(c) < 0x20 else f"⟨U+{ord(c):04X}⟩"


def number(value: float | None, kind: str = "") -> str:
    """A value for people: `share` as a percentage, otherwise three significant digits; empty for None."""
    if value is None:
        return ""
    if kind == "share":
        return f"{value:.0%}"
    if value == 0:
        return "0"
    return f"{value:.4f}" if 0.001 <= abs(value) < 10 else f"{value:.3g}"
