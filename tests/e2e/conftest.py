"""A small world on disk for driving the command: a random Llama, three experts, their merge and prompts.

Built once a session; every command runs with a feature store and caches of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LINES = [
    "def add(a, b): return a + b",
    "What is three times four? The answer is twelve.",
    "Write a short poem about the sea.",
    "assistant user system",
]
WORDS = ("sea", "sky", "sun", "rain", "snow", "wind", "fire", "dust")
DOMAINS = ("code", "maths", "chat")


# ------------------------------------------------------------------------------------------------- running commands


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that stdout must be."""
        return json.loads(self.out)


def environment(cache: Path) -> dict[str, str]:
    return os.environ | {
        "MERGEDARTS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(cache / "hf"),
    }  # fmt: skip


def started(cache: Path, *args: object, cwd: Path | None = None, stdin: str = "", **options: Any) -> Ran:
    """Run the installed command in a process of its own."""
    command = [sys.executable, "-m", "mergedarts.cli", *map(str, args)]
    done = subprocess.run(
        command, cwd=cwd, input=stdin, capture_output=True, text=True, env=environment(cache), timeout=300, **options
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def ran(*args: object, stdin: str = "", cwd: Path | None = None) -> Ran:
    """Run the command's entry point in this process: the same, without the seconds that torch takes to start.

    An exception that the command lets through is a test's failure, as it would be a traceback for the user.
    """
    from mergedarts.cli import main

    before = sys.argv, sys.stdin, Path.cwd()
    stdout, stderr = io.StringIO(), io.StringIO()
    code = 0
    try:
        sys.argv, sys.stdin = ["mergedarts", *map(str, args)], io.StringIO(stdin)
        os.chdir(cwd or Path.cwd())
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main.run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv, sys.stdin = before[0], before[1]
        os.chdir(before[2])
    return Ran(code, stdout.getvalue(), stderr.getvalue())


def calibrate(run: dict[str, Any], tmp_path: Path, *more: object) -> tuple[Path, Ran]:
    out = tmp_path / "out"
    return out, ran("calibrate", write_yaml(tmp_path / "darts.yml", run), "--out", out, "--json", *more)


def listing(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every path under a folder with its inode, size and time of change."""
    return {
        str(p.relative_to(root)): (s.st_ino, s.st_size if p.is_file() else 0, s.st_mtime_ns if p.is_file() else 0)
        for p in sorted(root.rglob("*"))
        for s in [p.lstat()]
    }


def is_mistake(result: Ran, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one sentence on stderr that holds the words."""
    assert result.code == 2, (result.code, result.out, result.err)
    assert result.out == ""
    assert "Traceback" not in result.err
    lines = [line for line in result.err.splitlines() if line.strip() and not line.startswith("warning: ")]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: "), result.err
    assert lines[0].rstrip()[-1] in ".?)", result.err
    for word in words:
        assert word in lines[0], (word, lines[0])


# ------------------------------------------------------------------------------------------------------- the world


def make_tokenizer(extra: list[str] | None = None) -> Any:
    """A byte-level BPE tokenizer with a ChatML-like template; `extra` lines change what it learns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((extra or LINES) * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A random Llama of hidden size 32 whose states differ from token to token; 16 rows more than its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 304, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.normal_(0, 0.5 if "embed" in name or "lm_head" in name else 0.6 / p.shape[-1] ** 0.5)
    return model


def changed(model: Any, seed: int, share: float = 0.25, head: bool = False) -> Any:
    """The model with random changes of its layers' weights, and of its head where asked."""
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() > 1 and ("layers" in name or (head and "lm_head" in name)):
            p.add_(torch.randn_like(p) * p.std() * share)
    return model


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, seed: int) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.12)
    model.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def write_yaml(path: Path, data: Any) -> Path:
    import yaml

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def write_config(folder: Path, text: str) -> None:
    """Change `darts_config.json` and make its checksum anew, as a stranger could."""
    from mergedarts.checksums import write_sums

    (folder / "darts_config.json").write_text(text)
    write_sums(folder)


