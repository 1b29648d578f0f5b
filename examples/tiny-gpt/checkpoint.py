"""Checkpoints: one file each, whole or absent, with a checksum in its name.

    step-00000050-8f14e45fceea167a.npz

holds everything that decides what comes next: the weights and both moments as flat
vectors, and the run's settings. A run with the same settings goes on from it to the bit.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aviflow

_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{16})\.npz")


@dataclass(frozen=True)
class State:
    step: int  # steps done
    weights: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray


def save(folder: Path, state: State, settings: dict[str, Any], keep: int) -> Path:
    """Writes a checkpoint, announces it, and removes all but the newest `keep`."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        weights=state.weights,
        first_moment=state.first_moment,
        second_moment=state.second_moment,
        settings=np.array(json.dumps(settings, sort_keys=True)),
    )
    content = buffer.getvalue()
    path = folder / f"step-{state.step:08d}-{hashlib.sha256(content).hexdigest()[:16]}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    with aviflow.checkpoint(state.step, path), aviflow.atomic_write(path) as file:
        file.write(content)
    for _, old in found(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files, the newest first. Half-written files have other names."""
    entries = folder.iterdir() if folder.is_dir() else ()
    named = [(match, path) for path in entries if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in named), reverse=True)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is undamaged; warns about each one that is not."""
    for _, path in found(folder):
        if _content(path) is not None:
            return path
        print(f"warning: {path} is damaged and left out; an older one is tried", file=sys.stderr)
    return None


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no checkpoint: its name holds no step and checksum")
    return int(match[1])


def load(folder: Path, step: int, settings: dict[str, Any]) -> State:
    """The checkpoint of that step; ends the run where it is of a run with other settings."""
    content = next((c for s, path in found(folder) if s == step and (c := _content(path))), None)
    if content is None:
        raise SystemExit(
            f"{folder} has no undamaged checkpoint of step {step} here, and rank 0 found one: "
            "give all ranks the same folder for checkpoints"
        )
    with np.load(io.BytesIO(content)) as arrays:
        saved = json.loads(str(arrays["settings"]))
        changed = [
            f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted(saved.keys() | settings.keys())
            if saved.get(name) != settings.get(name)
        ]
        if changed:
            raise SystemExit(
                f"{folder} is of a run with other settings: {'; '.join(changed)}. "
                "Use those settings again, or an empty folder for checkpoints"
            )
        return State(step, arrays["weights"], arrays["first_moment"], arrays["second_moment"])


def _content(path: Path) -> bytes | None:
    match = _NAME.fullmatch(path.name)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    whole = match is not None and hashlib.sha256(content).hexdigest()[:16] == match[2]
    return content if whole else None
