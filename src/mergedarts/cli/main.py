"""The `mergedarts` command: gathers the commands and turns a user's mistake into one sentence and exit code 2.

Knows no logic of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..errors import UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Repairs merged language models after the merge, without training.",
)

out = Console()

#: Seconds after Ctrl-C in which a run may tidy up.
GRACE = 1.5
#: Addresses of Ray that are no host and port; the first is what `--ray` alone means.
RAY_WORDS = ("local", "auto")
INTERRUPTED = "interrupted; the same command goes on from what is in the feature store."


def _version(value: bool) -> None:
    if value:
        print(f"mergedarts {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Repairs merged language models after the merge, without training."""


def emit(data: Any) -> None:
    """Print a machine-readable result on stdout."""
    print(json.dumps(data, ensure_ascii=False))


def quiet_libraries() -> None:
    """Keep other libraries' bars and advice off the terminal; errors still pass."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("mergekit", "lm_eval", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def spelled_out(arguments: list[str]) -> list[str]:
    """The command line with `--ray` given the address it may be without, which typer's options cannot be."""
    out: list[str] = []
    for i, argument in enumerate(arguments):
        out.append(argument)
        following = arguments[i + 1] if i + 1 < len(arguments) else ""
        if argument == "--ray" and (following.startswith("-") or not (":" in following or following in RAY_WORDS)):
            out.append(RAY_WORDS[0])
    return out


class _Interrupted(BaseException):
    """Ctrl-C, by a name that typer does not turn into an exit code of its own."""


#: Whether Ctrl-C has come: a library may have turned the exception into one of its own.
_interrupted = threading.Event()


def _interrupt(*_: object) -> None:
    _interrupted.set()
    raise _Interrupted


def run() -> None:
    """Entry point: exit code 2 and one sentence for a `UserError`, 130 for Ctrl-C; a bug keeps its traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary folders are removed
    signal.signal(signal.SIGINT, _interrupt)
    try:
        with _grace():
            from . import calibrate, demo, diagnose, evaluate, export, generate, info, merge  # noqa: F401  (they register)

            for stream in (sys.stdout, sys.stderr):
                if hasattr(stream, "reconfigure"):
                    stream.reconfigure(errors="replace")
            app(spelled_out(sys.argv[1:]), standalone_mode=True)
    except (_Interrupted, Exception) as error:
        if _interrupted.is_set():
            print(INTERRUPTED, file=sys.stderr)
            sys.exit(130)
        if isinstance(error, UserError):
            _say(error)
            sys.exit(2)
        from ..memory import is_out_of_memory, out_of_memory

        if not is_out_of_memory(error):
            raise
        _say(out_of_memory(error, "The work"))
        sys.exit(2)


def _say(error: UserError) -> None:
    text = clean(str(error)).replace("\n", "�")  # one line, whatever a file or key is called
    Console(stderr=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def _grace() -> Iterator[None]:
    """End the process GRACE seconds after Ctrl-C where it is then still inside some library's long call.

    Python's own handler runs between two steps of the interpreter alone; the operating system's writes to a pipe at
    once, and a thread reads it. Temporary files that are left are swept by the next run.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        while signals := os.read(reader, 64):
            if signal.SIGINT in signals and not over.wait(GRACE):
                shown = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides the cursor
                os.write(2, f"{shown}{INTERRUPTED}\n".encode())
                os._exit(130)
        os.close(reader)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def clean(text: str) -> str:
    """Text without control characters, so that a file's name or a model's output cannot steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
