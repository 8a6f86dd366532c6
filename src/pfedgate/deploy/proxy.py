"""A TCP proxy on loopback, between nodes and a server of this machine: counts what passes, and keeps it if asked to.

For measuring traffic and for looking into it (of a fleet without TLS); nothing of a deployment needs it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Proxy:
    """Listens on `port` and hands on to `target`; `up` is what clients sent, `down` what they got, in bytes."""

    def __init__(self, target: int, *, keep: bool = False) -> None:
        self.target, self.keep = target, keep
        self.up = self.down = 0
        self.kept: list[bytearray] = []  # one for each direction of each connection
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._lock = threading.Lock()
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=10)
        except OSError:
            client.close()
            return
        sides = {client: (server, bytearray()), server: (client, bytearray())}
        with self._lock:
            self.kept += [kept for _, kept in sides.values()]
        with client, server, selectors.DefaultSelector() as ready:
            for side in sides:
                ready.register(side, selectors.EVENT_READ)
            while self._open:
                for key, _ in ready.select(timeout=1):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    other, kept = sides[source]
                    try:
                        data = source.recv(1 << 16)
                        other.sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    with self._lock:
                        self.up += len(data) if source is client else 0
                        self.down += len(data) if source is server else 0
                        if self.keep:
                            kept += data

    def close(self) -> None:
        """Stop listening and let connections go."""
        self._open = False
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
