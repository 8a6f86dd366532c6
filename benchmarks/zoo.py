"""Which architectures can be gated, and what that saves: Hugging Face, timm, torchvision, pytorchcv, plain torch.

Every model has random weights. It is wrapped, its sliced pass is compared with the masked one, real FLOPs are counted,
and steps are timed: dense, gated, and of the compact network with the same blocks. Run `python benchmarks/zoo.py`, or
for some of them `--only bert --only 'timm/.*'`; `--quick` leaves out what takes long. Each row is added to
benchmarks/results/zoo.jsonl as soon as it is measured, with the commit: `--new` goes on where a run of this commit was
stopped. `--table` writes docs/results/zoo.md from the newest row of each architecture.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pfedgate
from pfedgate import Budget

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "zoo.jsonl"
BUDGETS = (0.5, 0.3)
SIDE = 64  # pixels of an image, where an architecture takes that
CLASSES, LONGEST = 10, 300  # seconds of processor time for one architecture
WRONG = 1e-4  # relative difference of outputs in single precision from which on they count as wrong

_WORDS: dict[str, Any] = {"vocab_size": 100}
_WIDE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
_ENCODER = {**_WIDE, **_WORDS, "num_labels": CLASSES}
_DECODER = {
    **_WIDE, **_WORDS, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_IMAGE = {**_WIDE, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
# Architecture -> (class of the model, class of its configuration, the configuration, shape of a batch).
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", _ENCODER, (4, 16)),
    "distilbert": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, **_WORDS}, (4, 16),
    ),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _ENCODER, (4, 16)),
    "electra": (
        "ElectraForSequenceClassification", "ElectraConfig", {**_ENCODER, "embedding_size": 32}, (4, 16),
    ),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", {**_ENCODER, "embedding_size": 32}, (4, 16)),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False, **_WORDS},
        (4, 16),
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, (4, 16)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER, (4, 16)),
    "mistral": ("MistralForCausalLM", "MistralConfig", _DECODER, (4, 16)),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 16}, (4, 16)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER, (4, 16)),
    "gptneox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_WIDE, **_WORDS, "use_cache": False}, (4, 16)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4}, (4, 16)),
    "t5": (
        "T5EncoderModel", "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, **_WORDS}, (4, 16),
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE, (4, 3, 32, 32)),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _IMAGE, (4, 3, 32, 32)),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _IMAGE, (4, 3, 32, 32)),
    "swin": (
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
         "num_labels": CLASSES}, (4, 3, 32, 32),
    ),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": CLASSES}, (4, 3, 32, 32),
    ),
    "convnext": (
        "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES}, (4, 3, 32, 32),
    ),
    "mobilenet_v2": (
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {"image_size": 32, "num_labels": CLASSES},
        (4, 3, 32, 32),
    ),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
        {**_WIDE, "conv_dim": [32, 32, 32], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "layerdrop": 0.0,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32,
         "apply_spec_augment": False}, (4, 1000),
    ),
}  # fmt: skip
TIMM = {  # a small member of each family
    "vision_transformer": "vit_tiny_patch16_224",
    "byobnet": "gcresnet33ts",
    "beit": "beit_base_patch16_224",
    "byoanet": "botnet26t_256",
    "metaformer": "poolformer_s12",
    "cait": "cait_xxs24_224",
    "coat": "coat_lite_tiny",
    "maxxvit": "coatnet_nano_rw_224",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "convnext_atto",
    "crossvit": "crossvit_9_240",
    "cspnet": "cspresnet50",
    "cspnext": "cspnext_tiny",
    "davit": "davit_tiny",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla34",
    "nfnet": "nfnet_l0",
    "dpn": "dpn68",
    "vovnet": "ese_vovnet19b_slim",
    "resnet": "resnet18",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "efficientnet_b0",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "eva02_tiny_patch14_224",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_t8",
    "mobilenetv3": "mobilenetv3_small_050",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "ghostnet": "ghostnet_050",
    "mlp_mixer": "mixer_s32_224",
    "hardcorenas": "hardcorenas_a",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hrnet": "hrnet_w18_small",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "senet": "legacy_seresnet18",
    "xception": "legacy_xception",
    "levit": "levit_128s",
    "mambaout": "mambaout_femto",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "pit": "pit_ti_224",
    "pvt_v2": "pvt_v2_b0",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_002",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m0_9",
    "res2net": "res2net50_14w_8s",
    "resnest": "resnest14d",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s1",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_ns_224",
    "vision_transformer_relpos": "vit_relpos_small_patch16_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "vgg": "vgg11_bn",
    "visformer": "visformer_tiny",
    "volo": "volo_d1_224",
    "xception_aligned": "xception41",
    "xcit": "xcit_nano_12_p16_224",
    "cpubone": "cpubone_nano",
    "csatv2": "csatv2",
    "deepseek_vit": "deepseek_vit_412m",
    "efficientvim": "efficientvim_m1",
    "gemma4_vit": "gemma4_vit_167m",
    "hieradet_sam2": "sam2_hiera_tiny",
    "iformer": "iformer_t",
    "lowformer": "lowformer_b0",
    "mobilenetv5": "mobilenetv5_base",
    "naflexvit": "naflexvit_base_patch16_gap",
    "nasnet": "nasnetalarge",
    "pnasnet": "pnasnet5large",
    "qwen3_vit": "qwen3_vit_88m",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
}
TORCHVISION = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_16",
    "wide_resnet50_2", "maxvit_t",
)  # fmt: skip
PYTORCHCV = {  # a small member of each family that classifies images
    "alexnet": "alexnetb",
    "zfnet": "zfnet",
    "vgg": "vgg11",
    "bninception": "bninception",
    "resnet": "resnet18_wd4",
    "preresnet": "preresnet18_wd4",
    "resnext": "resnext14_32x2d",
    "seresnet": "seresnet10",
    "sepreresnet": "sepreresnet10",
    "seresnext": "seresnext50_32x4d",
    "senet": "senet16",
    "resnesta": "resnestabc14",
    "ibnresnet": "ibn_resnet50",
    "ibnbresnet": "ibnb_resnet50",
    "ibnresnext": "ibn_resnext50_32x4d",
    "ibndensenet": "ibn_densenet121",
    "airnet": "airnet50_1x64d_r16",
    "airnext": "airnext50_32x4d_r2",
    "bamresnet": "bam_resnet18",
    "cbamresnet": "cbam_resnet18",
    "resattnet": "resattnet56",
    "sknet": "sknet50",
    "scnet": "scnet50",
    "regnet": "regnetx002",
    "diaresnet": "diaresnet10",
    "diapreresnet": "diapreresnet10",
    "pyramidnet": "pyramidnet101_a360",
    "diracnetv2": "diracnet18v2",
    "sharesnet": "sharesnet18",
    "densenet": "densenet121",
    "condensenet": "condensenet74_c8_g8",
    "sparsenet": "sparsenet121",
    "peleenet": "peleenet",
    "wrn": "wrn50_2",
    "drn": "drnd22",
    "dpn": "dpn68",
    "darknet": "darknet_tiny",
    "darknet53": "darknet53",
    "channelnet": "channelnet",
    "revnet": "revnet38",
    "irevnet": "irevnet301",
    "bagnet": "bagnet9",
    "dla": "dla46xc",
    "msdnet": "msdnet22",
    "fishnet": "fishnet99",
    "espnetv2": "espnetv2_wd2",
    "dicenet": "dicenet_wd5",
    "hrnet": "hrnet_w18_small_v1",
    "vovnet": "vovnet27s",
    "selecsls": "selecsls42",
    "hardnet": "hardnet39ds",
    "xdensenet": "xdensenet121_2",
    "squeezenet": "squeezenet_v1_1",
    "squeezenext": "sqnxt23_w1",
    "shufflenet": "shufflenet_g3_wd4",
    "shufflenetv2": "shufflenetv2_wd2",
    "shufflenetv2b": "shufflenetv2b_wd2",
    "menet": "menet108_8x1_g3",
    "mobilenet": "mobilenet_wd4",
    "mobilenetb": "mobilenetb_wd4",
    "fdmobilenet": "fdmobilenet_wd4",
    "mobilenetv2": "mobilenetv2_wd4",
    "mobilenetv3": "mobilenetv3_small_w7d20",
    "igcv3": "igcv3_wd4",
    "ghostnet": "ghostnet",
    "mnasnet": "mnasnet_small",
    "darts": "darts",
    "proxylessnas": "proxylessnas_mobile",
    "fbnet": "fbnet_cb",
    "xception": "xception",
    "inceptionv3": "inceptionv3",
    "inceptionv4": "inceptionv4",
    "inceptionresnetv1": "inceptionresnetv1",
    "inceptionresnetv2": "inceptionresnetv2",
    "polynet": "polynet",
    "nasnet": "nasnet_4a1056",
    "pnasnet": "pnasnet5large",
    "spnasnet": "spnasnet",
    "efficientnet": "efficientnet_b0",
    "efficientnetedge": "efficientnet_edge_small_b",
    "mixnet": "mixnet_s",
    "isqrtcovresnet": "isqrtcovresnet18",
    "resneta": "resneta10",
    "resnetd": "resnetd50b",
    "fastseresnet": "fastseresnet101b",
    "octresnet": "octresnet10_ad2",
    "tresnet": "tresnet_m",
    "nin_cifar": "nin_cifar10",
    "resnet_cifar": "resnet20_cifar10",
    "preresnet_cifar": "preresnet20_cifar10",
    "resnext_cifar": "resnext20_32x2d_cifar10",
    "seresnet_cifar": "seresnet20_cifar10",
    "sepreresnet_cifar": "sepreresnet20_cifar10",
    "pyramidnet_cifar": "pyramidnet110_a48_cifar10",
    "densenet_cifar": "densenet40_k12_cifar10",
    "xdensenet_cifar": "xdensenet40_2_k24_bc_cifar10",
    "wrn_cifar": "wrn16_10_cifar10",
    "wrn1bit_cifar": "wrn20_10_1bit_cifar10",
    "ror_cifar": "ror3_56_cifar10",
    "rir_cifar": "rir_cifar10",
    "msdnet_cifar10": "msdnet22_cifar10",
    "resdropresnet_cifar": "resdropresnet20_cifar10",
    "shakeshakeresnet_cifar": "shakeshakeresnet20_2x16d_cifar10",
    "shakedropresnet_cifar": "shakedropresnet20_cifar10",
    "fractalnet_cifar": "fractalnet_cifar10",
    "diaresnet_cifar": "diaresnet20_cifar10",
    "diapreresnet_cifar": "diapreresnet20_cifar10",
    "resnet_cub": "resnet10_cub",
    "seresnet_cub": "seresnet10_cub",
    "mobilenet_cub": "mobilenet_w1_cub",
    "proxylessnas_cub": "proxylessnas_cpu_cub",
    "ntsnet_cub": "ntsnet_cub",
}
TORCH = ("transformer_encoder", "lstm", "gru")


@functools.cache
def vision_library() -> Any:
    """Make torchvision load where its wheel was built for another torch: classifiers need no compiled operations.

    Other libraries import it, too. What is returned must live as long as it is used.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


