"""Corrected logits against a slow reference: families, dtypes, padding, caches, domains, generation."""

from __future__ import annotations

import pytest
import torch

from mergedarts.correction import Correction, Position
from mergedarts.errors import UserError
from mergedarts.models import decoder_layers
from mergedarts.runtime import attach
from tests.tiny import FAMILIES, D, final_correction, mixed_batch, random_site, slow_final, slow_logits, tiny

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}


def reference(model, ids, mask, sites, rows):
    """Logits [B, T, V]: the bare decoder's states, corrected token by token. `rows` holds a site or None a row."""
    with torch.no_grad():
        h = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)[0].clone()
        for b in range(ids.shape[0]):
            p = 0
            for t in range(ids.shape[1]):
                if mask[b, t]:
                    if rows[b] is not None:
                        h[b, t] = slow_final(sites[rows[b]], h[b, t], p)
                    p += 1
        return slow_logits(model, h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_with_several_domains(family, side, dtype):
    model = tiny(family, dtype)
    corrections = {"a": final_correction(1), "b": final_correction(2)}
    sites = {name: dict(c.items())["final"] for name, c in corrections.items()}
    ids, mask = mixed_batch(side)
    rows = ["a", None, "b"]
    want = reference(model, ids, mask, sites, rows)
    with attach(model, corrections) as handle, torch.no_grad():
        handle.domain = rows
        got = model(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    bare = model(input_ids=ids, attention_mask=mask).logits
    assert (want - bare)[real][:9].abs().max() > 10 * TOLERANCE[torch.float32]  # the correction matters
    torch.testing.assert_close(got[real].float(), want[real].float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decoding_equals_one_pass(family, side):
    """Prefill of a padded batch, then token by token: the same logits as one pass over each row alone."""
    if side == "right" and family in ("mamba", "falcon_h1", "mistral", "gemma2", "gemma3_text"):
        side = "left"  # a state or a sliding window carries right padding on, with or without a correction
    model = tiny(family)
    correction = {"a": final_correction(1)}
    lengths = (6, 3, 5)
    ids, mask = mixed_batch(side, lengths)
    more = torch.randint(3, 90, (3, 4), generator=torch.Generator().manual_seed(9))
    with attach(model, correction, "a"), torch.no_grad():
        alone = []
        for b in range(3):
            row = torch.cat([ids[b][mask[b].bool()], more[b]])[None]
            alone.append(model(input_ids=row).logits[0, -4:])
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        takes_positions = family != "mamba"
        extra = {"position_ids": position_ids} if takes_positions else {}
        out = model(input_ids=ids, attention_mask=mask, use_cache=True, **extra)
        cache, seen = out.cache, mask
        for t in range(4):
            seen = torch.cat([seen, torch.ones(3, 1, dtype=torch.long)], 1)
            extra = {"position_ids": (seen.sum(-1) - 1)[:, None]} if takes_positions else {}
            if family == "mamba":
                out = model(input_ids=more[:, t : t + 1], cache=cache, use_cache=True)
            else:
                out = model(input_ids=more[:, t : t + 1], attention_mask=seen, cache=cache, use_cache=True, **extra)
            for b in range(3):
                torch.testing.assert_close(out.logits[b, -1], alone[b][t], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4, 6])], ids=["one", "three", "indices"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_to_keep(side, keep):
    model = tiny("llama")
    ids, mask = mixed_batch(side)
    with attach(model, {"a": final_correction()}, "a"), torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        part = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
    want = whole[:, -keep:] if isinstance(keep, int) else whole[:, keep]
    torch.testing.assert_close(part, want)


def greedy_by_hand(model, row, count):
    """Greedy decoding without a cache, one full pass a token."""
    for _ in range(count):
        with torch.no_grad():
            row = torch.cat([row, model(input_ids=row[None]).logits[0, -1].argmax()[None]])
    return row[-count:]


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mamba", "falcon_h1"])
def test_generate_equals_decoding_by_hand(family, options):
    if "cache_implementation" in options and family in ("mamba", "falcon_h1", "gpt2"):
        options = {}
    model = tiny(family)
    model.generation_config.eos_token_id = None
    ids, mask = mixed_batch("left")
    with attach(model, {"a": final_correction(1), "b": final_correction(2)}) as handle, torch.no_grad():
        want = []
        for b, name in enumerate(["a", "b", None]):
            handle.domain = name
            want.append(greedy_by_hand(model, ids[b][mask[b].bool()], 6))
        handle.domain = ["a", "b", None]
        got = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **options
        )
    assert got[:, -6:].tolist() == [w.tolist() for w in want]


def test_chunked_prefill():
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    ids, mask = mixed_batch("left", (11, 7))
    with attach(model, {"a": final_correction()}, "a"), torch.no_grad():
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        want = model.generate(input_ids=ids, attention_mask=mask, **options)
        got = model.generate(input_ids=ids, attention_mask=mask, prefill_chunk_size=4, **options)
    assert got.tolist() == want.tolist()


def test_beams_and_returned_sequences_keep_each_rows_domain():
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    ids, mask = mixed_batch("left", (8, 8))
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "do_sample": False, "pad_token_id": 0}
    with attach(model, {"a": final_correction(1), "b": final_correction(2)}) as handle, torch.no_grad():
        want = []
        for b, name in enumerate("ab"):
            handle.domain = name
            alone = model.generate(input_ids=ids[b : b + 1], attention_mask=mask[b : b + 1], **options)
            want += alone.tolist()
        handle.domain = ["a", "b"]
        got = model.generate(input_ids=ids, attention_mask=mask, **options)
    assert got.tolist() == want


