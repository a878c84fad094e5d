"""Programs that misbehave, each in a process of its own: contained, and counted as failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from mergedarts.evaluation import sandbox
from mergedarts.evaluation.code_eval import SandboxedCodeEval, pass_at
from mergedarts.evaluation.sandbox import Limits, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's walls are Linux's")
QUICK = Limits(seconds=2.0, memory=256 << 20)


def failed(program: str, *reasons: str, limits: Limits = QUICK) -> None:
    verdict = run_program(program, limits)
    assert not verdict.passed
    assert any(reason in verdict.reason for reason in reasons), verdict


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    return a + b\nassert add(2, 3) == 5",
        "import math, re, itertools, collections, functools, typing, heapq\nassert math.gcd(6, 4) == 2",
        "import threading\nr = []\nt = threading.Thread(target=r.append, args=(1,))\nt.start()\nt.join()\nassert r",
        "import sys\nprint('x' * 10_000_000)\nprint('y', file=sys.stderr)",
        "try:\n    raise ValueError\nexcept ValueError:\n    pass",
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nassert A().x == 1",
    ],
)
def test_good_programs_pass(program):
    assert run_program(program, Limits()).passed


def test_numpy_is_there():
    assert run_program("import numpy as np\nassert np.arange(4).sum() == 6", Limits()).passed


def test_wrong_programs_fail_and_say_why():
    failed("assert 1 == 2", "AssertionError")
    failed("def (", "SyntaxError")
    failed("1 / 0", "ZeroDivisionError")
    failed("def f(n): return f(n)\nf(1)", "RecursionError")
    failed("x = '\x00'", "SyntaxError", "ValueError")
    failed("import os, signal\nos.abort()", "signal")


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)", "10 ** 10 ** 10"])
def test_endless_programs_are_ended(program):
    begun = time.monotonic()
    failed(program, "out of time", limits=Limits(seconds=0.7))
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "program",
    ["x = bytearray(1 << 32)", "x = []\nwhile True: x.append(bytearray(1 << 22))", "x = 'a' * (1 << 31)"],
)
def test_memory_eaters(program):
    failed(program, "MemoryError", "signal")
    failed(f"try:\n    exec({program!r})\nexcept ValueError:\n    pass", "MemoryError", "signal")


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)", "exit(0)", "raise SystemExit(0)", "import os\nos._exit(0)", "quit()",
        "import os, sys\nsys.stdout.write('passed')\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nassert False",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\nimport time\ntime.sleep(30)",
    ],
)  # fmt: skip
def test_leaving_early_is_not_passing(program):
    failed(program, "left before its end", "AssertionError", "NameError")


def test_an_exit_status_of_zero_and_a_guess_prove_nothing():
    guess = "for fd in range(3, 64):\n    try:\n        os.write(fd, b'0' * 32)\n    except OSError: pass\n"
    failed(f"import os\n{guess}os._exit(0)", "left before its end")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.fork()",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except Exception: pass",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import multiprocessing\nif True:\n    multiprocessing.get_context('fork').Process(target=print).start()",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.killpg(0, 9)",
        "import socket\ntry:\n    socket.socket()\nexcept Exception: pass",
        "import urllib.request\ntry:\n    urllib.request.urlopen('http://127.0.0.1:1')\nexcept Exception: pass",
        "import socket\nsocket.socketpair()",
    ],
)
def test_processes_and_sockets_end_the_program(program):
    failed(program, "forbidden")


@pytest.mark.parametrize("catch", [False, True])
def test_files_outside_are_neither_written_nor_deleted(tmp_path, catch):
    (tmp_path / "kept").write_text("x")
    tries = [
        f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
        f"open({str(tmp_path / 'kept')!r}, 'a').write('x')",
        f"import os\nos.remove({str(tmp_path / 'kept')!r})",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import os\nos.rename({str(tmp_path / 'kept')!r}, {str(tmp_path / 'moved')!r})",
        f"import os\nos.mkdir({str(tmp_path / 'folder')!r})",
        f"import pathlib\npathlib.Path({str(tmp_path / 'kept')!r}).chmod(0)",
        "open('here', 'w').write('x')",
    ]
    for program in tries:
        failed(f"try:\n    exec({program!r})\nexcept Exception:\n    pass" if catch else program, "forbidden")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "x"
    assert (tmp_path / "kept").stat().st_mode & 0o777


def test_files_outside_are_not_read(tmp_path):
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path / "secret", "/etc/passwd", "/proc/self/environ"):
        failed(f"open({str(path)!r}).read()", "PermissionError")


def kernel_alone(body: str, tmp_path) -> subprocess.CompletedProcess[str]:
    """Run code behind Landlock, seccomp and the limits, with no audit hook."""
    code = (
        f"import sys, os\nsys.path.insert(0, {os.path.dirname(sandbox.__file__)!r})\nimport jail, ctypes\n"
        "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\nassert jail.landlock([sys.base_prefix, sys.prefix, '/usr', '/lib'])\n"
        f"assert jail.seccomp()\njail.limit(5, 1 << 29, False)\n{body}\nprint('end')"
    )
    return subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=30)


@pytest.mark.parametrize(
    "body",
    [
        "os.fork()", "import subprocess; subprocess.run(['true'])", "import socket; socket.socket()",
        "os.kill(os.getppid(), 0)", "ctypes.CDLL(None).fork()", "ctypes.CDLL(None).socket(2, 1, 0)",
        "ctypes.CDLL(None).syscall(0x40000000 + 57)",
    ],
)  # fmt: skip
def test_seccomp_alone_kills(body, tmp_path):
    done = kernel_alone(body, tmp_path)
    assert done.returncode == -31, (done.returncode, done.stderr)  # SIGSYS
    assert done.stdout == ""


@pytest.mark.parametrize(
    "body",
    [
        "open('new', 'w')", "os.remove('kept')", "os.rename('kept', 'b')", "os.mkdir('b')", "os.truncate('kept', 0)",
        "open('kept').read()", "os.listdir('.')", "os.symlink('kept', 'b')", "os.link('kept', 'b')",
        "open('/dev/shm/mergedarts-test', 'w')",
    ],
)  # fmt: skip
def test_landlock_alone_refuses(body, tmp_path):
    (tmp_path / "kept").write_text("x")
    done = kernel_alone(body, tmp_path)
    assert "PermissionError" in done.stderr, (body, done.stderr)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "x"


def test_nothing_is_left_running_or_open():
    before = len(os.listdir("/proc/self/fd"))
    for program in ("x = 1", "while True: pass", "exit(0)"):
        run_program(program, Limits(seconds=0.4))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_wall_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "run_program", lambda *_: sandbox.Verdict(True, "passed", ("seccomp",)))
    sandbox.warn_of_missing_walls.cache_clear()
    sandbox.warn_of_missing_walls()
    sandbox.warn_of_missing_walls.cache_clear()
    said = capsys.readouterr().err
    assert "no landlock" in said
    assert "no seccomp" not in said


def test_code_eval_counts_what_passes():
    programs = [["def f(): return 1", "def f(): return 2"], ["def f(): exit(0)", "def f(): return 3"]]
    tests = ["assert f() == 1", "assert f() == 3"]
    means, found = SandboxedCodeEval().compute(references=tests, predictions=programs, k=[1, 2, 9])
    assert means == {"pass@1": 0.5, "pass@2": 1.0}
    assert [entry["passed"] for _, entry in found[0]] == [True, False]
    assert "left" in found[1][0][1]["result"]


def test_pass_at_k_by_hand():
    assert pass_at(1, 10, 3) == pytest.approx(0.3)
    assert pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6)  # of six pairs one has no passing program
    assert pass_at(3, 4, 2) == 1