LIBRARIES: dict[str, Iterable[str]] = {
    "transformers": TRANSFORMERS, "timm": TIMM, "torchvision": TORCHVISION, "pytorchcv": PYTORCHCV, "torch": TORCH,
}  # fmt: skip


def architectures() -> list[str]:
    return [f"{library}/{name}" for library, names in LIBRARIES.items() for name in names]


def build(architecture: str) -> tuple[nn.Module, Tensor]:
    """A model with random weights, and a batch."""
    library, _, name = architecture.partition("/")
    torch.manual_seed(0)
    if library == "transformers":
        import transformers

        kind, config, options, shape = TRANSFORMERS[name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        return model, torch.randint(100, shape) if len(shape) == 2 and shape[1] < 100 else torch.randn(shape)
    if library == "timm":
        import timm

        try:  # patches of a small image
            model = timm.create_model(TIMM[name], num_classes=CLASSES, img_size=SIDE)
        except (TypeError, ValueError, RuntimeError, AssertionError):  # it takes no size, or not this one
            model = timm.create_model(TIMM[name], num_classes=CLASSES)
        return model, images(model, SIDE, model.default_cfg["input_size"][1])
    if library == "torchvision":
        import torchvision

        options = {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}
        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        return model, images(model, SIDE, 224 if name != "inception_v3" else 299)
    if library == "pytorchcv":
        from pytorchcv.model_provider import get_model

        model = get_model(PYTORCHCV[name], pretrained=False)
        features, own = getattr(model, "features", None), getattr(model, "in_size", (224, 224))[0]
        if isinstance(getattr(features, "final_pool", None), nn.AvgPool2d):  # over all positions
            features.final_pool = nn.AdaptiveAvgPool2d(1)
        return model, images(model, min(SIDE, own), own)
    if name == "transformer_encoder":
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        return nn.TransformerEncoder(layer, 2), torch.randn(4, 16, 64)
    return _Recurrent(getattr(nn, name.upper())), torch.randn(4, 16, 32)


def images(model: nn.Module, *sizes: int) -> Tensor:
    """Two images, of the smallest size that the model takes; it is in evaluation afterwards."""
    for size in sizes:
        x = torch.randn(2, 3, size, size)
        try:
            for training in (True, False):
                with torch.no_grad():
                    model.train(training)(x)
        except Exception as error:  # the larger size may do
            reason = error
            continue
        return x
    raise RuntimeError(f"it does not run on its own input size: {reason}")


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cells, self.head = kind(32, 64, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])  # type: ignore[no-any-return]


