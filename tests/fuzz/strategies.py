"""Input made at random: bytes spoiled here and there, odd text, settings and JSON of any shape."""

from __future__ import annotations

from hypothesis import strategies as st

#: What has broken parsers, terminals and file systems before.
ODD = (
    "", "\0", "\x1b[31m", "\u202e", "\u200b", "é", "e\u0301", "🙂", "👩‍👩‍👧", "مرحبا", "שלום", "\ud800", "../../x",
    "/etc/passwd", "a" * 300, "<script>", "$(true)", "!!python/object/apply:os.system", "{{ 7*7 }}", "%s%n",
    "nan", "NaN", "inf", "-0", "1e999",
    "null", "~", "yes", "0x10", "0o7", "2001-01-01", "<|im_end|>",
    "[", "{", "&a *a", "--- ", "\r\n", "\u2028", "\ufeff",
)  # fmt: skip

text = st.one_of(st.sampled_from(ODD), st.text(max_size=20), st.lists(st.sampled_from(ODD), max_size=4).map("".join))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), text, st.sampled_from([0, -1, 1 << 40, 10**30, 10**400, 0.5])
)
data = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)


def spoiled(whole: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes with a few of them changed, taken out, doubled, or cut off."""

    def spoil(edits: list[tuple[int, int, bytes]]) -> bytes:
        out = whole
        for at, length, new in edits:
            at %= len(out) + 1
            out = out[:at] + new + out[at + length :]
        return out

    edit = st.tuples(st.integers(0, 1 << 20), st.sampled_from([0, 1, 1, 1, 2, 8, 100, 1 << 30]), st.binary(max_size=4))
    flip = st.tuples(st.integers(0, 1 << 20), st.just(1), st.binary(min_size=1, max_size=1))
    return st.lists(st.one_of(flip, edit), min_size=1, max_size=3).map(spoil)
