"""`deploy init`, `deploy local` and `deploy certs`: the same recipes on many machines, over Flower."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from pfedgate.cli.base import Debug, Settings, app, command, err, say

group = typer.Typer(help="Run recipes on many machines, over Flower.", no_args_is_help=True)
app.add_typer(group, name="deploy")


@group.command("init")
@command
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    recipe: Annotated[Path | None, typer.Option("--recipe", help="The recipe to run; else pFedGate on digits.")] = None,
    debug: Debug = False,
) -> None:
    """Write a small app that `flwr run` accepts: pyproject, recipe, server, client, README."""
    from pfedgate.deploy.starter import write_app

    place = write_app(folder, recipe)
    say(f"written to {place}: try it with `pfedgate deploy local {place}`")


@group.command("certs")
@command
def certs(
    folder: Annotated[Path, typer.Argument(help="Where to write; existing files are kept.")],
    host: Annotated[list[str] | None, typer.Option("--host", help="Name or address of the server. Repeat it.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="Key pairs for so many nodes.")] = 3,
    days: Annotated[int, typer.Option("--days", help="How long the server's certificate is valid.")] = 365,
    debug: Debug = False,
) -> None:
    """Make a certificate authority, the server's certificate and a key pair for every node."""
    from pfedgate.deploy.starter import make_keys

    place = make_keys(folder, hosts=host or ("127.0.0.1", "localhost"), nodes=nodes, days=days)
    files = ", ".join(sorted(path.name for path in place.iterdir()))
    say(f"{place}: {files}. ca.key and private keys are secrets.")


@group.command("local")
@command
def local(
    source: Annotated[
        Path | None, typer.Argument(metavar="[APP|RECIPE]", help="An app's folder or a recipe; else the template's.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="SuperNodes to start.")] = 3,
    set: Settings = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run; an unfinished one goes on.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Flower's simulation on Ray instead of SuperNodes.")] = False,
    cpus: Annotated[float, typer.Option("--cpus", help="With --ray: CPUs for each client at work.")] = 1.0,
    gpus: Annotated[float, typer.Option("--gpus", help="With --ray: share of a GPU for each client at work.")] = 0.0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds the run may take.")] = 3600.0,
    debug: Debug = False,
) -> None:
    """Start a server and nodes on this machine, run, show what they say, and stop everything again."""
    from pfedgate.deploy import need_flower

    need_flower("psutil", "trustme")
    from pfedgate.deploy import local as fleet
    from pfedgate.runs import folder as runfolder

    simulate = {"num-cpus": cpus, "num-gpus": gpus} if ray else None
    place = folder or runfolder.free("runs", "deployed")
    with tempfile.TemporaryDirectory(prefix="pfedgate-fleet-") as work:
        lines = fleet.once(
            source, place, nodes=nodes, secure=not insecure, simulate=simulate, given=set or (), work=work,
            timeout=timeout,
        )  # fmt: skip
        with closing(lines):  # type: ignore[type-var]
            for line in lines:
                say(line, err())
    run = runfolder.load(place)
    score = run.summary.get(run.metric.name)
    words = "" if score is None else f", {run.metric.name} {score:.4f}"
    say(f"{place}: {run.summary.get('rounds', 0)} rounds{words}")
