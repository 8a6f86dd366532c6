"""A whole fleet on this machine: a SuperLink and SuperNodes on loopback, one run, and everything stopped again.

    with LocalFleet(folder, nodes=3) as fleet:
        for line in fleet.run(app, {"folder": "runs/first"}):
            ...

Only what was started here is stopped. Nothing listens beyond 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.config import toml
from pfedgate.deploy import FlowerMissing, need_flower
from pfedgate.deploy.children import FleetError, Process, lines, stop, sweep
from pfedgate.deploy.starter import make_keys, write_app

HOST, NAME = "127.0.0.1", "fleet"
UP = 120.0  # seconds for the SuperLink to listen, and for it to answer: it imports much, and machines are slow


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class LocalFleet:
    """A SuperLink and `nodes` SuperNodes.

    `simulate`, such as {"num-cpus": 1, "num-gpus": 0.25}, makes the nodes Ray actors with these resources instead of
    SuperNodes (Ray must be installed; no keys then). `configs` are the nodes' settings, over partition-id and
    state-dir; `states` is where their private states live.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        nodes: int = 3,
        secure: bool = True,
        simulate: Mapping[str, float] | None = None,
        configs: Sequence[Mapping[str, Any]] | None = None,
        states: str | Path | None = None,
        patience: float = UP,
    ) -> None:
        need_flower("psutil", "trustme")
        if nodes < 1:
            raise ValueError(f"a fleet has at least one node, got {nodes}")
        self.folder, self.nodes, self.patience = Path(folder).resolve(), nodes, patience
        self.simulate, self.secure = simulate, secure and simulate is None
        if simulate is not None and importlib.util.find_spec("ray") is None:
            raise FlowerMissing("simulation on Ray needs Ray: pip install 'pfedgate[simulation]'")
        places = Path(states or folder).resolve()
        self.configs = []
        for at, own in zip(range(nodes), configs or [{}] * nodes, strict=True):
            share = {} if "data-dir" in own else {"partition-id": at, "num-partitions": nodes}
            self.configs.append({**share, "state-dir": str(places / f"node-{at}"), **own})
        self.port = 0
        self.link: Process | None = None
        self.started: dict[int, Process] = {}
        self._all: list[Process] = []

    def __enter__(self) -> LocalFleet:
        try:
            self.start_link()
            for at in range(self.nodes if self.simulate is None else 0):
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
            keys = make_keys(self.folder / "keys", hosts=(HOST, "localhost"), nodes=self.nodes)
            pairs = [("ssl-ca-certfile", "ca.crt"), ("ssl-certfile", "server.crt"), ("ssl-keyfile", "server.key")]
            options = [part for option, file in pairs for part in (f"--{option}", str(keys / file))]
            options.append("--enable-supernode-auth")
        if self.simulate is not None:
            options.append("--simulation")
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

    def start_node(self, at: int, key: str | None = None) -> Process:
        """One SuperNode; `key` is the name of another private key than its own."""
        options = ["--insecure"]
        if self.secure:
            keys = self.folder / "keys"
            options = ["--root-certificates", str(keys / "ca.crt")]
            options += ["--auth-supernode-private-key", str(keys / (key or f"node-{at}"))]
        config = " ".join(f"{name}={toml.dump(value)}" for name, value in self.configs[at].items())
        self.started[at] = self._start(
            f"node-{at}", "flower-supernode", "--superlink", f"{HOST}:{self.gateway()}", *options,
            "--host", HOST, "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip
        return self.started[at]

    def gateway(self) -> int:
        """The port that nodes connect to; a subclass may put a proxy between them and the SuperLink."""
        return self.port

    def close(self) -> None:
        """Stop everything that was started here, nodes first: they tell the server that they leave."""
        stop(*(process for process in self._all if process is not self.link))
        stop(*(process for process in self._all if process is self.link))
        if self._all:
            sweep(f"FLWR_HOME={self.folder / 'home'}")
        self._all.clear()
        self.started.clear()

    def run(
        self, app: str | Path, config: Mapping[str, Any] | None = None, *, timeout: float = 3600.0
    ) -> Iterator[str]:
        """Run an app and yield its log, line by line; an error if it did not complete, or not in time."""
        settings = self.folder / "run.toml"
        text = "".join(f"{name} = {toml.dump(value)}\n" for name, value in (config or {}).items())
        settings.write_text(text, encoding="utf-8")
        options = ["--run-config", str(settings)] if text else []
        if self.simulate is not None:
            each = {f"client-resources-{name}": value for name, value in self.simulate.items()}
            resources = {"num-supernodes": self.nodes, **each}.items()
            options += ["--federation-config", " ".join(f"{name}={value:g}" for name, value in resources)]
        process = self._popen(
            [program("flwr"), "run", str(Path(app).resolve()), NAME, "--stream", *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._all.append(process)
        try:
            yield from lines(process, time.monotonic() + timeout)
        finally:
            stop(process)
            self._all.remove(process)
        status = self.status()
        if not status.startswith("finished:completed"):
            raise FleetError(f"the run is {status}, not completed: see above, and the logs in {self.folder / 'logs'}")

    def status(self) -> str:
        """The status of the last run, in Flower's words."""
        until = time.monotonic() + self.patience
        while True:
            listing = json.loads(self.flwr("ls", NAME, "--limit", "1", "--format", "json"))
            if "runs" in listing:
                return str(listing["runs"][0]["status"]) if listing["runs"] else "never started"
            # Failures come as JSON, too, and exit with 0; on a busy machine the next try succeeds.
            if time.monotonic() > until:
                raise FleetError(f"flwr ls failed: {listing.get('error-message', listing)}")
            time.sleep(1)

    def flwr(self, *words: str) -> str:
        """The output of `flwr …`; an error if it fails, or does not end in time."""
        command = [program("flwr"), *words]
        try:
            done = subprocess.run(
                command, env=self.environment(), capture_output=True, text=True, timeout=self.patience
            )
        except subprocess.TimeoutExpired:
            raise FleetError(f"flwr {' '.join(words)} did not end within {self.patience:.0f} s") from None
        if done.returncode:
            raise FleetError(f"flwr {' '.join(words)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def log(self, name: str) -> str:
        """The log of `link` or `node-0` so far."""
        return (self.folder / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def environment(self) -> dict[str, str]:
        """The environment of every process: a home of its own, no telemetry, one thread, our programs first."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray listens on the host's address
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
        }

    def _start(self, name: str, command: str, *options: str) -> Process:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = self._popen([program(command), *options], stdout=log, stderr=subprocess.STDOUT)
        self._all.append(process)
        return process

    def _popen(self, command: Sequence[str], **options: Any) -> Process:
        # A session of its own: its children are in its group, and Ctrl-C is ours to handle.
        return subprocess.Popen(
            command, env=self.environment(), stdin=subprocess.DEVNULL, start_new_session=True, **options
        )

    def _wait_for(self, port: int, process: Process) -> None:
        until = time.monotonic() + self.patience
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return
            time.sleep(0.2)
        raise FleetError(f"the SuperLink does not listen on {HOST}:{port}:\n{self.log('link')[-2000:]}")


def program(name: str) -> str:
    """A program of the environment this Python belongs to."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name


def once(
    source: str | Path | None,
    out: str | Path,
    *,
    nodes: int = 3,
    secure: bool = True,
    simulate: Mapping[str, float] | None = None,
    given: Sequence[str] = (),
    work: str | Path,
    timeout: float = 3600.0,
) -> Iterator[str]:
    """Run an app's folder or a recipe (None: the template's) on a fleet of this machine; yields the log.

    Waits for all nodes before it starts, as every one of them is here; `given` are settings over the recipe.
    """
    app = Path(source) if source is not None and Path(source).is_dir() else None
    if app is None:
        app = write_app(Path(work) / "app", source)
    states = Path(out).resolve() / "nodes"  # private states stay beside the run, so that it can go on with them
    settings = "; ".join([f"deploy.nodes={nodes}", *given])
    config = {"folder": str(Path(out).resolve()), "set": settings, "state-dir": str(states)}
    with LocalFleet(Path(work) / "fleet", nodes=nodes, secure=secure, simulate=simulate, states=states) as fleet:
        yield from fleet.run(app, config, timeout=timeout)