def test_sampling_is_that_of_the_corrected_logits():
    model = tiny("llama")
    ids, mask = mixed_batch("left", (8, 5))
    options = {"max_new_tokens": 4, "do_sample": True, "pad_token_id": 0, "output_logits": True}
    with attach(model, {"a": final_correction()}, "a"), torch.no_grad():
        torch.manual_seed(0)
        out = model.generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=True, **options)
        for b in range(2):
            row = torch.cat([ids[b][mask[b].bool()], out.sequences[b, 8:]])[None]
            whole = model(input_ids=row).logits[0, -5:-1]
            torch.testing.assert_close(torch.stack(out.logits, 1)[b], whole, atol=2e-4, rtol=2e-4)


def test_given_position_ids_win():
    model = tiny("llama")
    ids = mixed_batch("left", (6,))[0]
    site = dict(final_correction().items())["final"]
    with torch.no_grad():
        given = torch.tensor([[2, 3, 4, 5, 6, 7]])
        h = model.get_decoder()(input_ids=ids, position_ids=given, use_cache=False)[0].clone()
        for t, p in enumerate(given[0].tolist()):
            h[0, t] = slow_final(site, h[0, t], p)
        with attach(model, {"a": final_correction()}, "a"):
            got = model(input_ids=ids, position_ids=given).logits
    torch.testing.assert_close(got, slow_logits(model, h), atol=1e-4, rtol=1e-4)


def deep_correction(model, seed):
    """Corrections after two layers (one smooth in position), at a linear layer and at the head."""
    layers = decoder_layers(model)
    linear = next(n for n, m in layers[1][1].named_modules() if isinstance(m, torch.nn.Linear))
    module = layers[1][1].get_submodule(linear)
    smooth = Position("smooth", 3, 6)
    sites = {
        layers[0][0]: random_site("residual", D, D, seed, smooth, relu=False),
        f"{layers[1][0]}.{linear}": random_site(
            "linear", module.in_features, module.out_features, seed + 1, None, False
        ),
        layers[2][0]: random_site("residual", D, D, seed + 2, Position("table", 1), relu=False),
        "final": random_site("final", D, D, seed + 3, Position("table", 4), relu=True),
    }
    return Correction(sites)


