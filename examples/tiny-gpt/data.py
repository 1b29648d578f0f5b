"""The text, its held-out part, and which windows of it a step sees.

The text is one array of bytes. Its last part is held out and no training window reaches
into it; a tail shares at most the one document at the boundary with the training part,
where scattered blocks would share many.

A window is named by (seed, step, index in the batch) and nothing else. So a resumed run
sees what the interrupted one would have seen, whatever the number of processes.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT = 0.05
_NAME = re.compile(r"corpus-([0-9a-f]{16})\.bin")


@dataclass(frozen=True)
class Corpus:
    text: np.ndarray  # uint8
    sha256: str

    @property
    def train(self) -> np.ndarray:
        return self.text[: self._boundary]

    @property
    def held_out(self) -> np.ndarray:
        return self.text[self._boundary :]

    @property
    def _boundary(self) -> int:
        return len(self.text) - int(len(self.text) * HELD_OUT)


def load(path: Path) -> Corpus:
    """Reads a corpus file, or the one of a folder, and checks it against the hash in its name."""
    if path.is_dir():
        found = sorted(entry for entry in path.iterdir() if _NAME.fullmatch(entry.name))
        if len(found) != 1:
            raise SystemExit(
                f"{path} holds {len(found)} files named corpus-<hash>.bin, and one is needed; "
                "name the file with --corpus"
            )
        path = found[0]
    if not path.is_file():
        raise SystemExit(f"there is no corpus {path}; make one with `python prepare.py`")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    named = _NAME.fullmatch(path.name)
    if named and named[1] != digest[:16]:
        raise SystemExit(
            f"{path} is damaged: its bytes have the hash {digest[:16]}; remove it and run "
            "`python prepare.py` again, or fetch it anew"
        )
    return Corpus(np.frombuffer(content, np.uint8), digest)


@dataclass(frozen=True)
class Sampler:
    """Goes through the windows of `text` in a new order each epoch, each once.

    Windows hold context + 1 bytes and lie side by side, so that every byte is a target
    once an epoch; where the first begins differs from epoch to epoch.
    """

    text: np.ndarray
    context: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < self.batch:
            raise SystemExit(
                f"the corpus is too small: {len(self.text)} bytes for training hold "
                f"{max(self.windows, 0)} windows, and a batch needs {self.batch}"
            )

    @property
    def windows(self) -> int:
        """How many an epoch has, wherever it begins."""
        return (len(self.text) - self.context) // self.context

    def start(self, step: int, index: int) -> int:
        """Where the window `index` of the batch of `step` (from 1) begins."""
        epoch, place = divmod((step - 1) * self.batch + index, self.windows)
        offset, order = _epoch(self.seed, epoch, self.windows, self.context)
        return int(order[place]) * self.context + offset

    def windows_of(self, step: int, indices: range) -> np.ndarray:
        """The windows of a part of the batch, (len(indices), context + 1) as int32."""
        return take(self.text, [self.start(step, index) for index in indices], self.context)


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, context: int) -> tuple[int, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return int(rng.integers(context)), rng.permutation(windows)


def take(text: np.ndarray, starts: list[int], context: int) -> np.ndarray:
    positions = np.asarray(starts)[:, None] + np.arange(context + 1)
    return text[positions].astype(np.int32)


def validation_starts(text: np.ndarray, context: int, count: int) -> list[int]:
    """Evenly spaced windows, which overlap nowhere; fewer where the text is short."""
    count = min(count, (len(text) - 1) // context)
    if count == 0:
        raise SystemExit(f"the held-out part of {len(text)} bytes is shorter than one window")
    return [i * (len(text) - 1 - context) // max(count - 1, 1) for i in range(count)]


def bigram_counts(text: np.ndarray) -> np.ndarray:
    """(256, 256): how often the second byte follows the first."""
    pairs = text[:-1].astype(np.int32) * 256 + text[1:]
    return np.bincount(pairs, minlength=256 * 256).reshape(256, 256).astype(np.float64)


def bigram_entropy(text: np.ndarray) -> float:
    """H(next byte | byte) in nats of the text's own bigram frequencies, without smoothing.

    No model that sees one byte of context can have a lower mean loss on this very text.
    """
    counts = bigram_counts(text)
    before = counts.sum(axis=1, keepdims=True)
    seen = counts > 0
    probabilities = np.divide(counts, before, where=seen, out=np.ones_like(counts))
    return float(-(counts * np.log(probabilities)).sum() / counts.sum())


def bigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Mean loss in nats on `held_out` of the bigram model of `train`, smoothed by adding one."""
    counts = bigram_counts(train) + 1.0
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    test = bigram_counts(held_out)
    return float(-(test * np.log(probabilities)).sum() / test.sum())