@dataclass(frozen=True)
class World:
    """Paths of the world; `cache` is MERGEDARTS_CACHE."""

    root: Path
    cache: Path

    @property
    def base(self) -> Path:
        return self.root / "models" / "base"

    @property
    def merged(self) -> Path:
        return self.root / "models" / "merged"

    def expert(self, domain: str) -> str:
        if domain == "maths":
            return f"{self.base}+{self.root / 'models' / 'maths-lora'}"
        return str(self.root / "models" / domain)

    def prompts(self, domain: str) -> Path:
        return self.root / "prompts" / f"{domain}.{'txt' if domain == 'chat' else 'jsonl'}"

    def run(self, *domains: str, **changes: Any) -> dict[str, Any]:
        """Settings of a run over some domains that fits in a second."""
        chosen = {
            d: {"expert": self.expert(d), "prompts": str(self.prompts(d)), "rollout": 16} for d in domains or ("code",)
        }
        return {"merged": str(self.merged), "domains": chosen, "budget": 0.5, "dtype": "float32"} | changes


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """This process uses the session's caches and never the network; one thread, as the subprocesses."""
    cache = tmp_path_factory.mktemp("cache")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        import huggingface_hub.constants

        patch.setenv("MERGEDARTS_CACHE", str(cache))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        torch.set_num_threads(1)
        yield cache
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, _own_caches: Path) -> World:
    """Models, prompts and the merge (made by the command, from a folder that is not the config's)."""
    root = tmp_path_factory.mktemp("world")
    world = World(root, _own_caches)
    models = root / "models"
    tokenizer = make_tokenizer()
    save(make_model(), tokenizer, world.base)
    save(changed(make_model(), 1), tokenizer, models / "code")
    save(changed(make_model(), 2, head=True), tokenizer, models / "chat")
    make_adapter(world.base, models / "maths-lora", 3)
    write_lines(
        world.prompts("code"),
        [{"prompt": f"write f{i}(x)", "response": f"def f{i}(x): return x + {i * 7}"} for i in range(12)],
    )
    write_lines(world.prompts("maths"), [{"prompt": f"what is {i} times {i + 3}?"} for i in range(10)])
    write_lines(world.prompts("chat"), [f"a poem about {w}" for w in WORDS])
    write_yaml(
        models / "merge.yml",
        {
            "merge_method": "task_arithmetic",
            "base_model": "base",
            "models": [
                {"model": m, "parameters": {"weight": 0.4}} for m in ("code", "base+maths-lora", "chat")
            ],
            "dtype": "float32",
        },
    )  # fmt: skip
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = started(world.cache, "merge", models / "merge.yml", world.merged, "--json", cwd=elsewhere)
    assert done.code == 0, done.err
    assert done.json == {"merged": str(world.merged)}
    assert list(elsewhere.iterdir()) == []
    return world


@pytest.fixture(scope="session")
def repaired(world: World) -> tuple[Path, Ran]:
    """All three domains calibrated by the default recipe, in a process of its own."""
    run = write_yaml(world.root / "runs" / "darts.yml", world.run(*DOMAINS))
    out = world.root / "repaired" / "default"
    done = started(world.cache, "calibrate", run, "--out", out, "--json")
    assert done.code == 0, done.err
    return out, done


@pytest.fixture(autouse=True)
def own_cache(_own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Here tests share one store, unlike elsewhere in the suite; `fresh_cache` gives a test its own."""
    monkeypatch.setenv("MERGEDARTS_CACHE", str(_own_caches))
    return _own_caches


@pytest.fixture
def fresh_cache(own_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty feature store for one test."""
    folder = tmp_path_factory.mktemp("fresh-cache")
    monkeypatch.setenv("MERGEDARTS_CACHE", str(folder))
    return folder


@pytest.fixture
def copy_of(tmp_path: Path) -> Any:
    """A copy of a model folder that a test may spoil."""

    def copy(source: Path, name: str = "copy") -> Path:
        return Path(shutil.copytree(source, tmp_path / name))

    return copy


def refused(run: Any, tmp_path: Path, *words: str, text: str | None = None) -> None:
    """`calibrate` says the words and leaves the folder of the run file, where `--out` is, as it was."""
    path = tmp_path / "darts.yml"
    path.write_text(json.dumps(run) if text is None else text)
    before = listing(tmp_path)
    is_mistake(ran("calibrate", path, "--out", tmp_path / "out"), *words)
    assert listing(tmp_path) == before
