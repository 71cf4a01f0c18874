"""One forward of a full-size denoiser with random weights: bf16, layerwise casting, fp8 storage, fp8 compute.

The weights are drawn on the GPU from a normal distribution with a standard deviation of 0.02, norms are ones: no file
is read. Which layers are quantised, and which multiply in fp8, a plan for the recorded header of a checkpoint says, as
for a load. All contenders lie in the GPU's memory at once, some 40 GB, and take their turn in each round; ratios are
medians of the rounds' own ratios to bf16 in eager mode. "host" is what Python takes to launch one forward.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gpu_machine import alternating_ms, relative_l2
from measuring import HEADER, MIB, ROOT, model_class, print_table
from torch import Tensor, nn

import slipcast
from slipcast.engine.codecs.catalogue import codec_named
from slipcast.engine.compiled_blocks import CompiledBlocks, compile_blocks_
from slipcast.engine.fp8_compute import enable_compute_
from slipcast.engine.layers import quantise_module_
from slipcast.engine.quantised_model import mark_quantised_

BASELINE = "bf16"
_DEVIATION = 0.02
_SIZES = ((1024, 1024), (896, 1152), (1344, 768), (640, 1536))
"""Pixels. The first is measured; the others tell whether another size compiles anew."""
_TOKENS = 128


@dataclass(frozen=True)
class Contender:
    """One way to run the model.

    Attributes:
        weights: ``bf16``, ``layerwise``, ``storage`` or ``compute``.
        compiled: whether the blocks are.
    """

    weights: str
    compiled: bool = False


CONTENDERS = {
    BASELINE: Contender("bf16"),
    "layerwise casting": Contender("layerwise"),
    "fp8 storage": Contender("storage"),
    "fp8 compute": Contender("compute"),
    "bf16, compiled": Contender("bf16", compiled=True),
    "fp8 storage, compiled": Contender("storage", compiled=True),
    "fp8 compute, compiled": Contender("compute", compiled=True),
}


def add_options(parser: Any) -> None:
    """The options of this part."""
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all contenders (%(default)s)")
    parser.add_argument("--forwards", type=int, default=5, help="forwards of a contender in a round (%(default)s)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--layers", type=int, help="fewer layers, to try the program out")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders. One that fails is left out, and the reason kept."""
    models, blocks = _models(options.layers, {CONTENDERS[name].weights for name in options.contenders} | {"bf16"})
    inputs = {size: _inputs(models["bf16"].config, size) for size in _SIZES}
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    forwards: dict[str, Callable[[], Tensor]] = {}
    outputs: dict[str, Tensor] = {}
    for name in (BASELINE, *(name for name in options.contenders if name != BASELINE)):
        contender = CONTENDERS[name]
        try:
            model, compiled = models[contender.weights], None
            if contender.compiled:
                model = _with_same_tensors(model)
                compiled = compile_blocks_(model, blocks, "blocks")
            found[name], outputs[name] = _first_forwards(model, inputs)
            _refuse_eager(compiled)
        except Exception as failure:
            failed[name] = f"{type(failure).__name__}: {failure}"
            print(f"{name} failed: {failed[name][:500]}", file=sys.stderr)
            continue
        forwards[name] = partial(_forward, model, inputs[_SIZES[0]])
        print(f"{name}: first forward after {found[name]['first_forward_seconds']:.1f} s", file=sys.stderr)
    for name, rounds in alternating_ms(forwards, options.rounds, options.forwards).items():
        found[name]["ms"] = rounds
    for name, of_contender in found.items():
        ratios = [base / own for base, own in zip(found[BASELINE]["ms"], of_contender["ms"], strict=True)]
        of_contender |= {"median_ms": median(of_contender["ms"]), "against_bf16": median(ratios)}
        of_contender["relative_l2"] = relative_l2(outputs[name], outputs[BASELINE])
    return {"sizes": _SIZES, "text_tokens": _TOKENS, "contenders": found, "failed": failed}


