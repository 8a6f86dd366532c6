"""A whole fleet on this machine: a SuperLink and SuperNodes on loopback, one run, and everything stopped again.

    with LocalFleet(folder, nodes=3) as fleet:
        for line in fleet.run(app, {"folder": "runs/first"}):
            ...

Only what was started here is stopped, by process group. Nothing listens beyond 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from pfedgate import toml
from pfedgate.deploy import certs, init, need_flower

HOST, NAME = "127.0.0.1", "fleet"
UP = 60.0  # seconds for the SuperLink to listen: it imports much, and machines are slow


class FleetError(RuntimeError):
    """A process of the fleet failed; says where its log is."""


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class LocalFleet:
    """A SuperLink and `nodes` SuperNodes.

    `configs` are the nodes' settings, over partition-id and state-dir; `states` is where their private states live.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        nodes: int = 3,
        secure: bool = True,
        configs: Sequence[Mapping[str, Any]] | None = None,
        states: str | Path | None = None,
        patience: float = UP,
    ) -> None:
        need_flower()
        if nodes < 1:
            raise ValueError(f"a fleet has at least one node, got {nodes}")
        self.folder, self.nodes, self.secure, self.patience = Path(folder).resolve(), nodes, secure, patience
        given = configs or [{}] * nodes
        places = Path(states or folder).resolve()
        shares = [{"partition-id": at, "num-partitions": nodes} for at in range(nodes)]
        self.configs = [
            {**({} if "data-dir" in own else share), "state-dir": str(places / f"node-{at}"), **own}
            for at, (share, own) in enumerate(zip(shares, given, strict=True))
        ]
        self.port = 0
        self.via = 0  # another port to reach the SuperLink by: a proxy, say
        self.link: subprocess.Popen[bytes] | None = None
        self.started: dict[int, subprocess.Popen[bytes]] = {}
        self._all: list[subprocess.Popen[bytes]] = []

    # -- life
    def __enter__(self) -> LocalFleet:
        try:
            self.start_link()
            for at in range(self.nodes):
                self.start_node(at)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def start_link(self) -> None:
        """The SuperLink, on a free port unless it had one before; its keys and its register of nodes."""
        for name in ("home", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        options = ["--insecure"]
        if self.secure:
            keys = certs.make(self.folder / "keys", hosts=(HOST, "localhost"), nodes=self.nodes)
            pairs = [("ssl-ca-certfile", "ca.crt"), ("ssl-certfile", "server.crt"), ("ssl-keyfile", "server.key")]
            options = [part for option, file in pairs for part in (f"--{option}", str(keys / file))]
            options.append("--enable-supernode-auth")
        first = not self.port
        self.port = self.port or free_port()
        self.link = self._start(
            "link", "flower-superlink", "--host", HOST, "--port", str(self.port), *options,
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "link.db"),
        )  # fmt: skip
        self._wait_for(self.port, self.link)
        trust = f"root-certificates = {toml.dump(str(self.folder / 'keys' / 'ca.crt'))}"
        address = f'[superlink.{NAME}]\naddress = "{HOST}:{self.port}"\n'
        text = address + (trust if self.secure else "insecure = true") + "\n"
        (self.folder / "home" / "config.toml").write_text(text, encoding="utf-8")
        if self.secure and first:
            for at in range(self.nodes):
                self.flwr("supernode", "register", str(self.folder / "keys" / f"node-{at}.pub"), NAME)

    def start_node(self, at: int, key: str | None = None) -> subprocess.Popen[bytes]:
        """One SuperNode; `key` is the name of another private key than its own."""
        options = ["--insecure"]
        if self.secure:
            keys = self.folder / "keys"
            options = ["--root-certificates", str(keys / "ca.crt")]
            options += ["--auth-supernode-private-key", str(keys / (key or f"node-{at}"))]
        config = " ".join(f"{name}={toml.dump(value)}" for name, value in self.configs[at].items())
        self.started[at] = self._start(
            f"node-{at}", "flower-supernode", "--superlink", f"{HOST}:{self.via or self.port}", *options,
            "--host", HOST, "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip
        return self.started[at]

    def close(self) -> None:
        """Stop everything that was started here, nodes first."""
        for process in reversed(self._all):
            stop(process)
        self._all.clear()
        self.started.clear()

    # -- use
    def run(
        self, app: str | Path, config: Mapping[str, Any] | None = None, *, timeout: float = 3600.0
    ) -> Iterator[str]:
        """Run an app and yield its log, line by line; an error if it did not complete, or not in time."""
        chosen = self.folder / "run.toml"
        lines = "".join(f"{name} = {toml.dump(value)}\n" for name, value in (config or {}).items())
        chosen.write_text(lines, encoding="utf-8")
        options = ["--run-config", str(chosen)] if lines else []
        process = self._popen(
            [program("flwr"), "run", str(Path(app).resolve()), NAME, "--stream", *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._all.append(process)
        try:
            yield from _lines(process, time.monotonic() + timeout)
        finally:
            stop(process)
            self._all.remove(process)
        status = self.status()
        if not status.startswith("finished:completed"):
            raise FleetError(f"the run is {status}, not completed: see above, and the logs in {self.folder / 'logs'}")

    def status(self) -> str:
        """Of the last run."""
        runs = json.loads(self.flwr("ls", NAME, "--limit", "1", "--format", "json"))["runs"]
        return str(runs[0]["status"]) if runs else "never started"

    def flwr(self, *words: str, timeout: float = 60.0) -> str:
        """What `flwr …` says; an error if it fails."""
        done = subprocess.run(
            [program("flwr"), *words], env=self.environment(), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise FleetError(f"flwr {' '.join(words)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def log(self, name: str) -> str:
        """What `link` or `node-0` has said so far."""
        return (self.folder / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def environment(self) -> dict[str, str]:
        """Of every process: a home of its own, no telemetry, one thread, our programs first."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
        }

    def _start(self, name: str, command: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = self._popen([program(command), *options], stdout=log, stderr=subprocess.STDOUT)
        self._all.append(process)
        return process

    def _popen(self, command: Sequence[str], **given: Any) -> subprocess.Popen[bytes]:
        # A session of its own: its children are in its group, and Ctrl-C is ours to handle.
        return subprocess.Popen(
            command, env=self.environment(), stdin=subprocess.DEVNULL, start_new_session=True, **given
        )

    def _wait_for(self, port: int, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + self.patience
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return
            time.sleep(0.2)
        raise FleetError(f"the SuperLink does not listen on {HOST}:{port}:\n{self.log('link')[-2000:]}")


def program(name: str) -> str:
    """A program of the environment this Python belongs to."""
    found = Path(sys.executable).parent / name
    return str(found) if found.exists() else name


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process and its group: asked first, then made to."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):  # children may outlive their parent
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """As if the machine had lost power: the process and its group at once, unasked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(process: subprocess.Popen[bytes], until: float) -> Iterator[str]:
    """Lines of a process as they come, but no longer than `until`: reading alone could wait for ever."""
    queue: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under our hands
            for raw in process.stdout:
                queue.put(re.sub(r"\x1b\[[0-9;]*m", "", raw.decode(errors="replace")).rstrip())
        queue.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = queue.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise FleetError("the run did not end in time") from None
        if line is None:
            return
        yield line


def once(
    source: str | Path | None,
    out: str | Path,
    *,
    nodes: int = 3,
    secure: bool = True,
    given: Sequence[str] = (),
    work: str | Path,
    timeout: float = 3600.0,
) -> Iterator[str]:
    """Run an app's folder or a recipe (None: the template's) on a fleet of this machine; yields the log.

    Waits for all nodes before it starts, as every one of them is here; `given` are settings over the recipe.
    """
    app = Path(source) if source is not None and Path(source).is_dir() else None
    if app is None:
        app = init.write(Path(work) / "app", source)
    settled = "; ".join([f"deploy.nodes={nodes}", *given])
    # Private states stay beside the run, so that it can go on with them.
    with LocalFleet(Path(work) / "fleet", nodes=nodes, secure=secure, states=Path(out) / "nodes") as fleet:
        yield from fleet.run(app, {"folder": str(Path(out).resolve()), "set": settled}, timeout=timeout)
