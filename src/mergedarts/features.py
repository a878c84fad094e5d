"""Runs one model over the sequences: final hidden states, states after layers, entropies, continuations.

Knows batches, hooks and chunks; knows no model family, nothing of corrections, and holds one model at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import UserError
from .memory import by_halves
from .models import decoder_layers, head_parameters
from .progress import bar
from .prompts import PromptSet, TokenSequence, with_continuation
from .store import FeatureStore, RowWriter
from .streaming import is_streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Padded tokens in a batch. Below about 2,000 a CPU spends its time on reading weights, above 4,096 nothing is gained.
BATCH_TOKENS = 4096
#: What a batch costs beside its tokens, in tokens: reading the weights once.
BATCH_COST = 256
CHUNK_ELEMENTS = 1 << 22


class _Stop(Exception):
    """Ends a forward pass before a module that need not run."""


def batches(prompts: PromptSet, tokens: int | None = None) -> list[list[int]]:
    """Indices of the sequences in batches of like length, each of at most `tokens` (BATCH_TOKENS) padded tokens.

    Longest first, cut where the padded tokens and BATCH_COST for each batch are least (dynamic programming).
    """
    tokens = BATCH_TOKENS if tokens is None else tokens
    order = sorted(range(len(prompts.sequences)), key=lambda i: (-len(prompts.sequences[i]), i))
    least, start = [0.0], [0]
    for end in range(1, len(order) + 1):
        best = (float("inf"), end - 1)
        for first in range(end - 1, -1, -1):
            padded_tokens = (end - first) * len(prompts.sequences[order[first]])
            if padded_tokens > tokens and first < end - 1:
                break
            best = min(best, (least[first] + padded_tokens + BATCH_COST, first))
        least.append(best[0])
        start.append(best[1])
    out: list[list[int]] = []
    end = len(order)
    while end:
        out.append(order[start[end] : end])
        end = start[end]
    return out[::-1]


def padded(prompts: PromptSet, batch: list[int], device: torch.device) -> torch.Tensor:
    """[B, T] token ids, right-padded: under a causal mask no real token sees the padding."""
    rows = [torch.tensor(prompts.sequences[i].ids) for i in batch]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0).to(device)


@contextmanager
def hooked(*handles: Any) -> Iterator[None]:
    """Remove hooks when the block ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def stopping_before(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A forward pass inside the block ends where a module would run; the state it was to be given is in the list."""
    caught: list[torch.Tensor] = []

    def catch(_module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(inputs[0] if inputs else kwargs["hidden_states"])
        raise _Stop

    with suppress(_Stop), hooked(module.register_forward_pre_hook(catch, with_kwargs=True)):
        yield caught


def state_of(output: Any) -> torch.Tensor:
    """The hidden state in what a decoder layer returns: a tensor, or the first of a tuple."""
    state: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return state


@torch.inference_mode()
def final_states(
    model: PreTrainedModel,
    prompts: PromptSet,
    take: Callable[[list[int], torch.Tensor], None],
    title: str,
    begin: Callable[[list[int]], None] = lambda batch: None,
    layers: int | None = None,
) -> None:
    """Run a model once over the sequences and hand out the input of its output embedding.

    Args:
        take: called with a batch of sequence indices and their states [B, T, d], right-padded.
        title: of the progress bar.
        begin: called with a batch of sequence indices before the model runs on it.
        layers: run only so many decoder layers, not all, for what hooks on them see; nothing is handed out.

    Raises:
        UserError: a state is not finite, as happens when a merge overflows in float16.
    """
    if is_streamed(model):
        _streamed_states(model, prompts, take, title, begin, layers=layers)
        return
    device = next(model.parameters()).device
    end = model.get_output_embeddings() if layers is None else decoder_layers(model)[layers][1]

    def run(batch: list[int]) -> torch.Tensor:
        begin(batch)
        with stopping_before(end) as caught:
            model(input_ids=padded(prompts, batch, device), use_cache=False)
        return caught.pop()

    with bar(title, prompts.tokens) as advance:
        for batch, state in by_halves(batches(prompts), run, prompts.length, title):
            check_finite(state, title)
            if layers is None:
                take(batch, state)
            advance(sum(len(prompts.sequences[i]) for i in batch))


def _streamed_states(
    model: PreTrainedModel,
    prompts: PromptSet,
    take: Callable[[list[int], torch.Tensor], None],
    title: str,
    begin: Callable[[list[int]], None],
    start: tuple[int, torch.Tensor] | None = None,
    done: Callable[[int], None] = lambda layer: None,
    layers: int | None = None,
) -> None:
    """`final_states`, each layer over all sequences before the next; `done` is called with each layer's number."""
    from .layerwise import LayerRunner  # which runs batches as made here

    runner = LayerRunner(model, prompts, begin, start)
    last = runner.layers if layers is None else layers
    with bar(title, prompts.tokens * (last - runner.depth)) as advance:
        while runner.depth < last:
            for tokens in runner.step():
                advance(tokens)
            done(runner.depth - 1)
        for batch, state in runner.final() if layers is None else ():
            check_finite(state, title)
            take(batch, state)


def check_finite(state: torch.Tensor, title: str) -> None:
    """Raise `UserError` where hidden states hold NaN or infinity."""
    if not torch.isfinite(state).all():
        raise UserError(
            f"{title}: hidden states are not finite; the weights hold NaN or overflow in "
            f"{state.dtype}, so try 'dtype: bfloat16' or 'float32'."
        )


class Readout:
    """From final hidden states to logits, by the model's own head and whatever it does after it.

    Soft-capping, scaling and the like differ by family; here the model runs with its decoder put aside.

    Args:
        model: a causal LM.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        seen: list[Any] = []
        device = next(model.parameters()).device
        hook = self._decoder.register_forward_hook(lambda m, i, o: seen.append(o))
        with torch.inference_mode(), hooked(hook), _layers_aside(model):
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
        self._output_class = type(seen[0])

    @torch.inference_mode()
    def __call__(
        self, states: torch.Tensor, head: tuple[torch.Tensor, torch.Tensor | None] | None = None
    ) -> torch.Tensor:
        """Logits [n, vocabulary] in float32 of states [n, d]; by another model's head where `head` is given."""
        return self.logits(states, head)

    def logits(
        self, states: torch.Tensor, head: tuple[torch.Tensor, torch.Tensor | None] | None = None
    ) -> torch.Tensor:
        """The same, differentiable.

        Raises:
            UserError: logits are NaN or infinite.
        """
        own = self._model.get_output_embeddings()
        weight = own.weight if head is None else head[0]
        states = states[None].to(device=own.weight.device, dtype=own.weight.dtype)
        handles = [own.register_forward_pre_hook(lambda m, i: (states, *i[1:]))]
        if head is not None:
            handles.append(own.register_forward_hook(lambda m, i, o: nn.functional.linear(states, weight, head[1])))
        forward = vars(self._decoder).get("forward")
        try:
            self._decoder.forward = lambda *a, **k: self._output_class(last_hidden_state=states)
            with hooked(*handles):
                ids = torch.zeros(1, states.shape[1], dtype=torch.long, device=states.device)
                logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            if forward is None:
                del self._decoder.forward
            else:
                self._decoder.forward = forward
        found = logits[0].float()
        if not found.amax(-1).isfinite().all():  # a row may bar tokens by -inf, but not all of them
            raise UserError(
                f"{self._model.config._name_or_path}: logits are not finite; the output embedding holds NaN or "
                f"overflows in {own.weight.dtype}, so try 'dtype: bfloat16' or 'float32'."
            )
        return found

    @property
    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [vocabulary, d] and bias of the output embedding."""
        return head_parameters(self._model)

    def is_plain(self, states: torch.Tensor) -> bool:
        """Whether logits are the output embedding's product alone, on some states [n, d]."""
        weight, bias = self.head
        plain = nn.functional.linear(states.to(weight), weight, bias).float()
        return torch.allclose(plain, self(states), atol=1e-2, rtol=1e-2)

    @property
    def chunk(self) -> int:
        """Tokens at a time for which a [tokens, vocabulary] tensor is small."""
        rows: int = self._model.get_output_embeddings().weight.shape[0]
        return max(16, CHUNK_ELEMENTS // rows)


def _layers_aside(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A streamed model's layers are not read inside the block."""
    from .layerwise import stack_of

    stack = stack_of(model) if is_streamed(model) else None
    return nullcontext() if stack is None else stack.aside(len(stack.layers))


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the softmax over the last dimension."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)


@torch.inference_mode()
def entropies(
    readout: Readout, states: torch.Tensor, head: tuple[torch.Tensor, torch.Tensor | None] | None, title: str
) -> torch.Tensor:
    """[n] entropies in nats of the predictions of final states [n, d], by another model's head where it is given."""
    found = torch.empty(len(states))
    with bar(title, len(states)) as advance:
        for part, nats in zip(states.split(readout.chunk), found.split(readout.chunk), strict=True):
            nats.copy_(entropy(readout(part, head)))
            advance(len(part))
    return found


def keep_entropies(model: PreTrainedModel, store: FeatureStore, title: str) -> None:
    """Write `entropy` (entropy [tokens], nats) of the final states that the store holds."""
    store.save("entropy", {"entropy": entropies(Readout(model), store.load("final")["hidden"], None, title)})


def collect(
    model: PreTrainedModel,
    prompts: PromptSet,
    store: FeatureStore,
    title: str,
    layers: list[int],
) -> None:
    """Run a model once and put what is missing into the store.

    Writes `final` (hidden [tokens, d]) and `layer-<i>` (hidden [tokens, d], the residual stream after decoder layer i)
    for each of `layers`.
    """
    width = model.get_output_embeddings().weight.shape[1]
    dtype = next(model.parameters()).dtype
    offsets = prompts.offsets
    current: list[int] = []

    def begin(batch: list[int]) -> None:
        current[:] = batch

    def write(writer: RowWriter, state: torch.Tensor) -> None:
        for row, i in enumerate(current):
            writer.write(int(offsets[i]), state[row, : len(prompts.sequences[i])])

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: write(writers[name], state_of(output))

    def take(batch: list[int], state: torch.Tensor) -> None:
        write(writers["final"], state)

    named = decoder_layers(model) if layers else []
    start = _resumed(store, prompts, layers, len(named)) if is_streamed(model) else None
    shape = (prompts.tokens, width)
    names = ["final", *(f"layer-{i}" for i in layers)]
    with (
        store.writers(dict.fromkeys(names, shape), dtype) as writers,
        hooked(*(named[i][1].register_forward_hook(keep(f"layer-{i}")) for i in layers)),
    ):
        if is_streamed(model):
            wanted = set(layers)
            _streamed_states(
                model, prompts, take, title, begin, start,
                lambda layer: writers[f"layer-{layer}"].finish() if layer in wanted else None,
            )  # fmt: skip
        else:
            final_states(model, prompts, take, title, begin)


def _resumed(
    store: FeatureStore, prompts: PromptSet, missing: list[int], count: int
) -> tuple[int, torch.Tensor] | None:
    """Where a streamed pass goes on that was cut short: layers done and the states after them, from the store."""
    first = min(missing, default=count)
    done = [i for i in range(first) if store.has(f"layer-{i}")]
    whole = list(range(len(prompts.sequences)))
    return (done[-1] + 1, store.rows(f"layer-{done[-1]}", prompts, whole)) if done else None


@torch.inference_mode()
def continuations(
    model: PreTrainedModel, prompts: PromptSet, eos: set[int], tokens: int, title: str, rows: int | None = None
) -> list[TokenSequence]:
    """Each prompt followed by the model's own greedy continuation of at most `tokens` tokens.

    Only ids below `rows` are written, so that a model of a smaller vocabulary can read them.
    """
    own = model.get_output_embeddings().weight.shape[0]
    barred = list(range(rows, own)) if rows is not None and rows < own else None
    device = next(model.parameters()).device
    out: list[TokenSequence] = list(prompts.sequences)

    def write(batch: list[int]) -> list[list[int]]:
        length = max(len(prompts.sequences[i]) for i in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            own = torch.tensor(prompts.sequences[i].ids)
            ids[row, length - len(own) :], mask[row, length - len(own) :] = own, 1
        new: list[list[int]] = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            suppress_tokens=barred,
            eos_token_id=sorted(eos) or None,
            pad_token_id=min(eos, default=0),
        )[:, length:].tolist()
        return new

    with bar(title, len(out), "prompts") as advance:
        for batch, written in by_halves(batches(prompts), write, prompts.length, title):
            for row, i in enumerate(batch):
                end = next((n for n, token in enumerate(written[row]) if token in eos), len(written[row]) - 1) + 1
                out[i] = with_continuation(prompts.sequences[i], written[row][:end])
            advance(len(batch))
    return out
