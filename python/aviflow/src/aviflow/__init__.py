"""Hooks for a training script that runs on Aviflow.

    import aviflow

    aviflow.install_sigterm_handler()  # or SIGTERM ends the process before it has saved
    for step in range(first_step, total_steps):
        loss = train_step(...)
        aviflow.log(step, loss=loss, total_steps=total_steps)
        if step % 100 == 0 or aviflow.should_stop():
            with aviflow.checkpoint(step, path):
                save(path)
        if aviflow.should_stop():
            sys.exit(aviflow.REQUEUE)

Outside the platform, where AVIFLOW_SOCKET is not set, every hook does nothing. On it, no
hook raises, waits or fails because of the platform: what cannot be delivered is dropped.
Only `atomic_write` and `atomic_dir` raise, since they are the training's own work.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, TypeVar, cast

from ._connection import Connection
from ._files import PathLike, atomic_dir, atomic_write, remove_partials
from ._place import (
    attempt,
    cache_dir,
    checkpoint_dir,
    data_dir,
    job_name,
    output_dir,
    rank,
    seed,
)

__all__ = [
    "REQUEUE",
    "atomic_dir",
    "atomic_write",
    "attempt",
    "cache_dir",
    "checkpoint",
    "checkpoint_begin",
    "checkpoint_complete",
    "checkpoint_dir",
    "checkpoint_failed",
    "collective",
    "compute",
    "data_dir",
    "enabled",
    "flush",
    "install_sigterm_handler",
    "job_name",
    "log",
    "log_data",
    "log_facts",
    "log_summary",
    "output_dir",
    "rank",
    "remove_partials",
    "role",
    "seed",
    "should_stop",
    "stop_reason",
]

REQUEUE = 75
"""Exit code of a process that saved its work and asks to be queued again."""

_logger = logging.getLogger("aviflow")
_warned: set[str] = set()
_connection: Connection | None = None
_looked = False
_terminated = False
_own_seconds = 0.0
_computing = 0

_F = TypeVar("_F", bound=Callable[..., Any])


def _quiet(hook: _F) -> _F:
    """A hook that never raises: it warns once for each hook, and goes on."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            if hook.__name__ not in _warned:
                _warned.add(hook.__name__)
                _logger.warning("aviflow.%s: %s; the training goes on", hook.__name__, error)
            return None

    return cast(_F, call)


def _agent() -> Connection | None:
    global _connection, _looked
    if not _looked:
        _looked = True
        path = os.environ.get("AVIFLOW_SOCKET")
        _connection = Connection(path, rank()) if path else None
    return _connection


def _forget() -> None:
    """Starts anew: in a forked child, such as a data loader's worker, where the parent's
    connection must not be written to, and in tests."""
    global _connection, _looked, _own_seconds, _computing
    if _connection is not None:
        _connection.close()
    _connection, _looked = None, False
    _own_seconds, _computing = 0.0, 0


os.register_at_fork(after_in_child=_forget)


def _send(message: dict[str, Any]) -> None:
    agent = _agent()
    if agent is not None:
        agent.send(message)


def enabled() -> bool:
    """Whether an agent of the platform is to be told anything."""
    return _agent() is not None


@_quiet
def log(
    step: int,
    *,
    total_steps: int | None = None,
    tokens: int | None = None,
    own_seconds: float | None = None,
    **values: Any,
) -> None:
    """Reports a step's metrics, such as loss, learning_rate, grad_norm, tokens_per_second, mfu.

    `step` is the number of the step that ended, `tokens` how many the training has seen in
    all, `own_seconds` how long this process computed in it before it waited for others; where
    it is not given, the time in `compute()` since the last report. Values are numbers or what `float()` takes: of an array on an accelerator that
    waits for its computation, as printing it would. One that is no number is left out.
    """
    global _own_seconds
    if _agent() is None:
        return
    timed, _own_seconds = _own_seconds, 0.0
    values["own_seconds"] = own_seconds if own_seconds is not None else timed or None
    _send(
        {
            "type": "metrics",
            "step": int(step),
            "values": {
                name: number
                for name, value in values.items()
                if (number := _number(value)) is not None
            },
            "total_steps": None if total_steps is None else int(total_steps),
            "tokens": None if tokens is None else int(tokens),
        }
    )


@contextlib.contextmanager
def compute(wait: Callable[[], Any] | None = None) -> Iterator[None]:
    """Times what this process computes by itself, before it waits for others in a collective.

    Around the forward and the backward pass without the exchange of gradients, for example.
    The times of all such blocks since the last `log` are added up, and `log` reports the sum
    as `own_seconds`: by it a rank is found that is slower than its peers, as the steps of all
    take as long as those of the slowest. An accelerator computes on after the call; `wait`,
    such as `torch.cuda.synchronize`, makes the block last until it is done. It costs what the
    overlap of these calls would have saved, so a step in ten may be enough.
    """
    global _own_seconds, _computing
    # Of blocks within each other the outermost counts.
    outermost, _computing = _computing == 0, _computing + 1
    began = time.perf_counter()
    try:
        yield
        if outermost and wait is not None:
            _wait(wait)
    finally:
        _computing = max(0, _computing - 1)
        if outermost:
            _own_seconds += time.perf_counter() - began


