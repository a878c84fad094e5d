"""Runs code that a model wrote, together with its tests, in a process of its own that can do little harm.

Knows how a program is started, watched and judged; what the process gives up is in `jail`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import UserError
from ..progress import warn

#: Walls of the kernel, and what stays open where one is missing.
WALLS = {
    "landlock": "files outside can be read, and written by code that gets past Python's audit hook",
    "seccomp": "processes and sockets are stopped by Python's audit hook alone",
}
#: Exit statuses of `jail`, which is not imported here because it imports what not every system has.
_RAISED, _LEFT, _FORBIDDEN = 1, 96, 97


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall time, the start of Python included; of processor time as much.
        memory: bytes of address space.
    """

    seconds: float = 5.0
    memory: int = 1 << 30


@dataclass(frozen=True)
class Verdict:
    """Whether a program came to the end of its tests, and in a few words why not."""

    passed: bool
    reason: str
    walls: tuple[str, ...] = ()


def run_program(program: str, limits: Limits | None = None) -> Verdict:
    """Run a Python program and say whether it reached its end.

    A program passes when the statement after its last one is reached within the limits. It shows that by a random
    number which it can read only there; an exit status of 0 alone counts for nothing.

    Raises:
        UserError: this system has no limits for processes (Windows).
    """
    if os.name != "posix":
        raise UserError("Generated code runs on Linux and macOS only, where a process can be limited.")
    limits = limits or Limits()
    proof = secrets.token_hex(16).encode()
    secret_out, secret_in = os.pipe()
    answer_out, answer_in = os.pipe()
    os.write(secret_in, proof)
    os.close(secret_in)
    order = {
        "program": program, "secret": secret_out, "answer": answer_in, "seconds": math.ceil(limits.seconds),
        "memory": limits.memory,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mergedarts-") as empty:
        environment = {"HOME": empty, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("jail.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=empty, env=environment,
            pass_fds=(secret_out, answer_in), start_new_session=True,
        )  # fmt: skip
        for end in (secret_out, answer_in):
            os.close(end)
        late = False
        try:
            process.communicate(json.dumps(order).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        os.set_blocking(answer_out, False)
        with os.fdopen(answer_out, "rb") as stream:
            shown = stream.read() or b""
    first, _, rest = shown.partition(b"\n")
    walls = tuple(first.decode("ascii", "replace").split())
    if status == 0 and rest == proof:
        return Verdict(True, "passed", walls)
    return Verdict(False, _reason(status, rest, late), walls)


def _reason(status: int, shown: bytes, late: bool) -> str:
    if late or status == -signal.SIGXCPU:
        return "out of time"
    if status == -signal.SIGSYS or status == _FORBIDDEN:
        return "forbidden: a process, a socket, a signal or a change of files"
    if status in (0, _LEFT):
        return "left before its end"
    if status == _RAISED:
        return shown.decode("ascii", "replace") or "raised"
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


@cache
def warn_of_missing_walls() -> None:
    """Say once which of the kernel's walls this system does not have, and what that leaves open."""
    tried = run_program("x = 1")
    if not tried.passed:
        raise UserError(f"The sandbox for generated code does not work here ({tried.reason}); nothing was run.")
    for wall, open_ in WALLS.items():
        if wall not in tried.walls:
            warn(f"this system has no {wall} for the sandbox of generated code: {open_}.")
