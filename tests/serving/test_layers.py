"""The corrections inside a serving engine's decoder against the package's own runtime on the same weights."""

from __future__ import annotations

import types

import pytest
import torch

from mergedarts.correction import Correction, Position, SiteCorrection
from mergedarts.errors import UserError
from mergedarts.models import decoder_layers
from mergedarts.runtime import attach
from mergedarts.serving.layers import Served
from tests.serving.engine import Beside, Engine, Parted, Whole
from tests.tiny import VOCAB, D, head_input, random_site, tiny

LENGTHS = (11, 7, 9)
#: Tokens of each request in each step: chunks of prompts, single tokens, and requests that wait or are over.
STEPS = ((5, 0, 1), (3, 6, 1), (1, 1, 6), (1, 0, 1), (1, 0, 0))


def in_depth(seed=1, names=("model.layers.0", "model.layers.1")):
    """All forms of position, at two layers and the head."""
    inner = random_site("residual", D, D, seed, None, relu=False)
    drawn = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    sites = {
        names[0]: SiteCorrection(
            "residual", inner.down.detach(), inner.up.detach(), None, Position("smooth", 2, 6), inner=drawn
        ),
        names[1]: random_site("residual", D, D, seed + 1, Position("smooth", 3, 6), relu=False),
        "final": random_site("final", D, D, seed + 2, Position("table", 4), relu=True),
    }
    return Correction(sites)


def updates(model, seed=30):
    """Low-rank updates of all linear layers of one decoder layer, and a correction of the layer after it."""
    name, layer = decoder_layers(model)[1]
    sites = {
        f"{name}.{n}": random_site("linear", m.in_features, m.out_features, seed + i, None, relu=False)
        for i, (n, m) in enumerate(layer.named_modules())
        if isinstance(m, torch.nn.Linear)
    }
    last = decoder_layers(model)[2][0]
    return Correction(sites | {last: random_site("residual", D, D, seed, Position("table", 1), relu=False)})


def settings(model, corrections, domain):
    """`config.json` of a `hub` export, as an object."""
    sites = {
        name: [site.describe(where) | {"widths": list(site.widths)} for where, site in correction.items()]
        for name, correction in corrections.items()
    }
    return types.SimpleNamespace(
        **{**model.config.to_dict(), "mergedarts": {"sites": sites, "router": None}, "domain": domain}
    )


def checkpoint(model, corrections, reverse=False):
    """Tensors of a `hub` export by name."""
    tensors = dict(model.state_dict()) | {"mergedarts_router.means": torch.zeros(1)}
    for i, correction in enumerate(corrections.values()):
        tensors |= {f"mergedarts_corrections.{i}.{name}": p.detach() for name, p in correction.named_parameters()}
    return list(reversed(tensors.items())) if reverse else list(tensors.items())


def served(model, corrections, domain, kind=Parted, first=0, reverse=False):
    engine = Engine(model.config, kind, first)
    inside = Served(engine, settings(model, corrections, domain))
    engine.load(inside.take(checkpoint(model, corrections, reverse)))
    return engine, inside


def answers(engine, inside, sequences, steps=STEPS):
    """The state [T, d] that enters the head, of each sequence, computed in mixed batches step by step."""
    out, at = [[] for _ in sequences], [0] * len(sequences)
    for step in steps:
        batch, tokens, positions = [], [], []
        for i, n in enumerate(step):
            if n:
                batch.append((i, slice(len(tokens), len(tokens) + n)))
                tokens += sequences[i][at[i] : at[i] + n]
                positions += range(at[i], at[i] + n)
                at[i] += n
        engine.caches["batch"] = batch
        with torch.no_grad():
            where = torch.tensor(positions)
            state = inside.at_head(engine(torch.tensor(tokens), where), where)
        for i, span in batch:
            out[i].append(state[span])
    return [torch.cat(states) for states in out]


def sequences(seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in LENGTHS]


def wanted(model, corrections, domain):
    with attach(model, corrections, domain):
        return [head_input(model, tuple(row)) for row in sequences()]


def close(got, want):
    for mine, (theirs, _) in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kind", [Parted, Whole, Beside])
@pytest.mark.parametrize("domain", ["a", "b", "none"])
def test_mixed_batches_in_steps(kind, domain):
    model = tiny("llama")
    corrections = {"a": in_depth(1), "b": in_depth(11)}
    runtime = None if domain == "none" else domain
    # The runtime's state at the head, corrected there too, for its hook comes before the one that reads.
    want = wanted(model, corrections, runtime)
    bare = wanted(model, corrections, None)
    if runtime is not None:
        assert (want[0][0] - bare[0][0]).abs().max() > 0.1
    close(answers(*served(model, corrections, domain, kind), sequences()), want)


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_updates_are_folded_whatever_the_order(reverse):
    model = tiny("llama")
    corrections = {"other": in_depth(1), "a": updates(model)}
    close(answers(*served(model, corrections, "a", reverse=reverse), sequences()), wanted(model, corrections, "a"))


