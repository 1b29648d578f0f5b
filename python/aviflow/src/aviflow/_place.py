"""What the platform tells a process through its environment variables."""

from __future__ import annotations

import os
import re
from pathlib import Path


def job_name() -> str | None:
    """The job's name, or None outside the platform."""
    return os.environ.get("AVIFLOW_JOB") or None


def attempt() -> int:
    """Which run of the job this is, counted from 1; 1 outside the platform too."""
    return _integer("AVIFLOW_ATTEMPT") or 1


def seed() -> int | None:
    """The `seed` of the job's document, or None where it has none."""
    return _integer("AVIFLOW_SEED")


def rank() -> int:
    """This process among all of the job, counted from 0; 0 where nothing says so."""
    for name in ("AVIFLOW_RANK", "RANK", "JAX_PROCESS_ID"):
        value = _integer(name)
        if value is not None:
            return value
    return 0


def checkpoint_dir() -> Path | None:
    """Where checkpoints belong so that the next attempt finds them; None elsewhere."""
    return _path("AVIFLOW_CHECKPOINT_DIR")


def output_dir() -> Path | None:
    """Where results belong that are to be kept; None outside the platform."""
    return _path("AVIFLOW_OUTPUT_DIR")


def data_dir(name: str) -> Path | None:
    """Where the job's `data` of that name is, a file or a folder; None if it has none."""
    return _path("AVIFLOW_DATA_" + re.sub(r"[^A-Z0-9]", "_", name.upper()))


def cache_dir() -> Path:
    """A folder for what can be made again; shared by jobs, so write atomically."""
    return _path("AVIFLOW_CACHE_DIR") or Path.home() / ".cache" / "aviflow"


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _integer(variable: str) -> int | None:
    """None where a variable is missing or no number: hooks never end a training."""
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None
