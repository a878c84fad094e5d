"""Memory that runs out: which errors say so, halving, and the sentence at the end."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mergedarts.features import collect, continuations, final_states
from mergedarts.memory import OutOfMemoryError, by_halves, free_memory, in_words, is_out_of_memory, wanted_bytes
from tests.tiny import LAYERS, prompt_set, tiny

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 MiB is free."


@pytest.mark.parametrize(
    ("error", "size"),
    [(RuntimeError(CPU), 8 << 30), (torch.OutOfMemoryError(CUDA), 5 << 29), (MemoryError(), None),
     (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 96 bytes."), 96),
     (OSError(12, "Cannot allocate memory"), None)],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_errors_that_say_so(error, size):
    assert is_out_of_memory(error)
    assert wanted_bytes(error) == size


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch"), ValueError("memory"), KeyError("x"), OSError(28, "No")]
)
def test_errors_that_do_not(error):
    assert not is_out_of_memory(error)


def test_what_torch_really_says():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert wanted_bytes(caught.value) == 1 << 60


def runner(most, lengths, log):
    def run(batch):
        size = len(batch) * max(lengths[i] for i in batch)
        log.append((list(batch), size <= most))
        if size > most:
            raise RuntimeError(CPU)
        return size

    return run


@pytest.mark.parametrize("most", [8, 9, 16, 31, 40, 1000])
def test_every_sequence_is_run_once_and_in_order(most):
    lengths = [8, 8, 8, 7, 6, 5, 5, 5, 5, 3, 2, 1]
    log: list = []
    given = [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    out = list(by_halves(given, runner(most, lengths, log), lengths.__getitem__, "x"))
    assert [i for part, _ in out for i in part] == list(range(12))
    assert all(size == len(part) * lengths[part[0]] <= most for part, size in out)
    # What failed once is not tried again at that size.
    failed = [len(b) * lengths[b[0]] for b, fitted in log if not fitted]
    assert failed == sorted(failed, reverse=True)
    assert len(set(failed)) == len(failed)
    if most == 1000:
        assert [part for part, _ in out] == given


def test_one_sequence_that_is_too_much_is_said(capsys):
    with pytest.raises(OutOfMemoryError, match=r"x: one sequence of 8 tokens: .*8\.0 GiB more were"):
        list(by_halves([[0, 1], [2]], runner(7, [8, 8, 2], []), [8, 8, 2].__getitem__, "x"))
    assert "trying fewer" in capsys.readouterr().err


def test_other_errors_pass():
    def run(batch):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        list(by_halves([[0, 1]], run, lambda i: 1, "x"))


def test_what_filled_the_memory_is_let_go_before_the_next_try():
    held: list = []

    class Big:
        pass

    def run(batch):
        gc.collect()
        assert all(ref() is None for ref in held)
        big = Big()
        held.append(weakref.ref(big))
        if len(batch) > 1:
            raise RuntimeError(CPU)

    assert [part for part, _ in by_halves([[0, 1, 2, 3]], run, lambda i: 1, "x")] == [[0], [1], [2], [3]]


def planted(model, most):
    """Let a model's pass over more than so many tokens fail as if memory ran out."""

    def check(module, args, kwargs):
        if kwargs["input_ids"].numel() > most:
            raise RuntimeError(CPU)

    return model.register_forward_pre_hook(check, with_kwargs=True)


def test_states_are_the_same_with_less_memory():
    model, prompts = tiny("llama"), prompt_set((9, 8, 8, 5, 5, 3))

    def states():
        out = {}

        def take(batch, state):
            for row, i in enumerate(batch):
                out[i] = state[row, : len(prompts.sequences[i])].clone()

        final_states(model, prompts, take, "x")
        return out

    want = states()
    with planted(model, 20):
        found = states()
    assert found.keys() == want.keys()
    for i, state in want.items():
        torch.testing.assert_close(found[i], state, atol=1e-5, rtol=1e-4)
    with planted(model, 8), pytest.raises(OutOfMemoryError, match="one sequence of 9 tokens"):
        states()


def test_continuations_are_the_same_with_less_memory():
    model, prompts = tiny("llama"), prompt_set((9, 8, 8, 5, 5, 3), response=None)
    want = continuations(model, prompts, set(), 4, "x")
    with planted(model, 20):
        assert continuations(model, prompts, set(), 4, "x") == want


def test_words():
    assert in_words(3 << 29) == "1.5 GiB"
    assert in_words(5 << 20) == "5 MiB"
    assert 0 < free_memory() < 1 << 50


def test_the_metric_and_layers_are_the_same_with_less_memory(monkeypatch):
    from mergedarts.fit.fisher import FisherPass, load_metric
    from mergedarts.layerwise import LayerRunner
    from mergedarts.store import FeatureStore

    model, prompts = tiny("llama"), prompt_set((9, 8, 8, 5, 5, 3))

    def metric(name):
        store = FeatureStore(name, prompts.digest, torch.float32)
        collect(model, prompts, store, "x", list(range(LAYERS)))
        FisherPass(prompts, [0, 1, 2, 4, 5], [0, 1], store, "fisher-{}".format, 0, "x").run(model)
        return load_metric(store, "fisher-1").matrix

    def stream():
        runner = LayerRunner(model, prompts)
        for _ in range(2):
            list(runner.step())
        return runner.states

    metric_before, stream_before = metric("whole"), stream()
    decoder = model.get_decoder()
    with planted(decoder, 20):
        torch.testing.assert_close(metric("halves"), metric_before, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(stream(), stream_before, atol=1e-5, rtol=1e-4)
    with planted(decoder, 8), pytest.raises(OutOfMemoryError, match="one sequence of 9 tokens"):
        metric("none")
    with planted(decoder, 8), pytest.raises(OutOfMemoryError, match="layer 0: one sequence of 9 tokens"):
        stream()
