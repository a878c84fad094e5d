"""Domains as Ray tasks: on this machine, or on the machines of a Ray cluster.

Knows what a task is given and what it must find where it runs; which task runs where and when is Ray's affair.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .claims import sweep
from .domains import Clock, Outcome, merged_model, repair_domain, run_experts
from .errors import UserError
from .files import cache_dir, exists, temporary_prefix, write_text
from .fit import layers_needed
from .fit.plan import wants_fisher
from .job import DomainJob, Job
from .memory import is_out_of_memory, out_of_memory
from .models import ModelRef, fingerprint, folder, pick_device
from .progress import bar, collected, say, warn
from .room import check_features, weight_count

#: The address that starts Ray here.
LOCAL = "local"
#: Bytes of shared memory that a Ray of our own takes for what tasks give back.
OBJECTS = 256 << 20
#: What a task takes of main memory beside the weights of one model, as a share of them.
BESIDE = 0.3


@dataclass(frozen=True)
class Origin:
    """Where a run was started, for a task to compare with where it is.

    Attributes:
        version: of mergedarts.
        host: its name.
        cache: its cache folder.
        token: name of a file in the shared place, or in the cache folder where there is none.
    """

    version: str
    host: str
    cache: str
    token: str


@dataclass(frozen=True)
class Report:
    """What a task gives back: the outcome or a user's mistake, warnings, and seconds by stage."""

    outcome: Outcome | None
    mistake: str | None
    warnings: list[str]
    seconds: dict[str, float]


def check_alone() -> None:
    """Raise `UserError` where a launcher started several processes, which would each fan out."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "Ray and several processes of a launcher do not go together; leave out '--ray', or start one process."
        )


def repair_domains(job: Job, address: str, clock: Clock) -> list[Outcome]:
    """Repair every domain of a run in a Ray task of its own.

    Args:
        job: the run.
        address: LOCAL, or that of a cluster.
        clock: gets the tasks' seconds, added up, and the seconds waited for them as `ray`.

    Returns:
        Outcomes in the order of the domains.

    Raises:
        UserError: Ray is missing or cannot be reached, a machine lacks something, or what a task says to a user.
    """
    if job.shared is not None and job.shared.url.startswith("memory:"):
        raise UserError(f"The store {job.shared} is in the memory of one process; name one that Ray's tasks reach.")
    reports: dict[int, Report] = {}
    with clock.stage("ray"), _joined(address) as ray, _token(job) as token:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        asked = share(nodes, len(job.domains), _memory(job), gpu=job.run.device == "auto" or job.device.type == "cuda")
        task = ray.remote(**asked, max_retries=0, max_calls=1)(_task)
        origin = Origin(__version__, socket.gethostname(), str(cache_dir()), token)
        refs = [task.remote(job, i, origin, asked["num_cpus"]) for i in range(len(job.domains))]
        # Futures, since Ctrl-C inside `ray.wait` comes out as an error of Ray's.
        places = {ref.future(): i for i, ref in enumerate(refs)}
        try:
            with bar("domains", len(job.domains), "domains") as advance:
                for done in as_completed(places):
                    name = job.domains[places[done]].name
                    report = _report(ray, done, name)
                    for line in report.warnings:
                        warn(line)
                    if report.mistake is not None:
                        raise UserError(report.mistake)
                    clock.add(report.seconds)
                    reports[places[done]] = report
                    advance(1)
                    say(f"domain '{name}' is done, {len(refs) - len(reports)} to go")
        finally:
            for future, i in places.items():
                if not future.done():
                    with suppress(Exception):
                        ray.cancel(refs[i], force=True)
    return [report.outcome for _, report in sorted(reports.items()) if report.outcome is not None]


def share(nodes: list[dict[str, float]], tasks: int, memory: int, gpu: bool) -> dict[str, int]:
    """What each task asks of Ray, so that all domains run at once where CPUs, memory and GPUs suffice.

    Args:
        nodes: resources of the machines.
        tasks: how many there are.
        memory: bytes that one takes.
        gpu: whether a task shall have a GPU, where there is one.
    """
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    if sum(cpus) < 1:
        raise UserError("The Ray cluster has no CPUs; add machines to it that have.")
    asked = {"num_cpus": max(1, min(max(cpus), sum(cpus) // tasks))}
    if gpu and any(node.get("GPU", 0) >= 1 for node in nodes):
        return asked | {"num_gpus": 1}
    # More than the largest machine has would wait for ever.
    largest = int(max(node.get("memory", 0) for node in nodes))
    return asked | ({"memory": min(memory, largest)} if largest else {})


def _memory(job: Job) -> int:
    """Bytes of main memory that a task takes for a model; one that is streamed takes little."""
    root = folder(job.merged.model)
    return 0 if job.stream or root.is_file() else int(weight_count(root) * job.dtype.itemsize * (1 + BESIDE))


@contextmanager
def _joined(address: str) -> Iterator[Any]:
    """Ray, started here or joined; left at the end as it was found."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed; pip install 'mergedarts[ray]', or leave out '--ray'.") from None
    if ray.is_initialized():
        yield ray
        return
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
        if address == LOCAL:
            place = stack.enter_context(_short_folder())
            stack.enter_context(_own_token())
            options |= {"include_dashboard": False, "object_store_memory": OBJECTS, "_temp_dir": place}
        stack.callback(ray.shutdown)
        with _own_signals():
            try:
                ray.init(**options)
            except Exception as error:  # Ray's own, gRPC's, the system's
                if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None  # Ctrl-C inside Ray's own code
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                what = "could not be started here" if address == LOCAL else f"does not answer at {address[:200]}"
                raise UserError(f"Ray {what} ({reason}); check 'ray status', or leave out '--ray'.") from None
        yield ray