def _wait(wait: Callable[[], Any]) -> None:
    # What it raises is of the training's own computation, which must be heard of.
    if enabled():
        wait()


@_quiet
def role(number: int) -> None:
    """Says what this process does, as a number from 0 to 65535 that is equal for equal work.

    Only ranks of one role are compared with each other. With pipeline parallelism it is the
    stage; where all ranks do the same, nothing needs to be said.
    """
    if not 0 <= int(number) <= 65535:
        raise ValueError(f"a role is a number from 0 to 65535, not {number}")
    _send({"type": "role", "role": int(number)})


@_quiet
def collective(number: int) -> None:
    """Says that this process enters a collective operation, by its number: the same for all
    ranks, and one more for each. Where a training hangs, the rank that is behind shows by it."""
    if not 0 <= int(number) < 1 << 64:
        raise ValueError(f"collectives are counted from 0, not {number}")
    _send({"type": "collective", "number": int(number)})


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


@_quiet
def checkpoint_begin(step: int, path: PathLike) -> None:
    """Announces that a checkpoint is being written, where `checkpoint` does not fit."""
    _checkpoint("begin", step, path)


@_quiet
def checkpoint_complete(step: int, path: PathLike) -> None:
    """Announces a checkpoint that a restart may use: whole, and on its disk."""
    _checkpoint("complete", step, path)


@_quiet
def checkpoint_failed(step: int, path: PathLike) -> None:
    """Announces that a checkpoint that was begun will not be complete."""
    _checkpoint("failed", step, path)


def _checkpoint(phase: str, step: int, path: PathLike) -> None:
    _send({"type": "checkpoint", "phase": phase, "step": int(step), "path": os.fspath(path)})


@contextlib.contextmanager
def checkpoint(step: int, path: PathLike) -> Iterator[None]:
    """Announces the checkpoint that its body writes: begin, then complete, or failed where
    the body raises. The platform prefers to suspend a job right after a complete one."""
    checkpoint_begin(step, path)
    try:
        yield
    except BaseException:
        checkpoint_failed(step, path)
        raise
    checkpoint_complete(step, path)


@_quiet
def log_data(
    name: str,
    path: PathLike | None = None,
    *,
    sha256: str | None = None,
    size: int | None = None,
) -> None:
    """Records which data the training used, so that the run can be repeated.

    Without `sha256`, the file at `path` is read and hashed, or a folder's files with their
    names; on large data give the hash. `size` is in bytes.
    """
    if _agent() is None:
        return
    if path is not None and sha256 is None:
        sha256, size = _fingerprint(Path(path))
    if sha256 is None or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"data {name!r} needs a path, or a sha256 of 64 hexadecimal digits")
    if size is None and path is not None:
        size = Path(path).stat().st_size
    _send({"type": "data", "name": name, "sha256": sha256, "bytes": size})


def _fingerprint(path: Path) -> tuple[str, int]:
    if not path.is_dir():
        return _hash_file(path)
    whole, total = hashlib.sha256(), 0
    for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        digest, size = _hash_file(file)
        whole.update(f"{digest}  {file.relative_to(path).as_posix()}\n".encode())
        total += size
    return whole.hexdigest(), total


def _hash_file(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


@_quiet
def log_facts(values: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Records what describes the run: framework, device, parameters, precision."""
    _send({"type": "facts", "values": _plain({**(values or {}), **more})})


@_quiet
def log_summary(values: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Reports the final results, which the job's page shows first."""
    _send({"type": "summary", "values": _plain({**(values or {}), **more})})


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; numbers of arrays become floats, all else text."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or isinstance(value, (bool, int, float, str)):
            plain[str(name)] = value
        else:
            number = _number(value)
            plain[str(name)] = str(value) if number is None else number
    return plain


def should_stop() -> bool:
    """Whether to save a checkpoint and end, because a person or the plan wants the GPUs.

    Cheap enough for every step: it reads what has arrived and waits for nothing. Ranks may
    see it at different steps, so agree on it, for example by all-reducing it as a flag,
    before one of them leaves the collective operations.
    """
    agent = _agent()
    if agent is not None:
        _poll(agent)
    return _terminated or (agent is not None and agent.stopped)


@_quiet
def _poll(agent: Connection) -> None:
    agent.poll()


def stop_reason() -> str | None:
    """Why `should_stop()` is true, in words for a log; None where nothing is known."""
    if _connection is not None and _connection.stop_reason is not None:
        return _connection.stop_reason
    return "SIGTERM" if _terminated else None


@_quiet
def install_sigterm_handler() -> bool:
    """Makes SIGTERM turn `should_stop()` true instead of ending the process at once.

    A handler that was there is still called. Only the main thread may do this, as Python
    has it; False elsewhere.
    """
    try:
        previous = signal.getsignal(signal.SIGTERM)

        def on_sigterm(number: int, frame: Any) -> None:
            global _terminated
            _terminated = True
            if callable(previous):
                previous(number, frame)

        signal.signal(signal.SIGTERM, on_sigterm)
    except ValueError:
        return False
    return True


@_quiet
def flush(timeout: float = 1.0) -> bool:
    """Waits, at most `timeout` seconds, until the agent has everything; whether it has.

    Runs by itself at a normal exit; call it before `os._exit`.
    """
    return _connection is None or _connection.flush(timeout)


atexit.register(flush)
