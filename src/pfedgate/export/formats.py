"""Files of a plain module for other runtimes, and what a device has to know to use one.

save(module, example, "client.onnx", facts=facts(...))     .pt2, .onnx or .pte; facts go into the file
quantise("client.onnx", "small.onnx")                      weights of 8 bits
InFile("small.onnx")                                       an ONNX file as a module, so that it can be scored
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfedgate.core.errors import unknown
from pfedgate.data.pool import Normalise

FACTS = "facts.json"  # what the facts are called in a pt2 file
# What writing a format takes beside torch: packages, and what installs them.
NEEDS = {
    "pt2": ((), ""),
    "onnx": (("onnx", "onnxscript"), "pip install 'pfedgate[export]'"),
    "pte": (("executorch",), "pip install 'pfedgate[executorch]'"),
}
FORMATS = tuple(NEEDS)


def format_of(path: str | Path, wanted: str | None = None) -> str:
    """The format that is wanted, or that a file's name says.

    >>> format_of("model.onnx"), format_of("model.bin", "pt2")
    ('onnx', 'pt2')
    """
    name = wanted or Path(path).suffix.removeprefix(".")
    if not name:
        raise ValueError(f"which format? {path} has no ending: give it one of .{', .'.join(FORMATS)}, or --format")
    if name not in FORMATS:
        raise ValueError(unknown("format", name, FORMATS))
    return name


def need(format: str) -> None:
    """Fail with what to install, if something that writing a format takes is not there."""
    packages, remedy = NEEDS[format]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{format} files need {' and '.join(missing)}: {remedy}")


def facts(
    prepare: Callable[[Tensor], Tensor],
    raw: torch.dtype,
    *,
    classes: Sequence[str] = (),
    licence: str = "",
    **more: str,
) -> dict[str, str]:
    """What a device has to know, as texts; `preprocessing` and `classes` are JSON.

    `prepare` makes what the module takes of samples of type `raw`. Where it is the usual normalisation, the numbers
    are given: (x · scale − mean) / std for each channel. Of any other function there is the name.

    >>> known = facts(Normalise((0.5,), (0.25,)), torch.uint8, classes=["no", "yes"], licence="MIT")
    >>> known["classes"], known["licence"]
    ('["no", "yes"]', 'MIT')
    >>> known["preprocessing"]
    '{"from": "uint8", "scale": 0.00392156862745098, "mean": [0.5], "std": [0.25]}'
    """
    steps: Any = f"{prepare.__module__}.{getattr(prepare, '__qualname__', type(prepare).__qualname__)}"
    if isinstance(prepare, Normalise):
        steps = "none"  # tokens
        if raw is torch.uint8 or raw.is_floating_point:
            scale = 1 / 255 if raw is torch.uint8 else 1.0
            steps = {"from": _name(raw), "scale": scale, "mean": prepare.mean or [0.0], "std": prepare.std or [1.0]}
    known = {"preprocessing": json.dumps(steps)}
    if classes:
        known["classes"] = json.dumps(list(classes))
    if licence:
        known["licence"] = licence
    return known | more


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def save(
    module: nn.Module,
    example: Tensor,
    path: str | Path,
    format: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Write a plain module to a file: for `torch.export.load` (pt2), ONNX runtimes (onnx) or ExecuTorch (pte).

    `example` is a batch as the module takes it; batches of any size can be given to what is written, except that pte
    files take one sample, as their memory is planned in advance. `facts`, and the name, shape and type of the `input`,
    are found again as metadata of an ONNX file, as `facts.json` among the extra files of a pt2 file, and as methods of
    a pte file.
    """
    target, how = Path(path), format_of(path, format)
    need(how)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = next(iter(inspect.signature(module.forward).parameters))
    known = {
        "input": json.dumps({"name": name, "shape": ["batch", *example.shape[1:]], "dtype": _name(example.dtype)}),
        **(facts or {}),
    }
    # A batch of one would be taken for a fixed size.
    example = example[:1] if how == "pte" else example if len(example) > 1 else example.repeat_interleave(2, 0)
    sizes = None if how == "pte" else ({0: torch.export.Dim("batch")},)
    with _silence():
        if how == "onnx":
            program = torch.onnx.export(module, (example,), dynamo=True, verbose=False, dynamic_shapes=sizes)
            assert program is not None
            program.model.metadata_props.update(known)
            program.save(target, external_data=False)
            return target
        exported = torch.export.export(module, (example,), dynamic_shapes=sizes)
        if how == "pt2":
            torch.export.save(exported, target, extra_files={FACTS: json.dumps(known)})
        else:
            target.write_bytes(_executorch(exported, known))
    return target


def _executorch(program: Any, known: dict[str, str]) -> bytes:
    """A program for ExecuTorch, on the kernels of XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=known)
    return bytes(lowered.to_executorch().buffer)


@contextmanager
def _silence() -> Iterator[None]:
    """Without what exporters say of their own insides: nothing a caller could change."""
    logs = [logging.getLogger(name) for name in ("torch", None)]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


def quantise(path: str | Path, target: str | Path) -> Path:
    """Write an ONNX file with weights of 8 bits (dynamic quantisation: activations are rounded as they come)."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ImportError("quantising needs onnxruntime: pip install 'pfedgate[export]'")
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    del model.graph.value_info[:]  # shapes of weights that are turned round now
    with _silence():
        quantize_dynamic(model, target, weight_type=QuantType.QUInt8)  # convolutions of signed weights are not run
    return Path(target)


class InFile(nn.Module):
    """An ONNX file as a module, on as many threads as torch has: `Client.score` takes it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    ...     again = InFile(save(layer, x, f"{folder}/layer.onnx"))(x)
    >>> torch.allclose(again, layer(x), atol=1e-5)
    True
    """

    def __init__(self, path: str | Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def forward(self, x: Tensor) -> Tensor:
        """What the file makes of a batch."""
        (name,) = (one.name for one in self.session.get_inputs())
        return torch.from_numpy(self.session.run(None, {name: x.numpy()})[0])
