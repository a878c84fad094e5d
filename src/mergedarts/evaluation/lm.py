"""Models as lm-evaluation-harness wants them: a repaired model by name, any causal LM with progress.

Knows the harness's model interface; knows no tasks and no scores. Importing it registers the model `mergedarts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from ..progress import bar
from ..repaired import load


class _Advance:
    """Stands where the harness keeps finished answers: tells a progress bar of each."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    def add_partial(self, _kind: str, _request: Any, _answer: Any) -> None:
        self._advance(1)


class CausalLM(HFLM):  # type: ignore[misc]
    """The harness's Hugging Face model with the project's progress bar.

    Args:
        title: what the bar says.
        kwargs: of the harness's `HFLM`.
    """

    def __init__(self, title: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.title = title
        self.cache_hook: Any  # where the harness keeps finished answers

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        with self._shown(len(requests)):
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        with self._shown(len(requests)):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        with self._shown(len(requests)):
            return super().generate_until(requests, disable_tqdm=True)

    @contextmanager
    def _shown(self, requests: int) -> Iterator[None]:
        kept: Any = self.cache_hook
        with bar(self.title, requests, "requests") as advance:
            if getattr(kept, "dbdict", None) is None:  # a cache that the user asked the harness for stays in place
                self.cache_hook = _Advance(advance)
            try:
                yield
            finally:
                self.cache_hook = kept


@register_model("mergedarts")
class MergedartsLM(CausalLM):
    """A repaired model: `--model mergedarts --model_args path=DIR,domain=math`.

    Args:
        path: the folder that `calibrate` wrote.
        domain: one of its domains, `auto` for its router, `none` for the merged model as it was.
        merged: where the merged model is now, if it has moved.
        device: `cuda`, `cuda:1`, `mps`, `cpu`, or `auto`; the harness's own default falls back to what is there.
        dtype: `bfloat16`, `float16` or `float32`; that of the calibration if not given.
        kwargs: of the harness's `HFLM`.
    """

    def __init__(
        self,
        path: str,
        domain: str | None,
        merged: str | None = None,
        device: str = "auto",
        dtype: str | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        repaired = load(
            path,
            merged=merged,
            domain=None if domain in (None, "none") else str(domain),
            device=usable(device),
            dtype=None if dtype == "auto" else dtype,
            trust_remote_code=trust_remote_code,
        )
        self.handle = repaired.handle
        super().__init__(f"{path}: {domain}", pretrained=repaired.model, tokenizer=repaired.tokenizer, **kwargs)


def usable(device: str) -> str:
    """The device to ask for: the harness says `cuda:0` where nothing was chosen, also on a machine without one."""
    import torch

    return "auto" if device in ("cuda", "cuda:0") and not torch.cuda.is_available() else device
