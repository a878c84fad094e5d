"""Runs a mergekit config through mergekit's own API.

Knows where mergekit wants its caches and how its paths resolve; knows no merge method.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open

from .checksums import write_sums
from .claims import claim
from .config import load_yaml
from .errors import UserError
from .files import NO_SPACE, cache_dir, digest_text
from .folders import check_replaceable, new_folder
from .memory import is_out_of_memory, out_of_memory
from .models import DTYPES, ModelRef, fingerprint
from .models import folder as folder_of
from .room import check_disk, weight_count
from .store import raise_if_full

MARKER = "mergekit_config.yml"
#: Where a mergekit config names a model; `path` and `lora` in its long form.
_MODEL_KEYS = ("model", "base_model", "path", "lora")


def merge(config: Path, out: Path, trust_remote_code: bool = False) -> Path:
    """Run a mergekit config; paths in it may be relative to the config file.

    Args:
        config: the mergekit YAML file; experts may be `model+adapter`.
        out: the folder of the merged model, replaced where it is an earlier merge.

    Returns:
        `out`, with mergekit's model card and `mergekit_config.yml` (paths made absolute).

    Raises:
        UserError: the config is missing or wrong, a model is missing, or `out` cannot be written.
    """
    data = resolved_config(config)
    check_replaceable(out, MARKER)
    text = yaml.safe_dump(data, sort_keys=False)
    with new_folder(out, MARKER) as folder:
        _run(text, folder, out.name, config, trust_remote_code)
        write_sums(folder)
    return out


def merge_cached(config: Path, trust_remote_code: bool = False) -> Path:
    """The merged model of a config from the user's cache, made where it is missing."""
    data = resolved_config(config)
    text = yaml.safe_dump(data, sort_keys=False)
    prints = [fingerprint(ModelRef.parse(name)) for name in sorted(set(_models(data)))]
    out = cache_dir() / "merged" / digest_text(text, *prints)
    with claim(out):
        if not (out / MARKER).is_file():
            with new_folder(out) as folder:
                _run(text, folder, out.name, config, trust_remote_code)
                write_sums(folder)
    return out


def resolved_config(config: Path) -> dict[str, Any]:
    """A mergekit config with the local paths that exist beside it made absolute."""
    data, _ = load_yaml(config)
    if not isinstance(data, dict) or not {"models", "slices", "modules"} & set(data):
        raise UserError(f"{config} is not a mergekit config; it needs 'merge_method' and 'models' or 'slices'.")
    resolved: dict[str, Any] = _absolute(data, config.parent)
    return resolved


def _absolute(value: Any, base: Path, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _absolute(v, base, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute(v, base, key) for v in value]
    if key in _MODEL_KEYS and isinstance(value, str):
        return str(ModelRef.parse(value, base))
    return value


def _models(data: Any) -> list[str]:
    if isinstance(data, dict):
        named = [v for k, v in data.items() if k in _MODEL_KEYS and isinstance(v, str)]
        return named + [name for v in data.values() for name in _models(v)]
    return [name for v in data for name in _models(v)] if isinstance(data, list) else []


def _run(text: str, folder: Path, name: str, config: Path, trust_remote_code: bool) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions
    from pydantic import ValidationError

    logging.getLogger("mergekit").setLevel(logging.ERROR)
    try:
        parsed = MergeConfiguration.model_validate(yaml.safe_load(text))
    except (ValidationError, RuntimeError, ValueError) as error:
        raise UserError(f"{config} is not a valid mergekit config ({_reason(error)}).") from None
    for name in sorted(set(_models(yaml.safe_load(text)))):
        try:
            fingerprint(ModelRef.parse(name))  # a missing model or pickled weights are said before the work begins
        except UserError as error:
            raise UserError(f"{config}: {error}") from None
    check_disk(folder, _size(yaml.safe_load(text)))
    # mergekit takes whatever folder it finds in its adapter cache for whole, so each merge gets its own.
    adapters = folder / ".adapters"
    options = MergeOptions(
        lora_merge_cache=str(adapters), trust_remote_code=trust_remote_code, quiet=True, copy_tokenizer=True
    )
    try:
        run_merge(parsed, str(folder), options, config_source=text)
    except SafetensorError as error:
        raise_if_full(error, config)
        raise UserError(f"mergekit could not run {config} ({_reason(error)}).") from None
    except (RuntimeError, ValueError, KeyError, NotImplementedError, TypeError, OSError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, f"merging {config}") from None
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            raise cause from None
        raise UserError(f"mergekit could not run {config} ({_reason(error)}).") from None
    finally:
        shutil.rmtree(adapters, ignore_errors=True)
    written = sorted(folder.glob("*.safetensors"))
    if not written:
        raise UserError(f"mergekit wrote no weights for {config}; run mergekit-yaml on it to see why.")
    _check_finite(written, config)
    card = folder / "README.md"
    if card.is_file():  # mergekit calls the model by the folder it writes to, which is a temporary one
        card.write_text(card.read_text(encoding="utf-8").replace(folder.name, name), encoding="utf-8")


def _check_finite(files: list[Path], config: Path) -> None:
    """Raise `UserError` where a merged weight is NaN or infinite, as happens when float16 overflows."""
    for path in files:
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (an open file is no mapping)
                if not torch.isfinite(stored.get_tensor(name)).all():
                    raise UserError(
                        f"The merge of {config} gives values that are not finite ({name}); try 'dtype: bfloat16' or "
                        "'float32', smaller weights, or look for NaN in the experts."
                    )


def _size(config: Any) -> int:
    """About how many bytes a merge writes: at least the numbers of its largest model in the type it asks for."""
    refs = [ModelRef.parse(name) for name in _models(config)]
    numbers = max((weight_count(folder_of(ref.model)) for ref in refs), default=0)
    named = str(config.get("out_dtype") or config.get("dtype"))
    return numbers * DTYPES.get(named, torch.float16).itemsize


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3])[:240] if lines else type(error).__name__
