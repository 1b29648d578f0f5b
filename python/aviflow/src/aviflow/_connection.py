"""The connection to the agent of this worker.

A training must not notice that it is watched, so nothing in here waits: the socket never
blocks, what cannot be sent now is queued, the queues are bounded and lose their oldest
entries, and an agent that went away is tried again at most once a second.

Invariants: a line goes out whole or, after a reconnection, again from its start; lines go
out in the order in which they were given; a stop once seen is never forgotten.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Any, Callable

MAX_LINE = 64 * 1024
"""The longest line of the protocol in bytes, its newline included."""

RECONNECT_SECONDS = 1.0
METRICS_KEPT = 1024
"""How many lines of metrics wait for a slow agent before the oldest is dropped."""
EVENTS_KEPT = 256
"""The same for the rare lines: checkpoints, data, facts, summary."""
READS_A_CALL = 16
"""Bounds the work of one call, should an agent ever send without end."""

Entry = tuple[int, bytes]


def encode(message: dict[str, Any]) -> bytes:
    """One line of the protocol. Raises ValueError where it would be too long.

    JSON has no NaN and no infinity: they travel as the strings "NaN", "Infinity" and
    "-Infinity". A float is written with all the digits that identify it.
    """
    line = json.dumps(_finite(message), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(
            f"a {message.get('type')} message of {len(line)} bytes was dropped: a message holds "
            f"{MAX_LINE}; log fewer or shorter values"
        )
    return line


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


class Connection:
    def __init__(self, path: str, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._rank = rank
        self._clock = clock
        self._ids = itertools.count(1)
        self._order = itertools.count()
        self._metrics: deque[Entry] = deque(maxlen=METRICS_KEPT)
        self._events: deque[Entry] = deque(maxlen=EVENTS_KEPT)
        # Whoever holds the lock does the sending. Nobody waits for it: neither a thread
        # that writes checkpoints nor a signal handler that interrupted a send.
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._retry_at = -math.inf
        self._line = b""
        self._sent = 0
        self._received = b""
        self.stop_reason: str | None = None
        self.stopped = False

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message and sends what can be sent now."""
        line = encode(message)
        queue = self._metrics if message["type"] in ("metrics", "collective") else self._events
        queue.append((next(self._order), line))
        self._with_lock(self._pump)

    def poll(self) -> None:
        """Reads what the agent sent, and sends what still waits."""
        self._with_lock(self._poll)

    def flush(self, timeout: float) -> bool:
        """Waits until everything is with the agent, for `timeout` seconds at the most."""
        deadline = self._clock() + timeout
        while True:
            self.poll()
            left = deadline - self._clock()
            if not (self._line or self._metrics or self._events):
                return True
            if self._socket is None or left <= 0:
                return False
            try:
                select.select([], [self._socket], [], left)
            except (OSError, ValueError):
                return False

    def close(self) -> None:
        self._disconnect()

    def _with_lock(self, work: Callable[[], None]) -> None:
        if self._lock.acquire(blocking=False):
            try:
                work()
            finally:
                self._lock.release()

    def _poll(self) -> None:
        self._pump()
        self._read()

    def _connected(self) -> bool:
        if self._socket is not None:
            return True
        now = self._clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + RECONNECT_SECONDS
        # The question covers a stop that was pushed while there was no connection.
        greeting = encode({"type": "hello", "pid": os.getpid(), "rank": self._rank}) + encode(
            {"type": "stop?", "id": next(self._ids)}
        )
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.setblocking(False)
            opened.connect(self._path)
            # The empty buffer of a new socket takes these few bytes at once.
            if opened.send(greeting) != len(greeting):
                raise BlockingIOError
        except OSError:
            opened.close()
            return False
        self._socket = opened
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._sent = 0
        self._received = b""

    def _next_line(self) -> bytes:
        """The oldest line of both queues. They are two so that a flood of metrics
        displaces no checkpoint."""
        first = [queue for queue in (self._metrics, self._events) if queue]
        if not first:
            return b""
        return min(first, key=lambda queue: queue[0][0]).popleft()[1]

    def _pump(self) -> None:
        if not self._connected():
            return
        while self._socket is not None:
            if not self._line:
                self._line = self._next_line()
                if not self._line:
                    return
            try:
                self._sent += self._socket.send(self._line[self._sent :])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._disconnect()
                return
            if self._sent == len(self._line):
                self._line, self._sent = b"", 0

    def _read(self) -> None:
        for _ in range(READS_A_CALL):
            if self._socket is None:
                return
            try:
                chunk = self._socket.recv(4096)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._disconnect()
                return
            *lines, self._received = (self._received + chunk).split(b"\n")
            for line in lines:
                self._understand(line)
            if len(self._received) > MAX_LINE:
                self._received = b""

    def _understand(self, line: bytes) -> None:
        """Takes a stop from a line; anything else is of a newer agent, and ignored."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        if isinstance(message, dict) and message.get("stop") is True:
            reason = message.get("reason")
            self.stop_reason = reason if isinstance(reason, str) else self.stop_reason
            self.stopped = True