def _first_forwards(model: nn.Module, inputs: dict[tuple[int, int], dict[str, Any]]) -> tuple[dict[str, Any], Tensor]:
    """Seconds of the first forward, the graphs that it and others compile, peak memory of one, and its output."""
    first, *others = inputs.values()
    began, graphs = perf_counter(), _graphs()
    _forward(model, first)
    torch.cuda.synchronize()
    seconds, after_first = perf_counter() - began, _graphs()
    for each in others[:1]:
        _forward(model, each)
    after_second = _graphs()
    for each in (*others[1:], first):
        _forward(model, each)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), perf_counter()
    output = _forward(model, first)
    host_seconds = perf_counter() - began
    torch.cuda.synchronize()
    found = {
        "first_forward_seconds": seconds,
        "graphs": after_first - graphs,
        "graphs_of_second_size": after_second - after_first,
        "graphs_of_later_sizes": _graphs() - after_second,
        "host_ms": 1e3 * host_seconds,
        "peak_beside_weights": torch.cuda.max_memory_allocated() - before,
        "weights": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
    }
    return found, output


def _refuse_eager(compiled: CompiledBlocks | None) -> None:
    """What could not be compiled runs all the same, but not under this name."""
    reasons = [status.reason for status in compiled.status.values() if status.reason] if compiled else []
    if reasons:
        raise RuntimeError("; ".join(reasons))


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _forward(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        output: Tensor = model(**inputs, return_dict=False)[0][0]
    return output


def _inputs(config: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Latents, a time and embeddings of a text for a picture of this size."""
    random = torch.Generator("cuda").manual_seed(sum(size))
    draw = partial(torch.randn, generator=random, device="cuda", dtype=torch.bfloat16)
    latents = draw(config.in_channels, 1, size[0] // 8, size[1] // 8)
    time = torch.full((1,), 0.5, device="cuda")
    return {"x": [latents], "t": time, "cap_feats": [draw(_TOKENS, config.cap_feat_dim)]}


def _models(layers: int | None, wanted: set[str]) -> tuple[dict[str, Any], Sequence[str]]:
    """The model by how its weights are kept, and which blocks are compiled."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.recorded import recorded, write_checkpoint

    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(recorded(HEADER), Path(folder) / f"{HEADER}.safetensors", fill="zero")
        models["bf16"] = _random_model(path, layers)
        if "layerwise" in wanted:
            models["layerwise"] = copy.deepcopy(models["bf16"])
            models["layerwise"].enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
        for fp8 in {"storage", "compute"} & wanted:
            models[fp8] = _quantised(copy.deepcopy(models["bf16"]), path, fp8)
        blocks = slipcast.plan(path, device="cuda", compile="blocks").compiled
    return models, blocks


def _random_model(path: Path, layers: int | None) -> Any:
    config = dict(slipcast.inspect(path).config)
    if layers is not None:
        config |= {"n_layers": layers}
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = model_class(path)(**arguments).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    random = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, _DEVIATION, generator=random)
        else:
            parameter.data.fill_(0 if name.endswith("bias") else 1)
    return model


def _quantised(model: Any, path: Path, fp8: str) -> Any:
    """The layers of a plan, made of the model's in place."""
    plan = slipcast.plan(path, device="cuda", dtype="bfloat16", fp8=fp8)
    present = {name for name, _ in model.named_modules()}
    for module in plan.modules:
        if module.codec is None or module.path not in present:
            continue
        layer = quantise_module_(model.get_submodule(module.path), codec_named(module.codec), torch.bfloat16)
        if module.products == "fp8":
            enable_compute_(layer, input_scale=None, per_tensor=module.activation_scale == "tensor")  # type: ignore[arg-type]
    return mark_quantised_(model)


def _with_same_tensors(model: Any) -> Any:
    """Another model with the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    width, height = result["sizes"][0]
    print(f"One forward at {width} x {height}, batch 1:\n")
    rows = [_row(name, of_contender) for name, of_contender in result["contenders"].items()]
    memory = ("peak beside weights, MiB", "weights, MiB")
    columns = ("", "ms", "all rounds", "against bf16", "relative L2", "host, ms", *memory, "first forward, s")
    print_table((*columns, "graphs: first, second size, later sizes"), rows)
    for name, reason in result["failed"].items():
        print(f"\n{name} failed: {reason}")


def _row(name: str, found: dict[str, Any]) -> Sequence[str]:
    return (
        name,
        f"{found['median_ms']:.1f}",
        " ".join(f"{ms:.1f}" for ms in found["ms"]),
        f"{found['against_bf16']:.3f}",
        f"{found['relative_l2']:.4f}",
        f"{found['host_ms']:.1f}",
        f"{found['peak_beside_weights'] / MIB:,.0f}",
        f"{found['weights'] / MIB:,.0f}",
        f"{found['first_forward_seconds']:.1f}",
        f"{found['graphs']}, {found['graphs_of_second_size']}, {found['graphs_of_later_sizes']}",
    )
