"""Death at random moments: the next run goes on, and its result is byte for byte that of an undisturbed run.

Commands run in forks of this process, so that a death costs no start of Python. `MERGEDARTS_KILLS=20` tries that many
moments of each command; the suite tries a few.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from mergedarts.checksums import SUMS, check_sum, read_sums
from mergedarts.files import TEMPORARY

from .conftest import Ran, World, write_yaml
from .test_evaluate import tasks  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("MERGEDARTS_KILLS", "0"))


@dataclass(frozen=True)
class Fork:
    """A command in a process of its own, with a cache of its own."""

    pid: int
    log: Path
    started: float

    @classmethod
    def of(cls, args: tuple[object, ...], cache: Path, log: Path, before: Callable[[], None] = lambda: None) -> Fork:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.environ["MERGEDARTS_CACHE"] = str(cache)
                stream = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                sys.argv = ["mergedarts", *map(str, args)]
                before()
                from mergedarts.cli import main

                main.run()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return cls(pid, log, time.monotonic())

    def end(self) -> tuple[int, float]:
        """Exit code (of a signal: minus its number) and seconds since the start."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), time.monotonic() - self.started

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def content(folder: Path) -> dict[str, Any]:
    """All files of a result; of `darts_config.json` all but the seconds that each stage took."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, data = str(path.relative_to(folder)), path.read_bytes()
        if name == "darts_config.json":
            found[name] = json.loads(data) | {"seconds": None}
        elif name != SUMS:
            found[name] = hashlib.sha256(data).hexdigest()
    for name in read_sums(folder):
        check_sum(folder, name, "x")
    return found


def left_over(*folders: Path) -> list[str]:
    return [str(p) for folder in folders for p in folder.rglob("*") if TEMPORARY.fullmatch(p.name)]


def stored(cache: Path) -> dict[str, str]:
    """What is whole in the store, with its content."""
    wanted = [p for kind in ("features", "evaluations") for p in (cache / kind).rglob("*")]
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in wanted
        if p.is_file() and not TEMPORARY.fullmatch(p.name)
    }


COMMANDS = ("merge", "calibrate", "diagnose", "export", "evaluate")


def command(name: str, world: World, repaired: Path, task_files: Path, tmp_path: Path, out: Path) -> tuple[object, ...]:
    run = write_yaml(tmp_path / "darts.yml", world.run("maths", "code"))
    return {
        "merge": ("merge", world.root / "models" / "merge.yml", out),
        "calibrate": ("calibrate", run, "--out", out),
        "diagnose": ("diagnose", run, "--out", out),
        "export": ("export", repaired, "--format", "lora", "--out", out),
        "evaluate": (
            "evaluate", repaired, "--tasks", "choice", "--route", "choice=code", "--include-path", task_files,
            "--limit", 3, "--out", out,
        ),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments(
    name: str,
    world: World,
    repaired: tuple[Path, Ran],
    tasks: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out"
    args = command(name, world, repaired[0], tasks, tmp_path, out)
    whole = Fork.of(args, tmp_path / "cache", tmp_path / "log")
    code, seconds = whole.end()
    assert code == 0, whole.said()
    want = content(out)
    moments = random.Random(f"{name}-{KILLS}")
    kills = KILLS or (2 if name == "calibrate" else 1)
    deaths = 0
    for trial in range(kills):
        cache = tmp_path / f"cache-{trial}"
        if trial % 2 == 0:
            shutil.rmtree(out, ignore_errors=True)  # every other time, an earlier result stands there
        killed = Fork.of(args, cache, tmp_path / "log")
        time.sleep(moments.uniform(0.02, 0.98) * seconds)
        os.kill(killed.pid, signal.SIGKILL)
        deaths += killed.end()[0] == -signal.SIGKILL
        if out.exists():
            assert content(out) == want
        before = stored(cache)
        after = Fork.of(args, cache, tmp_path / "log")
        assert after.end()[0] == 0, after.said()
        assert content(out) == want
        assert before.items() <= stored(cache).items()
        assert left_over(place, cache) == []
        assert [p.name for p in place.iterdir()] == ["out"]
        shutil.rmtree(cache)
    print(f"{name}: {deaths} deaths in {kills} trials of {seconds:.1f} s")
    assert deaths or kills < 5


def test_two_at_once_do_the_work_once(world: World, tmp_path: Path) -> None:
    """The second waits for the first by name, then takes what it has made."""
    run = write_yaml(tmp_path / "darts.yml", world.run("code", "chat"))
    alone = Fork.of(("calibrate", run, "--out", tmp_path / "alone" / "out"), tmp_path / "cache", tmp_path / "log")
    assert alone.end()[0] == 0, alone.said()
    cache = tmp_path / "shared"

    def count() -> None:
        from mergedarts import features
        from mergedarts.fit.fisher import FisherPass

        for owner, name in ((features, "collect"), (FisherPass, "run")):
            real = getattr(owner, name)

            def counted(*args: Any, real: Any = real, name: str = name, **more: Any) -> None:
                with (tmp_path / "passes").open("a") as log:
                    log.write(f"{name}\n")
                real(*args, **more)

            setattr(owner, name, counted)

    pair = [
        Fork.of(("calibrate", run, "--out", tmp_path / str(i) / "out"), cache, tmp_path / f"log{i}", count)
        for i in range(2)
    ]
    assert [fork.end()[0] for fork in pair] == [0, 0], [fork.said() for fork in pair]
    assert content(tmp_path / "0" / "out") == content(tmp_path / "1" / "out") == content(tmp_path / "alone" / "out")
    passes = (tmp_path / "passes").read_text().split()
    assert sorted(passes) == ["collect", "collect", "run", "run"]  # one a domain, not two
    waits = [(i, line) for i, fork in enumerate(pair) for line in fork.said().splitlines() if "waiting for" in line]
    assert waits
    for i, line in waits:
        assert f"waiting for process {pair[1 - i].pid} on " in line


def test_two_into_one_folder(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="surgery", fit={"steps": 2}, budget=1))
    args = ("calibrate", run, "--out", tmp_path / "out")
    pair = [Fork.of(args, tmp_path / "cache", tmp_path / f"log{i}") for i in range(2)]
    assert [fork.end()[0] for fork in pair] == [0, 0], [fork.said() for fork in pair]
    content(tmp_path / "out")
    assert left_over(tmp_path) == []


def said_once(fork: Fork) -> None:
    code, _ = fork.end()
    assert code == 130, fork.said()
    lines = fork.said().splitlines()
    assert lines == ["interrupted; the same command goes on from what is in the feature store."]


@pytest.mark.parametrize("part", [0.1, 0.5, 0.8])
def test_ctrl_c(world: World, tmp_path: Path, part: float) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("maths"))
    args = ("calibrate", run, "--out", tmp_path / "out")
    whole = Fork.of(args, tmp_path / "cache", tmp_path / "log")
    code, seconds = whole.end()
    assert code == 0
    shutil.rmtree(tmp_path / "out")
    fork = Fork.of(args, tmp_path / "fresh", tmp_path / "log")
    time.sleep(seconds * part)
    os.kill(fork.pid, signal.SIGINT)
    start = time.monotonic()
    said_once(fork)
    assert time.monotonic() - start < 2
    assert left_over(tmp_path) == []
    assert not (tmp_path / "out").exists()


def test_ctrl_c_inside_a_long_call(world: World, tmp_path: Path) -> None:
    """Where a library is busy, Python's own handler would wait for it."""

    def busy() -> None:
        from mergedarts import repair

        def long_call(*_: object) -> None:
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 50_000_000)

        repair.prepare = long_call  # type: ignore[assignment]

    run = write_yaml(tmp_path / "darts.yml", world.run("maths"))
    fork = Fork.of(("calibrate", run, "--out", tmp_path / "out"), tmp_path / "cache", tmp_path / "log", busy)
    time.sleep(1.0)
    os.kill(fork.pid, signal.SIGINT)
    start = time.monotonic()
    said_once(fork)
    assert time.monotonic() - start < 2


def test_ctrl_c_inside_a_library_that_makes_an_error_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mergedarts.cli import main

    def library(*_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException:
            raise ValueError("could not determine the shape") from None

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(main, "spelled_out", library)
    monkeypatch.setattr(main, "_interrupted", threading.Event())
    try:
        with pytest.raises(SystemExit) as ended:
            main.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"{main.INTERRUPTED}\n"
