"""Files and folders that are there whole or not at all.

A process may be killed at any instruction, and a machine may lose its power. Writing under
the final name leaves half a checkpoint behind; renaming without fsync leaves an empty one.
So: write beside the target, fsync what was written, rename, fsync the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import IO, Any, Union
from collections.abc import Iterator

PathLike = Union[str, "os.PathLike[str]"]
_PARTIAL = ".partial-"


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that appears under `path` complete and on disk, or not at all.

    It replaces a file of that name in one step, so that readers see the old one or the
    new one. `mode` is "wb" or "w" (UTF-8). Where the body raises, the target is untouched.
    """
    if mode not in ("wb", "w"):
        raise ValueError(f'mode is "wb" or "w", not {mode!r}: a file is always written anew')
    target = Path(path)
    partial = _partial_name(target)
    # Not tempfile: its files are readable by their owner alone, whatever the umask says.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(target.parent)


@contextlib.contextmanager
def atomic_dir(path: PathLike) -> Iterator[Path]:
    """A folder that appears under `path` with all its files on disk, or not at all.

    The body writes into the folder that it is given. A folder that is there already is not
    replaced, since no portable call does that in one step: name folders by their step.
    Raises FileExistsError before the body runs in that case.
    """
    target = Path(path)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(
            f"{target} exists and is not replaced, since that cannot be done in one step; "
            "use a new name, such as one with the step in it, or remove it first"
        )
    partial = _partial_name(target)
    partial.mkdir()
    try:
        yield partial
        for folder, _, files in os.walk(partial, topdown=False):
            for name in files:
                _sync(os.path.join(folder, name))
            _sync_folder(folder)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def remove_partials(folder: PathLike) -> int:
    """Removes what killed writers left in `folder`; returns how many there were.

    Only for the one process that writes there, and before it writes: half-written
    checkpoints of a job that is killed again and again would fill the disk.
    """
    removed = 0
    for entry in Path(folder).glob(f".*{_PARTIAL}*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                entry.unlink()
        removed += 1
    return removed


def _partial_name(target: Path) -> Path:
    """In the same folder, since a rename does not cross file systems."""
    return target.with_name(f".{target.name}{_PARTIAL}{secrets.token_hex(4)}")


def _sync(path: PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: PathLike) -> None:
    # Some network file systems refuse fsync on folders; the files themselves are synced.
    with contextlib.suppress(OSError):
        _sync(path)
