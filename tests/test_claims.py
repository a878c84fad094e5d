"""Claims: one process at a time, owners by name, and what the dead leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from mergedarts import claims
from mergedarts.claims import claim, made_once, sweep
from mergedarts.errors import UserError
from mergedarts.files import host_token, temporary_prefix


def process(code, **options):
    """A Python process that runs some code and says a line when it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=os.environ, **options
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


HOLD = """
    import sys, time
    from pathlib import Path
    from mergedarts.claims import claim
    with claim(Path({place!r})):
        print("ready", flush=True)
        time.sleep({seconds})
"""


def test_a_claim_waits_for_its_owner_and_names_it(tmp_path, capsys):
    child = process(HOLD.format(place=str(tmp_path / "x"), seconds=1))
    start = time.monotonic()
    with claim(tmp_path / "x"):
        assert child.poll() is not None or time.monotonic() - start > 0.5
    said = " ".join(capsys.readouterr().err.split())
    assert f"waiting for process {child.pid} on " in said
    assert str(tmp_path / "x") in said.replace(" ", "") or "works on" in said
    child.wait()


def test_a_dead_owner_holds_nothing(tmp_path, capsys):
    child = process(HOLD.format(place=str(tmp_path / "x"), seconds=60))
    child.send_signal(signal.SIGKILL)
    child.wait()
    start = time.monotonic()
    with claim(tmp_path / "x"):
        pass
    assert time.monotonic() - start < 1
    assert capsys.readouterr().err == ""


def test_other_places_are_free_and_claims_nest(tmp_path):
    child = process(HOLD.format(place=str(tmp_path / "x"), seconds=60))
    try:
        with claim(tmp_path / "y"), claim(tmp_path / "y"):
            pass
        with claim(tmp_path / "y"):
            pass
    finally:
        child.kill()
        child.wait()


def test_two_do_the_work_once(tmp_path):
    """Four processes want one text at the same moment."""
    code = f"""
        import time
        from pathlib import Path
        from mergedarts.claims import made_once
        def work():
            time.sleep(0.3)
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("worked\\n")
            return "text"
        print("ready", flush=True)
        assert made_once(Path({str(tmp_path / "x")!r}), work) == "text"
    """
    children = [process(code, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert (tmp_path / "log").read_text() == "worked\n"
    assert made_once(tmp_path / "x", lambda: pytest.fail("made again")) == "text"


def test_locks_that_cannot_be_made_are_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="locks cannot be made there"), claim(tmp_path / "x"):
        pass


def dead() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_only_what_the_dead_of_this_host_left_is_swept(tmp_path):
    host, gone = host_token(), dead()
    stale = [f".out.{host}-{gone}.abcdefgh.tmp", f".x.y.safetensors.{host}-{gone}.abcdefgh.tmp"]
    kept = [
        f".out.{host}-{os.getpid()}.abcdefgh.tmp", f".out.00000000-{gone}.abcdefgh.tmp", "out", ".out.tmp",
        f".out.{host}-{gone}.abcdefgh.txt", f"out.{host}-{gone}.abcdefgh.tmp",
        f".out.{host}-{os.getppid()}.abcdefgh.tmp",
    ]  # fmt: skip
    for name in [stale[0], *kept]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "deep").write_text("x")
    (tmp_path / stale[1]).write_text("x")
    sweep(tmp_path, "other")
    assert names(tmp_path) == sorted([*stale, *kept])
    sweep(tmp_path)
    assert names(tmp_path) == sorted(kept)


def test_a_number_that_another_process_has_now_is_a_dead_owner(tmp_path):
    path = tmp_path / f".out.{host_token()}-{os.getppid()}.abcdefgh.tmp"
    path.write_text("x")
    assert claims._lives(os.getppid(), path)

    class Old:
        def lstat(self):
            return os.stat_result((0, 0, 0, 0, 0, 0, 0, 0, 0, 1000))

    assert not claims._lives(os.getppid(), Old())


def test_an_old_result_that_was_put_aside_comes_back(tmp_path):
    """Killed between the two renames: the old folder is aside, the new one is not there yet."""
    aside = tmp_path / f".out.{host_token()}-{dead()}.abcdefgh.old"
    aside.mkdir()
    (aside / "m").write_text("old")
    sweep(tmp_path, "out")
    assert (tmp_path / "out" / "m").read_text() == "old"
    aside.mkdir()
    sweep(tmp_path, "out")
    assert names(tmp_path) == ["out"]


def test_names_of_any_length_fit(tmp_path):
    for name in ("é" * 120, "🙂" * 60, "x" * 250):
        (tmp_path / f"{temporary_prefix(name)}abcdefgh.tmp").write_text("x")
        assert temporary_prefix(name).startswith(f".{name[:20]}")


def test_the_cache_is_swept_at_the_first_claim(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path))
    (tmp_path / "features" / "a").mkdir(parents=True)
    stale = tmp_path / "features" / "a" / f".final.{host_token()}-{dead()}.abcdefgh.tmp"
    stale.write_text("x")
    with claim(tmp_path / "x"):
        assert not stale.exists()
