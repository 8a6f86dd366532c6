"""Running the cases and digesting what they learn, with the same bits on any x86-64 machine.

Bits depend on vector instructions (of ATen, MKL, oneDNN, numpy, its BLAS and libm) and on the number of threads. The
environment `PINNED` takes the plainest of each, and `plain` does without oneDNN, whose blocking also depends on the
sizes of caches, without NNPACK, which would take its place, and without MKL's square root: that begins with the
processor's own estimate, another one from every maker. Versions of torch, numpy and libm still count.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# All that is used of the library, in one place.
import pfedgate
from pfedgate import algorithms, models
from pfedgate.data import from_arrays

__all__ = ["MODULES", "PINNED", "Case", "Digests", "algorithms", "digest", "digest_of", "gating", "interrupt",
           "pinned", "reproducibly", "resume", "versions"]  # fmt: skip

Case = dict[str, Any]  # settings of a recipe: "section.key": value
Digests = dict[str, Any]  # {"server": …, "private": {client: …}, "scores": …}

# numpy warns of names it does not know unless they are hidden; none of these is an error where it does not exist.
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F,-AVX512VL,-AVX2_Usable,-FMA_Usable",
    "CUDA_VISIBLE_DEVICES": "",
}
RIVALS = ("DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "NPY_ENABLE_CPU_FEATURES")


def pinned() -> dict[str, str]:
    """The environment of a child that runs the same pfedgate as this process."""
    inherited = {name: value for name, value in os.environ.items() if name not in RIVALS}
    return {**inherited, **PINNED, "PYTHONPATH": str(Path(str(pfedgate.__file__)).parents[1])}


@contextmanager
def reproducibly() -> Iterator[None]:
    """One thread, oneDNN, NNPACK and MKL's root left out; no warnings (some cases leave a gate little to choose)."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    torch.backends.nnpack.set_flags(False)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(), torch.library._scoped_library("aten", "IMPL") as aten:
        warnings.simplefilter("ignore")
        aten.impl("sqrt", _root, "CPU")
        aten.impl("sqrt_", lambda x: x.copy_(_root(x)), "CPU")
        aten.impl("sqrt.out", lambda x, *, out: out.resize_(x.shape).copy_(_root(x)), "CPU")
        yield


def _root(x: Tensor) -> Tensor:
    """Correctly rounded, so the same everywhere. Integers become float32, as in torch."""
    numbers = x.detach().numpy() if x.is_floating_point() else x.numpy().astype(np.float32)
    return torch.from_numpy(np.asarray(np.sqrt(numbers)))


def versions() -> dict[str, str]:
    """What else the bits depend on."""
    libc = " ".join(platform.libc_ver())
    return {"torch": torch.__version__.partition("+")[0], "numpy": np.__version__, "libc": libc}


def digest(state: Mapping[str, Any]) -> str:
    """Sixteen digits of the SHA-256 of names, types, shapes and bytes, in the order of the names."""
    running = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        running.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return running.hexdigest()[:16]


def digest_of(case: Case) -> Digests:
    """Run a recipe."""
    if case["data"] != "digits":  # tokens are made here: no data set that is always there has any
        settings = {name: value for name, value in case.items() if not name.startswith("data")}
        return _learnt(pfedgate.run(settings, data=_tokens()))
    return _learnt(pfedgate.run(case))


def resume(folder: Path) -> Digests:
    """Go on with a copy of an old run."""
    with tempfile.TemporaryDirectory() as place:
        return _learnt(pfedgate.resume(shutil.copytree(folder, Path(place) / "run")))


def interrupt(case: Case, folder: Path, after: int) -> None:
    """Run a recipe in a folder, up to a round."""

    class Enough(Exception):
        pass

    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == after:
            raise Enough

    shutil.rmtree(folder, ignore_errors=True)
    try:
        pfedgate.run(case, out=folder, callbacks=[stop])
    except Enough:
        (folder / ".lock").unlink(missing_ok=True)


def _learnt(result: Any) -> Digests:
    """The server's State, every client's private one, and what clients score, novel ones too."""
    scores = {
        f"{s.client} {s.point} {name}": np.array([part.n, part.accuracy, part.loss], dtype=np.float64)
        for scored in (result.scores, result.novel)
        for s in scored
        for name, part in (("test", s.test), ("val", s.val))
    }
    private = {client: digest(result.store.get(client)) for client in result.store.clients()}
    return {"server": digest(result.server), "private": private, "scores": digest(scores)}


def _tokens() -> Any:
    """Sequences of 12 tokens of 40; clients prefer different ones."""
    random = np.random.default_rng(3)
    owners, y = np.repeat(np.arange(3), 40), random.integers(0, 4, 120)
    x = (random.integers(0, 16, (120, 12)) + 6 * y[:, None] + 3 * owners[:, None]) % 40
    return from_arrays(x, y, owners=[f"client {owner}" for owner in owners], seed=3)


def _convolutions() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, bias=False), nn.GroupNorm(4, 24), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5),
    ), torch.randn(8, 3, 8, 8)  # fmt: skip


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (models.build("mlp", (20,), 5, hidden=[40, 30]), torch.randn(8, 20)),
    "convolutions": _convolutions,
    "resnet": lambda: (models.build("resnet", (3, 8, 8), 5, width=0.5), torch.randn(8, 3, 8, 8)),
    "vit": lambda: (
        models.build("vit", (3, 8, 8), 5, dim=16, ffn=32, depth=1, pooling="cls"), torch.randn(8, 3, 8, 8)
    ),
    "gru": lambda: (models.build("text_gru", (9,), 5, vocabulary=30, dim=12, hidden=20), torch.randint(30, (8, 9))),
}  # fmt: skip


def gating(module: str, options: Mapping[str, Any], optimiser: str) -> Digests:
    """Three steps of an optimiser: the module, the gate, and what was selected in each step and given at the end."""
    torch.manual_seed(11)
    model, x = MODULES[module]()
    gated = pfedgate.gate(model, x, generator=torch.Generator().manual_seed(5), **options)
    stepper = gated.optimizer(optimiser, lr=0.02, gate_lr=0.1)
    chosen: dict[str, Any] = {}
    for step in range(3):
        stepper.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(gated(x.roll(step, 1)), torch.arange(8) % 5))
        stepper.step()
        assert gated.last is not None
        chosen |= {f"{step} kept": gated.last.kept, f"{step} weights": gated.last.weights}
    with torch.no_grad():
        chosen["output"] = gated.eval()(x)
    return {
        "model": digest(gated.model.state_dict()),
        "gate": digest(gated.gate.state_dict()),
        "chosen": digest(chosen),
    }
