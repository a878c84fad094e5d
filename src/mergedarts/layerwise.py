"""Runs a causal LM one decoder layer at a time over a whole set of sequences.

Knows how to make any family's own forward run a single layer, by putting the others aside; knows no corrections.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import UserError
from .features import batches, check_finite, hooked, padded, state_of, stopping_before
from .memory import by_halves, is_out_of_memory
from .models import decoder_layers
from .prompts import PromptSet
from .streaming import in_memory, is_streamed, mapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Tokens of the trial run that tells whether layers can run one at a time.
TRIAL = 8


class _Stop(Exception):
    """Ends a decoder's forward after the layer that was wanted."""


class LayerRunner:
    """The residual stream of a model over some sequences, moved on one layer at a time.

    The decoder's own forward runs for each batch and layer, so masks, rotary embeddings and whatever else a family
    hands to its layers are its own; all layers but one pass their input on, and their hooks rest. A streamed model's
    layer is read from disk once for all batches, and the stream is kept in a file that is mapped into memory.

    Args:
        model: a causal LM.
        prompts: the sequences.
        begin: called with a batch of sequence indices before a layer runs on it.
        start: how many layers are done, and the stream [tokens, d] after them, which is written to.
        tokens: padded tokens in a batch.

    Raises:
        UserError: the layers share more than the hidden state, so that one at a time is not the model.

    Attributes:
        states: [tokens, d] the stream after `depth` layers, in flat token order, moved on in place; may be replaced by
            corrected ones.
        current: while a layer runs, which places of the batch [B, T] are real tokens, and their flat indices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: PromptSet,
        begin: Callable[[list[int]], None] = lambda batch: None,
        start: tuple[int, torch.Tensor] | None = None,
        tokens: int | None = None,
    ) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._stack = stack_of(model)
        self._device = next(model.parameters()).device
        self._prompts = prompts
        self._begin = begin
        self.batches = batches(prompts, tokens)
        self._offsets = prompts.offsets.tolist()
        self.current: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(0, dtype=torch.bool), torch.zeros(0))
        self.depth = 0 if start is None else start[0]
        self.states = self._first() if start is None else start[1]

    @property
    def layers(self) -> int:
        return len(self._stack.layers)

    def room(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, d] an empty stream: in memory, or in a file where the model is streamed."""
        like = self.states if like is None else like
        shape = (self._prompts.tokens, like.shape[-1])
        return mapped(shape, like.dtype) if is_streamed(self._model) else torch.empty(shape, dtype=like.dtype)

    @torch.inference_mode()
    def _first(self) -> torch.Tensor:
        """[tokens, d] the input of the first layer."""
        first = self._stack.layers[0]

        def run(batch: list[int]) -> torch.Tensor:
            with resting([first]), stopping_before(first) as caught:
                self._decoder(input_ids=padded(self._prompts, batch, self._device), use_cache=False)
            return caught.pop()

        flat: torch.Tensor | None = None
        for batch, state in self._each(run):
            flat = self.room(state) if flat is None else flat
            self._put(flat, batch, state)
        assert flat is not None
        return flat

    def _each(self, run: Callable[[list[int]], torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """What a run of each batch gives, or of smaller ones where memory does not suffice."""
        return by_halves(self.batches, run, self._prompts.length, f"layer {self.depth}")

    def _rows(self, batch: list[int]) -> list[slice]:
        """Where the sequences of a batch are in flat token order."""
        return [slice(self._offsets[i], self._offsets[i + 1]) for i in batch]

    def _take(self, flat: torch.Tensor, batch: list[int], ids: torch.Tensor) -> torch.Tensor:
        """[B, T, d] a batch of a flat [tokens, d], zero where it is padded."""
        state = torch.zeros(*ids.shape, flat.shape[1], dtype=flat.dtype, device=self._device)
        for row, where in enumerate(self._rows(batch)):
            state[row, : where.stop - where.start] = flat[where].to(self._device)
        return state

    def _put(self, flat: torch.Tensor, batch: list[int], state: torch.Tensor) -> None:
        for row, where in enumerate(self._rows(batch)):
            flat[where] = state[row, : where.stop - where.start].cpu()

    def step(self) -> Iterator[int]:
        """Run the next layer over all sequences and move on; yields the tokens done as it goes."""
        yield from self._layer(True)
        self.depth += 1

    def peek(self) -> Iterator[int]:
        """Run the next layer over all sequences for what hooks on its parts see; the states stay."""
        yield from self._layer(False)

    @torch.inference_mode()
    def _layer(self, moves: bool) -> Iterator[int]:
        def run(batch: list[int]) -> torch.Tensor:
            ids = padded(self._prompts, batch, self._device)
            lengths = torch.tensor([where.stop - where.start for where in self._rows(batch)])
            real = torch.arange(ids.shape[1]) < lengths[:, None]
            self.current = (real, torch.cat([torch.arange(w.start, w.stop) for w in self._rows(batch)]))
            self._begin(batch)
            return self._stack.run(self.depth, ids, self._take(self.states, batch, ids))

        with in_memory(self._stack.layers[self.depth]):
            for batch, state in self._each(run):
                if moves:  # a batch's rows are read before they are written, and by no other batch
                    self._put(self.states, batch, state)
                yield sum(map(self._prompts.length, batch))

    @torch.inference_mode()
    def final(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """After the last layer: batches of sequence indices and the input of the output embedding [B, T, d]."""

        def run(batch: list[int]) -> torch.Tensor:
            ids = padded(self._prompts, batch, self._device)
            self._begin(batch)
            return self._stack.rest(self._model, ids, self._take(self.states, batch, ids))

        yield from self._each(run)

    def pull_rest(self, score: Callable[[list[int], torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The gradient [tokens, d] with respect to the states after the last layer.

        Args:
            score: of a batch of sequence indices and the input of the output embedding [B, T, d], the gradient there.
        """
        gradient = self.room()

        def run(batch: list[int]) -> torch.Tensor:
            ids = padded(self._prompts, batch, self._device)
            with torch.enable_grad():
                state = self._take(self.states, batch, ids).requires_grad_()
                final = self._stack.rest(self._model, ids, state)
                return torch.autograd.grad(final, state, score(batch, final.detach()))[0]

        for batch, found in self._each(run):
            self._put(gradient, batch, found)
        return gradient

    def pull(self, gradient: torch.Tensor) -> Iterator[int]:
        """Go back through the layer of `depth`, whose input `states` are; yields the tokens done as it goes.

        `gradient` [tokens, d] with respect to its output becomes that with respect to its input.
        """

        def run(batch: list[int]) -> torch.Tensor:
            ids = padded(self._prompts, batch, self._device)
            with torch.enable_grad():
                state = self._take(self.states, batch, ids).requires_grad_()
                out = self._stack.run(self.depth, ids, state)
                return torch.autograd.grad(out, state, self._take(gradient, batch, ids))[0]

        with in_memory(self._stack.layers[self.depth]):
            for batch, found in self._each(run):
                self._put(gradient, batch, found)
                yield sum(map(self._prompts.length, batch))


class Stack:
    """A causal LM's decoder layers, each of which can run alone.

    Attributes:
        layers: the modules, in order.

    Raises:
        UserError: layers cannot run one at a time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # The model itself is not kept, so that it is freed where a stack is remembered for it.
        self._decoder = model.get_decoder()
        self.layers = [layer for _, layer in decoder_layers(model)]
        self._counts = [0] * len(self.layers)
        self._check(next(model.parameters()).device)

    @torch.inference_mode()
    def _check(self, device: torch.device) -> None:
        """Compare each layer alone with what it does in a pass of the whole, on a few tokens."""
        ids = torch.arange(1, TRIAL + 1, device=device)[None]
        first: list[torch.Tensor] = []
        outputs: list[Any] = []
        hooks = [layer.register_forward_hook(lambda m, i, o: outputs.append(o)) for layer in self.layers]
        enter = self.layers[0].register_forward_pre_hook(lambda m, a, k: first.append(_hidden(a, k)), with_kwargs=True)
        with hooked(enter, *hooks):
            self._decoder(input_ids=ids, use_cache=False)
        if len(first) != 1 or len(outputs) != len(self.layers):
            raise UserError(f"{type(self._decoder).__name__} does not run its layers in a row; use 'sites: final'.")
        self._counts = [len(o) if isinstance(o, tuple) else 0 for o in outputs]
        shared = UserError(
            f"The layers of {type(self._decoder).__name__} share more than the hidden state, so they cannot be run one "
            "at a time; use 'sites: final' for this model, in memory."
        )
        # Other tokens through each layer replace whatever it leaves behind for a later one.
        alone, others, other = first[0], ids.flip(1) // 2, first[0].flip(1)
        for depth, layer in enumerate(self.layers):
            with in_memory(layer):
                try:
                    alone = self.run(depth, ids, alone)
                    other = self.run(depth, others, other)
                except (KeyError, AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
                    if is_out_of_memory(error):
                        raise
                    # What the layer reads from others was never made in this pass.
                    raise shared from None
            check_finite(state_of(outputs[depth]), f"{type(self._decoder).__name__}, layer {depth}")
            if not torch.equal(alone, state_of(outputs[depth])):
                raise shared

    def run(self, depth: int, ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The output of one layer on a batch's hidden states [B, T, d]."""
        caught: list[torch.Tensor] = []

        def catch(_module: nn.Module, _args: Any, output: Any) -> None:
            caught.append(state_of(output))
            raise _Stop

        hooks = [
            self.layers[depth].register_forward_pre_hook(_replace(state), with_kwargs=True, prepend=True),
            self.layers[depth].register_forward_hook(catch),
        ]
        with self.aside(depth), hooked(*hooks), suppress(_Stop):
            self._decoder(input_ids=ids, use_cache=False)
        return caught.pop()

    def rest(self, model: PreTrainedModel, ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The input of the output embedding [B, T, d], of a batch's hidden states after the last layer."""
        with self.aside(len(self.layers), state), stopping_before(model.get_output_embeddings()) as caught:
            model(input_ids=ids, use_cache=False)
        return caught.pop()

    @contextmanager
    def aside(self, depth: int, state: torch.Tensor | None = None) -> Iterator[None]:
        """The layers before one pass their input on, or `state` where it is given, and their hooks rest."""
        before = self.layers[:depth]
        own = [vars(layer).get("forward") for layer in before]
        try:
            for layer, count in zip(before, self._counts, strict=False):
                layer.forward = _pass_on(count, state)
            with resting(before):
                yield
        finally:
            for layer, forward in zip(before, own, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward


_STACKS: weakref.WeakKeyDictionary[nn.Module, Stack] = weakref.WeakKeyDictionary()


def stack_of(model: PreTrainedModel) -> Stack:
    """The model's stack; whether its layers can run alone is tried once."""
    if model not in _STACKS:
        _STACKS[model] = Stack(model)
    return _STACKS[model]


@contextmanager
def resting(layers: list[nn.Module]) -> Iterator[None]:
    """Hooks on these modules themselves are not called inside the block, but for those added in it."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    own = [{name: dict(getattr(layer, name)) for name in names} for layer in layers]
    try:
        for layer in layers:
            for name in names:
                getattr(layer, name).clear()
        yield
    finally:
        for layer, hooks in zip(layers, own, strict=True):
            for name in names:
                getattr(layer, name).clear()
                getattr(layer, name).update(hooks[name])


def _replace(state: torch.Tensor) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return ((state, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": state})

    return hook


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _pass_on(count: int, state: torch.Tensor | None) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs) if state is None else state
        return (hidden, *[None] * (count - 1)) if count else hidden

    return forward