class Patched:
    """Replaces the forward of sites by loops over tokens, without hooks."""

    def __init__(self, model, correction, positions):
        self.model, self.correction, self.positions = model, dict(correction.items()), positions

    def logits(self, **inputs):
        undo = []
        for name, site in self.correction.items():
            if name == "final":
                continue
            module = self.model.get_submodule(name)
            undo.append((module, module.forward))
            module.forward = self.wrap(module.forward, site)
        try:
            with torch.no_grad():
                h = self.model.get_decoder()(**inputs, use_cache=False)[0].clone()
        finally:
            for module, _ in undo:
                del module.forward
        for t, p in enumerate(self.positions):
            h[0, t] = slow_final(self.correction["final"], h[0, t], p)
        return slow_logits(self.model, h)

    def wrap(self, forward, site):
        def patched(x, *args, **kwargs):
            out = forward(x, *args, **kwargs)
            state = (out[0] if isinstance(out, tuple) else out).clone()
            for t, p in enumerate(self.positions):
                if site.kind == "linear":
                    state[0, t] = state[0, t] - site.up @ (site.down @ x[0, t])
                else:
                    state[0, t] = slow_final(site, state[0, t], p)
            return (state, *out[1:]) if isinstance(out, tuple) else state

        return patched


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt2"])  # gpt2 has no nn.Linear in its layers
def test_sites_in_depth(family):
    model = tiny(family)
    corrections = {"a": deep_correction(model, 1), "b": deep_correction(model, 20)}
    side = "left"
    ids, mask = mixed_batch(side, (9, 6))
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    extra = {} if family == "mamba" else {"position_ids": position_ids}
    with torch.no_grad():
        want = []
        for b, name in enumerate("ab"):
            row = ids[b][mask[b].bool()][None]
            want.append(Patched(model, corrections[name], range(row.shape[1])).logits(input_ids=row)[0])
        with attach(model, corrections) as handle:
            handle.domain = ["a", "b"]
            got = model(input_ids=ids, attention_mask=mask, **extra).logits
            model.generation_config.eos_token_id = None
            fast = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
            for b, name in enumerate("ab"):
                handle.domain = name
                assert fast[b, -4:].tolist() == greedy_by_hand(model, ids[b][mask[b].bool()], 4).tolist()
    for b in range(2):
        torch.testing.assert_close(got[b][mask[b].bool()], want[b], atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_gives_the_bare_logits_back_bit_equal(family):
    model = tiny(family)
    ids, mask = mixed_batch("right")
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        handle = attach(model, {"a": final_correction()}, "a")
        during = model(input_ids=ids, attention_mask=mask).logits
        handle.domain = None
        off = model(input_ids=ids, attention_mask=mask).logits
        handle.detach()
        after = model(input_ids=ids, attention_mask=mask).logits
    assert not torch.equal(before, during)
    assert torch.equal(before, off)
    assert torch.equal(before, after)


def test_tied_embeddings_stay_tied():
    model = tiny("llama")
    with attach(model, {"a": final_correction()}, "a"), torch.no_grad():
        model(input_ids=torch.tensor([[3, 4]]))
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_mistakes_are_sentences():
    model = tiny("llama")
    narrow = Correction({"final": random_site("final", 8, 8, 0, None, False)})
    with pytest.raises(UserError, match="widths .8, 8."):
        attach(model, {"a": narrow})
    with pytest.raises(UserError, match="not a module"):
        attach(model, {"a": Correction({"model.layers.9": random_site("residual", D, D, 0, None, False)})})
    with attach(model, {"a": final_correction()}) as handle:
        with pytest.raises(UserError, match="no domain 'z'"):
            handle.domain = "z"
        handle.domain = ["a", "a"]
        with pytest.raises(UserError, match="2 domains"):
            model(input_ids=torch.tensor([[3], [4], [5]]))
