"""Train one expert from a base model: a LoRA adapter, or with ``--full`` all the weights.

It knows the chat template, response-only loss and token-budgeted batches; it knows nothing of merging, of repair,
of more than one domain, of devices other than the CPU, or of resuming a run that stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_TOKENS = 1_500
EXAMPLES = {"lora": 1_100, "full": 360}
LEARNING_RATE = {"lora": 1e-3, "full": 1e-4}


class TrainError(Exception):
    """What the user can put right; its message is one sentence."""


@dataclass(frozen=True)
class Example:
    """Token ids of one conversation; the loss starts at ``ids[start]``, the first token of the response."""

    ids: list[int]
    start: int


def read_examples(path: Path, tokenizer: Any, count: int, rng: random.Random) -> list[Example]:
    """Draw ``count`` examples (or all, if there are fewer) from JSON lines of ``prompt`` and ``response``.

    Raises:
        TrainError: the file is missing or empty, or a line is not such an object.
    """
    if not path.exists():
        raise TrainError(f"The data file {path} does not exist.")
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            pairs.append((str(row["prompt"]), str(row["response"])))
        except (ValueError, KeyError, TypeError):
            raise TrainError(f'Line {number} of {path} is not a JSON object with "prompt" and "response".') from None
    if not pairs:
        raise TrainError(f"The data file {path} is empty.")
    rng.shuffle(pairs)
    return [tokenize(tokenizer, prompt, response) for prompt, response in pairs[:count]]


def tokenize(tokenizer: Any, prompt: str, response: str) -> Example:
    """Render one turn with the chat template; the end-of-turn token belongs to the response."""
    turns = [{"role": "user", "content": prompt}]
    opening = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    before = tokenizer.encode(opening, add_special_tokens=False)
    after = tokenizer.encode(response, add_special_tokens=False)
    return Example([*before, *after, tokenizer.eos_token_id], len(before))


def make_batches(examples: list[Example], budget: int, rng: random.Random) -> list[list[Example]]:
    """Group whole sequences of like length so that a padded batch holds at most ``budget`` tokens.

    A sequence longer than the budget gets a batch of its own. The order of the batches is random.
    """
    batches: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.ids), reverse=True):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= budget:
            batches[-1].append(example)
        else:
            batches.append([example])
    rng.shuffle(batches)
    return batches


def response_loss(model: Any, batch: list[Example], pad: int) -> torch.Tensor:
    """Mean negative log-likelihood of the response tokens, in nats; logits are computed for these alone."""
    width = max(len(e.ids) for e in batch)
    ids = torch.tensor([e.ids + [pad] * (width - len(e.ids)) for e in batch])
    position = torch.arange(width)
    start, end = torch.tensor([(e.start, len(e.ids)) for e in batch]).T.unsqueeze(-1)
    real = position < end
    hidden = model.get_decoder()(input_ids=ids, attention_mask=real.long(), use_cache=False).last_hidden_state
    scored = real & (position >= start)
    logits = model.get_output_embeddings()(hidden[:, :-1][scored[:, 1:]])
    return cross_entropy(logits.float(), ids[:, 1:][scored[:, 1:]])


def train(model: Any, batches: list[list[Example]], pad: int, lr: float, console: Console) -> None:
    """One pass over ``batches`` with AdamW and linear decay to zero; computes in bf16, keeps fp32 weights."""
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    model.train()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=len(batches))
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = response_loss(model, batch, pad)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.update(task, advance=1, description=f"training, loss {loss.item():.3f}")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that takes its name only once everything is written."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner may read
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run(args: argparse.Namespace, console: Console) -> None:
    """Train and write the expert that ``args`` describes."""
    kind, base, out = "full" if args.full else "lora", Path(args.base), Path(args.out).resolve()
    if not (base / "config.json").is_file():
        raise TrainError(f"The base {base} is not a model folder: it has no config.json.")
    if out.exists():
        raise TrainError(f"The output {out} exists already.")
    if any(number is not None and number <= 0 for number in (args.examples, args.rank, args.lr, args.threads)):
        raise TrainError("Examples, rank, learning rate and threads must be greater than zero.")
    began = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    rng = random.Random(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise TrainError(f"The tokenizer in {base} needs a chat template and an end-of-sequence token.")
    examples = read_examples(Path(args.data), tokenizer, args.examples or EXAMPLES[kind], rng)
    batches = make_batches(examples, BATCH_TOKENS, rng)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if not args.full:
        config = LoraConfig(r=args.rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)  # puts the adapters into `model`, so that is what we train
    train(model, batches, tokenizer.eos_token_id, args.lr or LEARNING_RATE[kind], console)
    model.to(torch.bfloat16)
    with whole_folder(out) as folder:
        if args.full:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        else:
            adapted.save_pretrained(folder)
            (folder / "README.md").unlink(missing_ok=True)  # an empty form, not a model card
    console.print(f"{out}: {len(examples)} examples, {len(batches)} steps, {time.monotonic() - began:.0f} s")


def main() -> int:
    """Parse the command line; errors the user can put right end in one sentence and exit code 2."""
    parser = argparse.ArgumentParser(description="Train one expert from a base model.")
    parser.add_argument("base", help="folder of the base model, with its tokenizer and chat template")
    parser.add_argument("--data", required=True, help='JSON lines, each {"prompt": ..., "response": ...}')
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--full", action="store_true", help="train all weights and save a complete model in bf16")
    parser.add_argument("--examples", type=int, help="how many to draw (default 1100, with --full 360)")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank, without --full (default 8)")
    parser.add_argument("--lr", type=float, help="first learning rate (default 1e-3, with --full 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, the order and the adapter (default 0)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as torch chooses)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(args, Console(stderr=True, quiet=not sys.stderr.isatty()))
    except (TrainError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
