"""Lets every Python of a job tell its stacks, for `aviflow stacks` and for who looks why a training hangs.

Python imports this before a program, from the folder of the hooks on `PYTHONPATH`. It registers `faulthandler`,
which then writes the stack of the main thread into a file on a signal: in C, without the interpreter's lock, so also
where the process hangs. The agent reads the file from outside, and signals only processes that have it open; see
`stacks` in crates/aviflow-agent. A training never fails because of what happens here.

It also lets `jax.distributed.initialize()` find its place without arguments: of what the agent sets, JAX reads the
coordinator's address by itself, and knows the number of processes only from clusters that it has a class for.

Another `sitecustomize` that this one hides, of an image for example, is run as it would have been.
"""

import os
import sys


def _file(name: str) -> int:
    """A file of this process alone of which nothing is left on disk, always written at its end."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    try:
        memory = os.memfd_create(name)
    except (AttributeError, OSError):
        # Of builds for systems without it, such as conda's: a file that is removed at once.
        folder = os.environ.get("TMPDIR") or "/tmp"
        path = os.path.join(folder, "%s-%s" % (name, os.urandom(4).hex()))
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        return file
    try:
        return os.open("/proc/self/fd/%d" % memory, flags)
    finally:
        os.close(memory)


def _which(file: int) -> "tuple[int, int, int]":
    """A descriptor, and what it leads to: programs close what they do not know, and get its number for their own."""
    found = os.fstat(file)
    return (file, found.st_dev, found.st_ino)


def _register() -> None:
    import _thread
    import faulthandler

    global _open
    # What was inherited by a fork is the parent's.
    before, _open = _open, None
    try:
        file = _file("aviflow-stacks-%d-%x" % (os.getpid(), _thread.get_ident()))
        # The main thread alone: to walk the frames of threads that run meanwhile may crash (cpython#116008).
        faulthandler.register(_SIGNAL, file=file, all_threads=False)
        _open = _which(file)
    except Exception:
        if before is not None:
            faulthandler.unregister(_SIGNAL)
    if before is not None:
        try:
            ours = _which(before[0]) == before
        except OSError:
            return
        if ours:
            os.close(before[0])


class _Jax:
    """Waits for JAX to import the clusters that it knows, and puts this one before them."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "jax._src.clusters":
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                try:
                    _join(module.ClusterEnv)
                except Exception:
                    pass

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _join(cluster) -> None:  # type: ignore[no-untyped-def]
    class Aviflow(cluster):  # type: ignore[misc]
        name = "aviflow"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(cls, *_: object, **__: object) -> str:
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["JAX_PROCESS_ID"])

    # A class adds itself at the end, and the first that is present counts.
    cluster._cluster_types.remove(Aviflow)
    cluster._cluster_types.insert(0, Aviflow)


def _next() -> None:
    """Runs the `sitecustomize` that comes after this one on the path."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec(__name__, [p for p in sys.path if os.path.abspath(p or ".") != here])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules[__name__] = module
    # What it raises is told as if it had been found first.
    spec.loader.exec_module(module)


_SIGNAL = 58
_open = None  # type: tuple[int, int, int] | None
if sys.platform == "linux" and "AVIFLOW_SOCKET" in os.environ:
    try:
        _register()
        os.register_at_fork(after_in_child=_register)
    except Exception:
        pass
if all(name in os.environ for name in ("AVIFLOW_SOCKET", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")):
    sys.meta_path.insert(0, _Jax())
_next()
