"""Models by name: find, load, fingerprint and compare them; find decoder layers and the output embedding.

Knows Hugging Face folders, hub ids, PEFT adapters and GGUF files, and no model family by name; does not run a model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .checksums import digest_files
from .errors import UserError
from .files import digest_text, exists, read_json
from .memory import is_out_of_memory, out_of_memory
from .room import check_memory
from .streaming import forget_ties, merge_streamed_adapter, streaming_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class ModelRef:
    """A model as a user writes it: `model` or `model+adapter`, each a folder, a GGUF file or a hub id[@revision]."""

    model: str
    adapter: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def parse(cls, text: str, base: Path | None = None, trust_remote_code: bool = False) -> ModelRef:
        """Read `model[+adapter]`; relative paths that exist under `base` are taken from there."""
        # A path may itself hold a plus sign.
        parts = [text] if _local(text, base) is not None else [part.strip() for part in text.split("+")]
        if len(parts) > 2 or not all(parts):
            raise UserError(f"'{text[:200]}' is not a model; write 'model' or 'model+adapter'.")
        resolved = [str(_local(part, base) or part) for part in parts]
        return cls(resolved[0], resolved[1] if len(resolved) == 2 else None, trust_remote_code)

    def __str__(self) -> str:
        return f"{self.model}+{self.adapter}" if self.adapter else self.model

    @property
    def name(self) -> str:
        """The last part of the path: of the adapter where there is one."""
        return Path(self.adapter or self.model).name


def _local(text: str, base: Path | None) -> Path | None:
    """The path that `text` names, if it exists, relative to `base` or as it stands."""
    path = Path(text).expanduser()
    for candidate in [base / path] if base is not None and not path.is_absolute() else [path]:
        if exists(candidate):
            return Path(os.path.abspath(candidate))
    return None


def folder(name: str, what: str = "model") -> Path:
    """The folder on disk of a model or adapter: itself, or the hub's snapshot of it (downloaded where needed)."""
    path = Path(name).expanduser()
    if exists(path):
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"The {what} {name[:200]} does not exist; check the path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise UserError(f"The {what} {name} is neither a folder here nor found on the hub ({reason}).") from None


def fingerprint(ref: ModelRef) -> str:
    """Digest of everything that decides what a model computes: weights, configs and adapter, not names or paths."""
    return digest_text(*(_fingerprint(part) for part in (ref.model, ref.adapter) if part))


def _fingerprint(name: str) -> str:
    root = folder(name)
    if root.is_file():
        return digest_files([root], root.parent)
    files = [path for pattern in _WEIGHTS for path in root.glob(pattern)]
    check_weights(root, files)
    return digest_files(
        [*files, *(root / n for n in ("config.json", "adapter_config.json") if (root / n).is_file())], root
    )


def check_weights(root: Path, files: list[Path]) -> None:
    """Raise `UserError` where a model folder holds no safetensors."""
    if files:
        return
    pickles = [path.name for pattern in _PICKLES for path in root.glob(pattern)]
    if pickles:
        raise UserError(
            f"{root} holds its weights as pickle ({pickles[0]}), which can run code when read; "
            "convert it to safetensors first."
        )
    raise UserError(f"{root} holds no weights (*.safetensors); is it a model folder?")