def test_a_pipelines_later_half():
    """Where another process has the first layers, what is corrected in them is left to it."""
    model = tiny("llama")
    corrections = {"a": in_depth(1)}
    engine, inside = served(model, corrections, "a", kind=Whole, first=1)
    assert inside.parameter_names() == {
        f"{place}.{part}"
        for place in ("layers.1.mergedarts", "mergedarts_final")
        for part in ("down", "up", "position_bias")
    }
    row = sequences()[0]
    caught = []
    with attach(model, corrections, "a"):
        # After the hook that corrects the layer.
        hook = decoder_layers(model)[0][1].register_forward_hook(lambda m, a, out: caught.append(out[0].clone()))
        want = head_input(model, tuple(row))[0]
        hook.remove()
    engine.caches["batch"] = [(0, slice(0, len(row)))]
    where = torch.arange(len(row))
    with torch.no_grad():
        got = inside.at_head(engine(torch.tensor(row), where, states=caught[0]), where)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


@pytest.mark.slow
def test_it_is_traced_whole():
    """One graph without a break, for any number of tokens, and the same states."""
    model = tiny("llama")
    engine, inside = served(model, {"a": in_depth(1)}, "a")
    for layer in engine.layers:
        layer.attend = lambda positions, x: x  # its Python is the engine's own affair

    def whole(tokens, positions):
        return inside.at_head(engine(tokens, positions), positions)

    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        whole, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True, dynamic=True
    )
    with torch.no_grad():
        for n in (5, 9):
            args = torch.arange(3, 3 + n), torch.arange(n).flip(0)
            assert torch.equal(compiled(*args), whole(*args))
    assert len(graphs) == 1


def test_positions_in_several_axes_are_the_first():
    model = tiny("llama")
    _, inside = served(model, {"a": in_depth(1)}, "a")
    state, where = torch.randn(4, D), torch.tensor([4, 0, 2, 9])
    assert torch.equal(inside.at_head(state, where.expand(3, -1)), inside.at_head(state, where))
    drafting = inside.at_head((state, ["aux"]), where)
    assert torch.equal(drafting[0], inside.at_head(state, where))
    assert drafting[1] == ["aux"]
    assert inside.at_head("not a state", where) == "not a state"


def test_bfloat16_stays_near_the_runtime():
    model = tiny("llama", torch.bfloat16)
    corrections = {"a": in_depth(1)}
    engine, inside = served(model, corrections, "a")
    engine.to(torch.bfloat16)
    got, want = answers(engine, inside, sequences()), wanted(model, corrections, "a")
    exact = wanted(tiny("llama"), corrections, "a")
    for mine, (theirs, _), (true, _) in zip(got, want, exact, strict=True):
        off = (theirs.float() - true).norm()
        assert (mine.float() - true).norm() < 1.5 * off


@pytest.mark.parametrize(
    ("domain", "match"),
    [("auto", "router .* a, b, none"), ("law", "no domain 'law'.* a, b, none")],
)
def test_a_domain_has_to_be_named(domain, match):
    model = tiny("llama")
    with pytest.raises(UserError, match=match):
        Served(Engine(model.config), settings(model, {"a": in_depth(), "b": in_depth()}, domain))


def test_mistakes_are_sentences():
    model = tiny("llama")
    with pytest.raises(UserError, match="carries no corrections"):
        Served(Engine(model.config), model.config)
    far = Correction({"model.layers.9": random_site("residual", D, D, 0, None, False)})
    with pytest.raises(UserError, match="'model.layers.9' is not a decoder layer of Engine"):
        Served(Engine(model.config), settings(model, {"a": far}, "a"))
    said = settings(model, {"a": in_depth()}, "a")
    said.num_hidden_layers = 7
    with pytest.raises(UserError, match="No list of 7 decoder layers"):
        Served(Engine(model.config), said)
    blind = type("Blind", (Whole,), {"forward": lambda self, hidden_states: hidden_states})
    with pytest.raises(UserError, match="Layers of Blind are not told positions"):
        Served(Engine(model.config, blind), settings(model, {"a": in_depth()}, "a"))
    turned = type("GPT2Engine", (Engine,), {})
    with pytest.raises(UserError, match="GPT-2"):
        Served(turned(model.config), settings(model, {"a": updates(model)}, "a"))


def test_a_layer_without_positions_takes_a_correction_that_needs_none():
    model = tiny("llama")
    blind = type("Blind", (Whole,), {"forward": lambda self, hidden_states: hidden_states})
    site = random_site("residual", D, D, 0, None, False)
    engine, _ = served(model, {"a": Correction({"model.layers.1": site})}, "a", kind=blind)
    h = torch.randn(4, D)
    with torch.no_grad():
        assert torch.equal(engine.layers[1](h), site(h, h, None))


def test_a_checkpoint_that_does_not_fit():
    model = tiny("llama")
    corrections = {"a": updates(model)}
    weight = "model.layers.1.mlp.up_proj.weight"

    def taken(change):
        inside = Served(Engine(model.config), settings(model, corrections, "a"))
        return list(inside.take(change(dict(checkpoint(model, corrections))).items()))

    assert weight in dict(taken(lambda tensors: tensors))
    for name in (weight, "mergedarts_corrections.0._sites.3.up", "mergedarts_corrections.0._sites.7.position_bias"):
        with pytest.raises(UserError, match=f"lacks 1 of its tensors .{name}"):
            taken(lambda tensors, name=name: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(UserError, match=r"_sites.7.down of the export has shape \[2, 32\]"):
        taken(lambda tensors: tensors | {"mergedarts_corrections.0._sites.7.down": torch.zeros(2, D)})
    with pytest.raises(UserError, match="up_proj.weight is quantized"):
        taken(lambda tensors: tensors | {weight: tensors[weight].to(torch.int8)})
