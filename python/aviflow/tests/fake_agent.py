"""An agent that a test drives by hand, in the same thread."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from typing import Any


PATIENCE = 60
"""Seconds until a test that would hang fails instead."""


class FakeAgent:
    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.path = os.path.join(self.folder, "agent.sock")
        self.listener: socket.socket | None = None
        self.peer: socket.socket | None = None
        self.start()

    def start(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(PATIENCE)

    def accept(self) -> None:
        assert self.listener is not None
        if self.peer is not None:
            self.peer.close()
        self.peer = self.listener.accept()[0]
        self.peer.setblocking(False)

    def push(self, text: str) -> None:
        assert self.peer is not None
        self.peer.sendall(text.encode())

    def arrived(self) -> bytes:
        """Everything that can be read now; a Unix socket delivers at once."""
        assert self.peer is not None
        data = b""
        while True:
            try:
                chunk = self.peer.recv(1 << 16)
            except BlockingIOError:
                return data
            if not chunk:
                return data
            data += chunk

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.arrived().splitlines()]

    def until_the_end(self) -> list[dict[str, Any]]:
        """All messages of a process that is still at it, until it closes its end."""
        assert self.peer is not None
        self.peer.settimeout(PATIENCE)
        with self.peer.makefile("rb") as lines:
            return [json.loads(line) for line in lines]

    def die(self) -> None:
        for open_socket in (self.peer, self.listener):
            if open_socket is not None:
                open_socket.close()
        self.peer = self.listener = None
        if os.path.exists(self.path):
            os.unlink(self.path)

    def clean(self) -> None:
        self.die()
        shutil.rmtree(self.folder)