def load_config(ref: ModelRef) -> Any:
    """The model's configuration; its text part where it has several."""
    from transformers import AutoConfig

    root = folder(ref.model)
    try:
        if root.is_file():
            config = AutoConfig.from_pretrained(root.parent, gguf_file=root.name)
        else:
            config = AutoConfig.from_pretrained(root, trust_remote_code=ref.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{ref.model} has no usable config.json ({_first_line(error)}).") from None
    return config.get_text_config()


def load_tokenizer(ref: ModelRef) -> Any:
    """The tokenizer of a model: of the adapter where it brings one."""
    from transformers import AutoTokenizer

    roots = [folder(name) for name in (ref.adapter, ref.model) if name]
    root = next((r for r in roots if r.is_dir() and (r / "tokenizer_config.json").is_file()), roots[-1])
    try:
        if root.is_file():
            return AutoTokenizer.from_pretrained(root.parent, gguf_file=root.name)
        return AutoTokenizer.from_pretrained(root, trust_remote_code=ref.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{root} has no usable tokenizer ({_first_line(error)}).") from None


def load_model(ref: ModelRef, dtype: torch.dtype, device: torch.device, stream: bool = False) -> PreTrainedModel:
    """Load a causal LM for inference, adapters merged into the weights.

    Args:
        ref: what to load.
        dtype: of the weights; an adapter's product is made in float32 and added to weights of this dtype, as mergekit
            does it, so that the expert here is the expert that was merged.
        device: where to.
        stream: leave the decoder layers on disk, to be read as they run.

    Raises:
        UserError: not a causal LM, weights missing or unreadable, or an adapter that does not fit.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    root = folder(ref.model)
    options: dict[str, Any] = {"dtype": dtype, "low_cpu_mem_usage": True}
    scratch = None
    if stream:
        if root.is_file():
            raise UserError(f"{ref} is a GGUF file and cannot be streamed; set 'stream: false', or convert it.")
        shape = outline(ref)
        options |= streaming_options(shape, [name for name, _ in decoder_layers(shape)], device)
        scratch = options["offload_folder"]
        options["offload_folder"] = scratch.name
    try:
        if root.is_file():
            model = AutoModelForCausalLM.from_pretrained(root.parent, gguf_file=root.name, **options)
        else:
            check_weights(root, list(root.glob("*.safetensors")))
            if not stream:
                check_memory(ref, root, dtype, device)
            settings = root / "generation_config.json"
            if settings.is_file() and not isinstance(read_json(settings), dict):
                raise UserError(f"{settings} is not a JSON object; remove it or make it again.")
            model, found = AutoModelForCausalLM.from_pretrained(
                root, use_safetensors=True, trust_remote_code=ref.trust_remote_code, output_loading_info=True, **options
            )
            if found["missing_keys"]:
                raise UserError(
                    f"The weights of {ref.model} lack {min(found['missing_keys'])}, which would be random; "
                    "fetch or make them again."
                )
        if stream:
            forget_ties(model)
        if ref.adapter and stream:
            merge_streamed_adapter(model, outline.__wrapped__(ref), _adapter_folder(ref.adapter))
        elif ref.adapter:
            model = _merge_adapter(model, _adapter_folder(ref.adapter))
    except SafetensorError as error:
        raise UserError(
            f"The weights of {ref} cannot be read ({_first_line(error)}); fetch or make them again."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, f"loading {ref}") from None
        raise UserError(f"{ref} cannot be loaded as a causal LM ({_first_line(error)}).") from None
    if model.get_output_embeddings() is None:
        raise UserError(f"{ref} has no output embedding; mergedarts repairs causal language models.")
    if root.is_file():
        # A dequantised model keeps the mark of its origin, with which it could not be saved or moved.
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config
        model = cast_weights(model, dtype)
    if stream:
        model.streaming_scratch = scratch  # removed with the model
        streamed: PreTrainedModel = model.eval().requires_grad_(False)
        return streamed
    # What the loader keeps in float32 (rotary frequencies, a few weights) stays so, as wherever else the model runs.
    result: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return result


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights in a dtype; buffers, such as rotary frequencies, stay as they are."""
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    return model


def _adapter_folder(name: str) -> Path:
    """The folder of a PEFT adapter."""
    root = folder(name, "adapter")
    if not (root / "adapter_config.json").is_file():
        raise UserError(f"{root} is not a PEFT adapter (it has no adapter_config.json).")
    check_weights(root, list(root.glob("*.safetensors")))
    return root


def _merge_adapter(model: PreTrainedModel, root: Path) -> PreTrainedModel:
    from peft import PeftModel

    try:
        merged: PreTrainedModel = PeftModel.from_pretrained(model, str(root)).merge_and_unload()
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"The adapter {root} does not fit its model ({_first_line(error)}).") from None
    return merged


def expert_names(merged: ModelRef) -> dict[str, str]:
    """Experts by short name from the `mergekit_config.yml` that mergekit leaves in a merged folder."""
    from .config import load_yaml

    path = Path(merged.model) / "mergekit_config.yml"
    if not path.is_file():
        return {}
    data, _ = load_yaml(path)
    texts = list(dict.fromkeys(model_strings(data)))
    short = [ModelRef.parse(text).name for text in texts]
    return {text: text for text in texts} | {
        name: text for name, text in zip(short, texts, strict=True) if short.count(name) == 1
    }


def model_strings(data: Any) -> list[str]:
    """All models named in a mergekit config, experts (`model:` entries) in their order."""
    found: list[str] = []
    if isinstance(data, dict):
        for key, value in data.items():
            if key == "model" and isinstance(value, str):
                found.append(value)
            else:
                found.extend(model_strings(value))
    elif isinstance(data, list):
        for value in data:
            found.extend(model_strings(value))
    return found


def check_fit(merged: ModelRef, expert: ModelRef) -> None:
    """Raise `UserError` where expert and merged model cannot have come from the same base.

    Another number of vocabulary rows is no mistake: experts and merges are padded and trimmed.
    """
    ours, theirs = load_config(merged), load_config(expert)
    for field, words in (("hidden_size", "hidden size"), ("num_hidden_layers", "number of layers")):
        a, b = getattr(ours, field, None), getattr(theirs, field, None)
        if a != b:
            raise UserError(
                f"The expert {expert} has {words} {b}, but the merged model {merged} has {a}; "
                "they do not share a base model."
            )


def decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The decoder layers of a causal LM in order, with their module names.

    They are the list of modules inside the decoder that is as long as the configuration says, of whichever family.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    root = model.get_decoder()
    prefix = next((name for name, module in model.named_modules() if module is root), "")
    lists = [(name, m) for name, m in root.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise UserError(
            f"No list of {count} decoder layers found in {type(model).__name__}; use 'sites: final' for this model."
        )
    name, layers = min(lists, key=lambda item: item[0].count("."))
    path = ".".join(part for part in (prefix, name) if part)
    return [(f"{path}.{i}", layer) for i, layer in enumerate(layers)]


def head_parameters(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [vocabulary, d] and bias of the output embedding."""
    head = model.get_output_embeddings()
    return head.weight.detach(), getattr(head, "bias", None)


def pick_device(name: str) -> torch.device:
    """The device a user names; `auto` takes CUDA, then MPS, then the CPU.

    Of several processes that a launcher starts on a machine, each takes the GPU of its number (`LOCAL_RANK`).
    """
    if name == "auto":
        if torch.cuda.is_available():
            number = os.environ.get("LOCAL_RANK", "")
            return torch.device("cuda", int(number) % torch.cuda.device_count()) if number else torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps", "xpu"):
            raise RuntimeError("not a device that runs models")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"The device '{name}' cannot be used here ({_first_line(error)}); try 'cpu'.") from None
    return device


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a CPU has no instructions for products of a dtype, so that float32 is several times faster."""
    if device.type != "cpu" or dtype == torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    known = torch.ops.mkldnn
    native = known._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else known._is_mkldnn_fp16_supported
    return not native()


@lru_cache(maxsize=8)
def outline(ref: ModelRef) -> PreTrainedModel:
    """A model's modules and shapes without its weights (on the meta device)."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                load_config(ref), trust_remote_code=ref.trust_remote_code
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{ref} cannot be loaded as a causal LM ({_first_line(error)}).") from None
    return model


def parameter_count(model: PreTrainedModel) -> int:
    """Parameters of a model, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def eos_ids(root: ModelRef, tokenizer: Any) -> set[int]:
    """Token ids that end a response: of the tokenizer and of the generation config."""
    ids = {tokenizer.eos_token_id}
    path = Path(root.model) / "generation_config.json"
    if path.is_file():
        settings = read_json(path)
        stop = settings.get("eos_token_id") if isinstance(settings, dict) else None
        ids |= set(stop) if isinstance(stop, list) else {stop}
    return {i for i in ids if isinstance(i, int)}


def check_ids(ref: ModelRef, largest: int) -> None:
    """Raise `UserError` where token ids of the prompts are beyond a model's vocabulary."""
    rows = getattr(load_config(ref), "vocab_size", None)
    if rows is not None and largest >= rows:
        raise UserError(
            f"The prompts use token id {largest}, but {ref} has {rows} rows in its vocabulary; "
            "it was trimmed below its tokenizer."
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
