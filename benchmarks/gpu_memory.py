"""Memory tiers of one full-size pipeline with random weights: predicted and measured peaks, and the time of a step.

A denoiser in fp8 storage, a text encoder of four billion weights and a VAE are loaded from sparse files of zeros by
``slipcast.pipeline``'s own way, placed in each tier in turn, and given random weights where they lie, the same in every
tier. Latents must be the same bits as those of the resident tier. Loads and pinned memory take some 40 GB on the host.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from measuring import MIB, ROOT, print_table
from torch import Tensor, nn

from slipcast.engine.layers import QuantisedModule
from slipcast.engine.pipeline import policies
from slipcast.engine.pipeline.apply_policies import refit_
from slipcast.engine.pipeline.assemble import assemble, pipeline_record
from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
from slipcast.engine.policy import streaming
from slipcast.engine.policy.memory import TIERS, decide_memory
from slipcast.engine.policy.sizes import ImageSize
from slipcast.registry.settings import resolve_settings

SIZES = (512, 1024, 2048)
_HEADERS = {
    "denoiser": "z-image-turbo--kijai-fp8-scaled",
    "text_encoder": "te-qwen3-4b--comfy-bf16",
    "vae": "vae-flux1--ae-ldm",
}
_DEVIATION = 0.02
_CODE_SCALE = 1e-4
_PROMPT = "a red fox in snow, " * 20


def add_options(parser: Any) -> None:
    """The options of this part."""
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS), help="which (%(default)s)")
    parser.add_argument(
        "--group-offloading", action="store_true", help="each streamed tier once more, by diffusers' group offloading"
    )
    parser.add_argument("--pictures", nargs="+", type=int, default=list(SIZES), help="sides in pixels (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a picture (%(default)s)")
    parser.add_argument("--first-blocks", type=int, help="fewer blocks of each model, to try the program out")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each tier at each size. A tier that fails is left out, and the reason kept."""
    logging.getLogger("slipcast").setLevel(logging.ERROR)  # files of zeros have scales of zero
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    expected: dict[int, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, companions = _files(Path(folder), options.first_blocks)
        for name, tier, theirs in _runs(options):
            began = perf_counter()
            try:
                with _group_offloading() if theirs else nullcontext():
                    found[name] = _tier(tier, path, companions, options, expected)
            except Exception as failure:
                failed[name] = f"{type(failure).__name__}: {failure}"
                print(f"{name} failed: {failed[name][:800]}", file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{name}: {perf_counter() - began:.0f} s", file=sys.stderr)
    return {"sizes": options.pictures, "steps": options.steps, "tiers": found, "failed": failed}


def _runs(options: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    """Name, tier, and whether diffusers streams in it; the resident tier first, to which the others are compared."""
    yield "resident", "resident", False
    for tier in options.tiers:
        if tier != "resident":
            yield tier, tier, False
            if options.group_offloading and tier not in ("in_turn",):
                yield f"{tier}, by diffusers", tier, True


@contextmanager
def _group_offloading() -> Iterator[None]:
    """Let diffusers stream what slipcast would: with streams, page-locked copies, and one block in a group."""
    before = streaming.stream_

    def theirs(model: nn.Module, _: Any, device: torch.device, *, whole_blocks: bool) -> None:
        level = {"offload_type": "block_level", "num_blocks_per_group": 1} if whole_blocks else {}
        options: dict[str, Any] = {"offload_type": "leaf_level", "use_stream": True, "non_blocking": True, **level}
        apply_group_offloading(model, device, torch.device("cpu"), **options)

    streaming.stream_ = theirs  # type: ignore[assignment]
    try:
        yield
    finally:
        streaming.stream_ = before


def _files(folder: Path, blocks: int | None) -> tuple[Path, dict[str, str]]:
    """The denoiser's file, and where the other parts lie."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.recorded import recorded, write_checkpoint
    from support.tiny_pipelines import byte_tokenizer

    paths = {
        role: write_checkpoint(
            recorded(header), folder / f"{header}.safetensors", blocks=None if role == "vae" else blocks
        )
        for role, header in _HEADERS.items()
    }
    byte_tokenizer(model_max_length=512).save_pretrained(str(folder / "tokenizer"))
    companions = {role: str(paths[role]) for role in ("text_encoder", "vae")}
    return paths["denoiser"], {**companions, "tokenizer": str(folder / "tokenizer")}


def _tier(
    tier: Any, path: Path, companions: dict[str, str], options: argparse.Namespace, expected: dict[int, Tensor]
) -> dict[str, Any]:
    settings = resolve_settings(
        {"device": "cuda", "dtype": "bfloat16", "fp8": "storage", "companions": companions, "vae": {"tiling": "off"}},
        checkpoint=path,
    ).values
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    began = perf_counter()
    with _placed(tier):
        plan = make_pipeline_plan(path, settings, ImageSize(min(options.pictures), min(options.pictures)))
    pipe = assemble(plan)
    seconds = perf_counter() - began
    pipe.set_progress_bar_config(disable=True)
    _latents(pipe, min(options.pictures), 1)  # before, tensors are not yet the pinned ones that streaming copies from
    for number, role in enumerate(plan.policies.memory.placements):
        _randomise(pipe.components[role], seed=number)
    held = torch.cuda.memory_allocated() - base
    _latents(pipe, min(options.pictures), 2)
    sizes = {side: _size(pipe, side, options.steps, base, expected) for side in options.pictures}
    return {"load_seconds": seconds, "held": held, "sizes": sizes}


@contextmanager
def _placed(tier: Any) -> Iterator[None]:
    """Let the memory policy take one tier, whatever would fit."""
    before = policies.decide_memory
    policies.decide_memory = partial(decide_memory, placed=tier)
    try:
        yield
    finally:
        policies.decide_memory = before


@torch.no_grad()
def _randomise(model: nn.Module, seed: int) -> None:
    """Random weights in place of a model's zeros, wherever they lie; the same for a seed."""
    random = torch.Generator("cuda").manual_seed(seed)
    coded = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, QuantisedModule)
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.element_size() == 1
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in coded:
            codes = torch.randint(0, 0x7F, tensor.shape, generator=random, device="cuda", dtype=torch.uint8)
            codes |= torch.randint(0, 2, tensor.shape, generator=random, device="cuda", dtype=torch.uint8) << 7
            tensor.data.view(torch.uint8).copy_(codes)
        elif name.endswith("scale"):
            tensor.data.fill_(_CODE_SCALE)
        elif tensor.ndim > 1 and tensor.is_floating_point():
            tensor.data.copy_(
                torch.empty(tensor.shape, device="cuda", dtype=tensor.dtype).normal_(0, _DEVIATION, generator=random)
            )
        elif name.endswith("weight"):
            tensor.data.fill_(1)


def _latents(pipe: Any, side: int, steps: int, times: list[float] | None = None) -> Tensor:
    def note(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        torch.cuda.synchronize()
        if times is not None:
            times.append(perf_counter())
        return tensors

    call = {"prompt": _PROMPT, "num_inference_steps": steps, "guidance_scale": 0.0, "height": side, "width": side}
    generator = torch.Generator().manual_seed(0)
    latents: Tensor = pipe(
        **call, generator=generator, output_type="latent", return_dict=False, callback_on_step_end=note
    )[0]
    return latents


@torch.no_grad()
def _size(pipe: Any, side: int, steps: int, base: int, expected: dict[int, Tensor]) -> dict[str, Any]:
    refit_(pipe, ImageSize(side, side))
    predicted = pipeline_record(pipe).policies.memory.peak_bytes
    times: list[float] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    latents = _latents(pipe, side, steps, times)
    denoise = torch.cuda.max_memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    vae: Any = pipe.vae
    vae.decode(latents.to(torch.bfloat16), return_dict=False)
    torch.cuda.synchronize()
    decode = torch.cuda.max_memory_allocated() - base
    kept = latents.cpu()
    same = bool(torch.equal(kept, expected.setdefault(side, kept)))
    steps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
    return {
        "predicted": predicted,
        "denoise": denoise,
        "decode": decode,
        "measured": max(denoise, decode),
        "step_ms": median(steps_ms),
        "same_latents": same,
        "finite": bool(torch.isfinite(kept).all()),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"One picture, {result['steps']} steps, fp8 storage, eager, VAE not tiled:\n")
    columns = ("tier", "side", "predicted, MiB", "measured, MiB", "predicted / measured", "of resident")
    rows = []
    resident = result["tiers"].get("resident", {}).get("sizes", {})
    for tier, found in result["tiers"].items():
        for side, size in found["sizes"].items():
            whole = resident.get(side, size)
            rows.append(
                (
                    tier,
                    str(side),
                    f"{size['predicted'] / MIB:,.0f}",
                    f"{size['measured'] / MIB:,.0f}",
                    f"{size['predicted'] / size['measured']:.3f}",
                    f"{size['measured'] / whole['measured']:.3f}",
                    f"{size['denoise'] / MIB:,.0f}",
                    f"{size['decode'] / MIB:,.0f}",
                    f"{size['step_ms']:.1f}",
                    f"{size['step_ms'] / whole['step_ms']:.3f}",
                    "same" if size["same_latents"] and size["finite"] else "DIFFERENT",
                )
            )
    more = ("encode and denoise, MiB", "decode, MiB", "step, ms", "to resident", "latents")
    print_table((*columns, *more), rows)
    for tier, found in result["tiers"].items():
        print(f"\n{tier}: loaded in {found['load_seconds']:.1f} s, {found['held'] / MIB:,.0f} MiB stay on the device")
    for tier, reason in result["failed"].items():
        print(f"\n{tier} failed: {reason}")
