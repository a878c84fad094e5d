"""Runs one program in this process, which gives up all it can first; started by `sandbox` in a process of its own.

Knows limits, Landlock, seccomp and audit hooks, and the standard library alone. Never import it into a process that is
to live on.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: Exit statuses: the program raised, it ended by itself before its last statement, it did what is forbidden.
RAISED, LEFT, FORBIDDEN = 1, 96, 97

# --------------------------------------------------------------------------------------------------------- Landlock
# Numbers of linux/landlock.h; system calls 444 to 446 are the same on every architecture.
_READS = 0b1101  # execute, read a file, read a folder
_WRITES = {1: 0b1_1111_1111_0010, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # by the version that knows them
_NETWORK = 0b11  # bind and connect TCP, from version 4
_SCOPES = 0b11  # abstract sockets and signals to processes outside, from version 6
_PATH_BENEATH = 1


def landlock(readable: list[str]) -> bool:
    """Close the file system but for reading beneath some paths, and TCP where the kernel can; whether it took."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    files = _READS | sum(bits for since, bits in _WRITES.items() if version >= since)
    wanted = [files, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0]
    attributes = struct.pack("QQQ", *wanted)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for path in readable:
        with suppress(OSError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = _READS if os.path.isdir(path) else 0b0100
            if path == os.devnull:
                allowed |= 0b0010 & files  # writing to it
            libc.syscall(445, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    return bool(libc.syscall(446, rules, 0) == 0)


# ---------------------------------------------------------------------------------------------------------- seccomp
_ALLOW, _KILL, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS
#: By machine: the audit number of its architecture, `clone`, and the calls that end the process: new processes and
#: programs, sockets, signals to others, tracing, mounts and namespaces, io_uring, bpf, keys.
_CALLS = {
    "x86_64": (0xC000003E, 56, (
        57, 58, 59, 322, 41, 42, 43, 44, 49, 50, 53, 62, 129, 200, 234, 297, 424, 101, 310, 311, 438, 165, 166, 272,
        308, 425, 321, 323, 298, 248, 249, 250,
    )),
    "aarch64": (0xC00000B7, 220, (
        221, 281, 198, 199, 200, 201, 202, 203, 206, 129, 130, 131, 138, 240, 424, 117, 270, 271, 438, 40, 39, 97, 268,
        425, 280, 282, 241, 217, 218, 219,
    )),
}  # fmt: skip
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000


def seccomp() -> bool:
    """End the process at a system call that a function under test has no use for; whether it took.

    Threads may begin; new processes may not.
    """
    if platform.machine() not in _CALLS or sys.maxsize < 1 << 32:
        return False
    architecture, clone, killed = _CALLS[platform.machine()]
    load, equal, above, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, _KILL),
        (load, 0, 0, 0), (above, 0, 1, _X32), (give, 0, 0, _KILL),
        # glibc falls back from clone3, whose flags cannot be seen here, to clone.
        (equal, 0, 1, _CLONE3), (give, 0, 0, _NO_SUCH_CALL),
        (equal, 0, 4, clone), (load, 0, 0, 16), (bits, 0, 1, _CLONE_THREAD), (give, 0, 0, _ALLOW), (give, 0, 0, _KILL),
    ]  # fmt: skip
    for number in killed:
        code += [(equal, 0, 1, number), (give, 0, 0, _KILL)]
    code.append((give, 0, 0, _ALLOW))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = struct.pack("HL", len(code), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(22, 2, program, 0, 0) == 0)


# ------------------------------------------------------------------------------------------------------- audit hook
_ENDS = (
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.killpg", "pty.spawn",
    "subprocess.Popen", "socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "os.remove",
    "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime",
    "os.setxattr", "os.removexattr", "shutil.rmtree", "shutil.move", "tempfile.mkstemp", "tempfile.mkdtemp",
    "sys.addaudithook", "signal.pthread_kill", "ctypes.dlopen", "ctypes.dlsym",
)  # fmt: skip


def audited(leave: Callable[[int], Any]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that ends the process at once where Python code tries what the kernel's walls only refuse."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    ends, null = frozenset(_ENDS), os.devnull

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ends or (event == "open" and args[2] & writes and args[0] != null):
            leave(FORBIDDEN)

    return hook


# ----------------------------------------------------------------------------------------------------------- the run


def limit(seconds: int, memory: int, forks: bool) -> None:
    """Processor time, memory, nothing written to files, few of them open, no core file.

    `forks` also limits processes, and threads with them; root is above that limit, so it is not the first wall.
    """
    limits = [
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
    ]  # fmt: skip
    if forks:
        limits.append((resource.RLIMIT_NPROC, 0))
    for kind, value in limits:
        with suppress(ValueError, OSError):  # a hard limit of the user's own is lower, or the system has none
            resource.setrlimit(kind, (value, value))


def main() -> None:
    order = json.load(sys.stdin)
    secret, answer = order["secret"], order["answer"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.dont_write_bytecode = True
    sys.argv = [""]
    walls = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)  # no new privileges: what the two walls below ask of an ordinary user
        places = [sys.prefix, sys.base_prefix, *sys.path, "/usr", "/lib", "/lib64"]
        places += ["/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"]
        walls = [name for name, took in (("landlock", landlock(places)), ("seccomp", seccomp())) if took]
    limit(order["seconds"], order["memory"], forks="seccomp" not in walls)
    read, write, leave = os.read, os.write, os._exit
    write(answer, (" ".join(walls) + "\n").encode())
    sys.addaudithook(audited(leave))
    try:
        exec(compile(order["program"], "<program>", "exec", dont_inherit=True), {})
    except SystemExit:
        leave(LEFT)
    except BaseException as error:
        write(answer, type(error).__name__.encode()[:80])
        leave(RAISED)
    # Only a program that came to its end gets here; what it has to show is not in memory until now.
    write(answer, read(secret, 64))
    leave(0)


if __name__ == "__main__":
    main()