def median(step: Callable[[], Any], least: float = 0.5) -> float:
    """Milliseconds of processor time, at least five times and half a second."""
    times: list[float] = []
    step()
    until = time.perf_counter() + least
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 100):
        began = time.process_time()
        step()
        times.append(1000 * (time.process_time() - began))
    return statistics.median(times)


def loss(result: Any) -> Tensor:
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
    return sum(t.square().mean() for t in tensors)  # type: ignore[return-value]


def training_step(model: Any, x: Tensor) -> Callable[[], None]:
    gated = isinstance(model, pfedgate.GatedModel)
    optimizer = model.optimizer("sgd", lr=1e-4) if gated else torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    return step


def inference(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            model(x)

    return run


def distance(a: Any, b: Any) -> float:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return max(
        float((p - q).norm() / q.norm().clamp_min(1e-12))
        for p, q in pairs
        if isinstance(q, Tensor) and q.is_floating_point()
    )


def measure(architecture: str, quick: bool) -> dict[str, Any]:
    """One row: whether it is sliced, exactly, how far, and at which cost."""
    row: dict[str, Any] = {"architecture": architecture}
    model, x = build(architecture)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    began = time.perf_counter()
    small = {"pool": 1, "max_share": 10.0}
    try:
        gated = pfedgate.gate(model, x, Budget(params=1.0), gate=small, generator=torch.Generator().manual_seed(0))
    except (TypeError, ValueError) as error:  # as the library refuses, with a reason
        return row | {"execution": "refused", "reason": str(error)[:300]}
    row["seconds to wrap"], row["execution"] = time.perf_counter() - began, gated.execution
    plan = gated.plan
    row["gate"] = gated.gate.size / plan.size
    if gated.execution != "sliced":
        return row | {"reason": gated.explain()[:300]}
    dense, least = plan.costs.dense(), plan.costs.smallest()
    row["sliced"] = {r: 1 - plan.costs.fixed(r) / dense[r] for r in ("params", "flops")}
    row["smallest"] = {r: least[r] / dense[r] for r in ("params", "flops")}
    network = plan.network
    row["front end"] = _front(network)
    for share in BUDGETS:
        cell: dict[str, Any] = {}
        row[f"s={share}"] = cell
        try:
            gated.rebudget(Budget(params=share, flops=share))
        except pfedgate.InfeasibleBudget as error:
            cell["infeasible"] = str(error)[:200]
            continue
        gated.eval()
        counted = gated.verify(x)
        cell["flops"], cell["cost"] = (
            counted["counted"],
            max(v for r, v in gated.last.cost.items() if r in ("params", "flops")),
        )  # type: ignore[union-attr]
        with torch.no_grad():
            result = gated(x)
            gated.model.train().eval()  # some forget on the way what they computed from other weights
            gated.execution = "masked"
            cell["error"] = distance(result, gated(x))
            gated.execution = "sliced"
        if quick:
            continue
        gated.train()
        row.setdefault("dense step", median(training_step(model.train(), x)))
        cell["step"] = median(training_step(gated, x))
        gated.eval()
        row.setdefault("dense inference", median(inference(gated.model, x)))
        cell["inference"] = median(inference(gated, x))
        try:
            compact = pfedgate.compact(gated, x)
            cell["compact"] = median(inference(compact, x))
            cell["compact step"] = median(training_step(compact.train(), x))
        except Exception as error:
            cell["compact"] = f"{type(error).__name__}: {error}"[:200]
    return row


def _front(network: Any) -> str:
    """What followed a forward: torch.fx, torch.export, or either, but regions only."""
    if network.program is None:
        return "regions"
    return "export" if network.program.sizes else "fx"


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {LONGEST} seconds of processor time")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The page docs/results/zoo.md."""
    commits = Counter(row["commit"] for row in rows.values())
    listed = ", ".join(f"{number} rows at {commit}" for commit, number in commits.items())
    missing = len(architectures()) - len(rows)
    silent = [name for name, row in rows.items() if row.get("execution") == "masked" and not row.get("reason")]
    errors = [cell.get("error", 0.0) for row in rows.values() for cell in cells(row)]
    machine = f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread"
    lines = [
        "# Architectures",
        "",
        "What happens when `pfedgate.gate` wraps an architecture of a library, with random weights. *Sliced* is the",
        "share of FLOPs (and of parameters) that some block can leave out; *least* the smallest budget of both; *FLOPs",
        "at s* what `gated.verify` counted under `Budget(params=s, flops=s)`; times are medians of processor time,",
        "relative to the dense module; *error* is the largest relative difference between sliced and masked outputs.",
        "",
        f"Printed by `python benchmarks/zoo.py --table` ({machine}, seed 0;",
        "a run with `--quick` times nothing).",
        *textwrap.wrap(f"Measured at these commits: {listed}.", 110),
        f"{missing or 'No'} of {len(architectures())} architectures have no row yet.",
        "Transformers are small configurations, others are the smallest or a small member of their family as the",
        "library builds it, on images of 64 pixels where it takes them (with a pool over all positions before the",
        "classifier) and of its own size where not.",
        "",
        f"Of {len(rows)} architectures, {sum(error > WRONG for error in errors)} have a wrong output (an error above "
        f"{WRONG:.0e}),",
        f"{len(silent)} are masked without a reason, and {sum('failed' in row for row in rows.values())} end in an "
        "error that is not one of ours.",
        "",
        "| library | architectures | sliced: at least half of the FLOPs | of these feasible at s = .5 |",
        "|---|---|---|---|",
    ]
    for library in LIBRARIES:
        own = [row for name, row in rows.items() if name.startswith(f"{library}/")]
        if own:
            lines.append(f"| {library} | {len(own)} | {sum(map(halved, own))} | {sum(map(usable, own))} |")
    lines.append("")
    for library in LIBRARIES:
        part = {name: row for name, row in rows.items() if name.startswith(f"{library}/")}
        if not part:
            continue
        lines += [
            f"## {library}", "",
            "| architecture | by | sliced | least | FLOPs at .5 | at .3 | step at .5 | inference at .3: gated, compact "
            "| gate | error |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        lines += [_line(name, row) for name, row in sorted(part.items())]
        lines.append("")
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured under each budget."""
    return [row[f"s={share}"] for share in BUDGETS if f"s={share}" in row]


def halved(row: dict[str, Any]) -> bool:
    return bool(row.get("sliced", {}).get("flops", 0) >= 0.5)


def usable(row: dict[str, Any]) -> bool:
    return halved(row) and "flops" in row.get("s=0.5", {})


def _line(name: str, row: dict[str, Any]) -> str:
    name = name.partition("/")[2]
    if "sliced" not in row:
        reason = row.get("reason", row.get("failed", "")).replace("|", "/").replace("\n", " ")
        return f"| {name} | {row.get('execution', 'fails')} at {row['commit']} | {reason[:120]} | | | | | | | |"
    half, third = row["s=0.5"], row["s=0.3"]

    def share(value: Any, whole: str = "") -> str:
        return f"{value / row[whole] if whole else value:.2f}" if isinstance(value, int | float) else "–"

    error = max(cell.get("error", 0.0) for cell in (half, third))
    times = f"{share(third.get('inference'), 'dense inference')}, {share(third.get('compact'), 'dense inference')}"
    return (
        f"| {name} | {row['front end']} | {row['sliced']['flops']:.0%} ({row['sliced']['params']:.0%}) "
        f"| {max(row['smallest'].values()):.2f} | {share(half.get('flops'))} | {share(third.get('flops'))} "
        f"| {share(half.get('step'), 'dense step')} | {times if 'inference' in third else '–'} "
        f"| {row['gate']:.1%} | {error:.0e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="architectures that match this, as 'timm/res.*'")
    parser.add_argument("--quick", action="store_true", help="no timings")
    parser.add_argument("--new", action="store_true", help="only those without a row of this commit")
    parser.add_argument("--table", action="store_true", help="write docs/results/zoo.md, measure nothing")
    given = parser.parse_args()
    rows = newest()
    if given.table:
        (ROOT.parent / "docs" / "results" / "zoo.md").write_text(table(rows) + "\n")
        return
    commit = _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "src") else "")
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    vision_library()
    signal.signal(signal.SIGPROF, _too_long)
    for name in architectures():
        there = rows.get(name, {}).get("commit") == commit
        if (given.only and not any(re.fullmatch(one, name) for one in given.only)) or (given.new and there):
            continue
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        began = time.process_time()
        try:
            row = measure(name, given.quick)
        except Exception as error:  # whatever a library or a model does: the row says so
            row = {"architecture": name, "failed": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        row |= {"commit": commit, "seconds": round(time.process_time() - began, 1)}
        print(json.dumps(row), flush=True)
        with RESULTS.open("a") as lines:
            lines.write(json.dumps(row, sort_keys=True) + "\n")


def newest() -> dict[str, dict[str, Any]]:
    """The newest row of each architecture."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = {row["architecture"]: row for row in map(json.loads, lines)}
    return {name: rows[name] for name in architectures() if name in rows}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT.parent, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
