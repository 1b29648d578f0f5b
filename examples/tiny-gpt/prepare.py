"""Makes the corpus: the source of Python's own standard library, without its tests.

Every Python has it, so nothing is downloaded. The same Python version gives the same
bytes; the file is named by their hash.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import aviflow

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def sources(root: Path) -> list[Path]:
    """The *.py files below `root`, in the order of the hash of their names: so the end of
    the text, which is held out, is a fair sample of files and not the letter Z."""
    files = (
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    )
    return sorted(files, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def prepare(folder: Path, root: Path = Path(sysconfig.get_path("stdlib"))) -> Path:
    """The corpus file in `folder`, made by whichever process comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / f"corpus-python-{platform.python_version()}.json"
    with (folder / ".corpus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if index.exists():
            known = folder / json.loads(index.read_text())["file"]
            if known.exists():
                return known
        text = b"\n".join((root / path).read_bytes() for path in sources(root))
        digest = hashlib.sha256(text).hexdigest()
        corpus = folder / f"corpus-{digest[:16]}.bin"
        with aviflow.atomic_write(corpus) as file:
            file.write(text)
        facts = {
            "file": corpus.name,
            "sha256": digest,
            "bytes": len(text),
            "python": platform.python_version(),
        }
        with aviflow.atomic_write(index, "w") as file:
            json.dump(facts, file, indent=2)
        return corpus


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=aviflow.cache_dir(), help="folder")
    print(prepare(parser.parse_args().into))