@contextmanager
def _own_token() -> Iterator[None]:
    """A Ray of our own has a token of this process; without one Ray writes one into the user's home."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in names):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = _token_of_process()
    try:
        yield
    finally:
        for name in names:  # Ray has set the mode
            os.environ.pop(name, None)


@cache
def _token_of_process() -> str:
    """One for all Rays that a process starts, since Ray reads it once."""
    return secrets.token_hex(32)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, in whose place Ray puts its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _short_folder() -> Iterator[str]:
    """A temporary folder for Ray's sockets, whose paths may have 107 bytes; those of dead runs are removed."""
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= len("/tmp") else "/tmp"
    sweep(Path(root), "ray")
    with tempfile.TemporaryDirectory(
        prefix=temporary_prefix("ray"), suffix=".tmp", dir=root, ignore_cleanup_errors=True
    ) as place:
        yield place


@contextmanager
def _token(job: Job) -> Iterator[str]:
    """The name of a small file where features are shared: who sees it, sees the store."""
    name = f"{temporary_prefix('ray')}{uuid.uuid4().hex[:8]}.tmp"
    path = cache_dir() / name
    write_text(path, "A run by Ray is at work.\n")
    try:
        if job.shared is not None:
            job.shared.put(name, path)
        yield name
    finally:
        path.unlink(missing_ok=True)
        if job.shared is not None:
            job.shared.remove(name)


def _report(ray: Any, future: Future[Report], name: str) -> Report:
    """What a task gave back; a bug in it keeps its traceback, the death of its process is a `UserError`."""
    try:
        return future.result()
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"The process that repaired domain '{name}' died ({reason}); memory may have run out there, and the same "
            "command goes on from what is in the feature store."
        ) from None


# ----------------------------------------------------------------------------------------------------- inside a task


def _task(job: Job, index: int, origin: Origin, cpus: int) -> Report:
    clock, domain = Clock(), job.domains[index]
    host = socket.gethostname()
    outcome, mistake = None, None
    with collected() as warnings:
        try:
            check_here(job, domain, origin, host)
            torch.set_num_threads(min(cpus, int(os.environ.get("OMP_NUM_THREADS") or cpus)))
            # Ray shows a task its own GPU alone, whatever its number is.
            job = replace(job, device=pick_device(job.run.device.partition(":")[0]))
            outcome = _repaired(job, domain, clock)
        except UserError as error:
            mistake = str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            mistake = str(out_of_memory(error, f"Domain '{domain.name}'"))
    if mistake is not None and host != origin.host and host not in mistake:
        mistake = f"On {host}: {mistake}"
    return Report(outcome, mistake, warnings, clock.seconds)


def _repaired(job: Job, domain: DomainJob, clock: Clock) -> Outcome:
    layers = len(layers_needed(job))
    check_features(replace(job, domains=(domain,)), layers, layers if wants_fisher(job) else 0)
    ready = run_experts(job, domain, clock)
    model, readout = merged_model(job, [ready], clock)
    return repair_domain(job, ready, model, readout, clock)


def check_here(job: Job, domain: DomainJob, origin: Origin, host: str) -> None:
    """Raise `UserError` where this machine lacks what a domain needs: the same mergedarts, models and store.

    Without a shared place, the cache folder of where the run was started is used here too.
    """
    if origin.version != __version__:
        raise UserError(
            f"On {host} mergedarts {__version__} is installed, where the run was started {origin.version}; install the "
            "same version on all machines."
        )
    for ref, print_ in ((job.merged, job.merged_print), (domain.expert, domain.expert_print)):
        _check_model(ref, print_, domain.name, host)
    if job.shared is None:
        os.environ["MERGEDARTS_CACHE"] = origin.cache
        seen, place = (Path(origin.cache) / origin.token).is_file(), origin.cache
    else:
        seen, place = job.shared.has(origin.token), str(job.shared)
    if not seen:
        raise UserError(
            f"The feature store {place} is not found on {host}, where domain '{domain.name}' is to be repaired; set "
            "'store' to a folder or address that all machines share."
        )


def _check_model(ref: ModelRef, print_: str, domain: str, host: str) -> None:
    for part in (ref.model, ref.adapter):
        if part is not None and Path(part).is_absolute() and not exists(Path(part)):
            raise UserError(
                f"The model {part} is not found on {host}, where domain '{domain}' is to be repaired; put it on a path "
                "that all machines share, or name it by its hub id."
            )
    if fingerprint(ref) != print_:
        raise UserError(f"The model {ref} on {host} is another than where the run was started; copy it anew.")
