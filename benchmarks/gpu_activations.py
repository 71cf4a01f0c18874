"""What activations take for each token or pixel: full-width models of few blocks, with random weights in bfloat16.

Blocks run one after another, so that few of them have the peak of all. Every model is built after a recorded header, as
a plan builds it. "For each token" counts the picture's tokens and the 512 of a prompt, as families state it in
``activation_bytes_per_token``; "for each pixel" is as in ``decode_bytes_per_pixel`` and ``encode_bytes_per_pixel``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import MIB, ROOT, print_table
from torch import Tensor

import slipcast
from slipcast.engine.build import model_class
from slipcast.engine.policy.activations import TEXT_TOKENS
from slipcast.engine.policy.sizes import ImageSize, tokens
from slipcast.registry.catalogue import load_catalogue

SIZES = (512, 1024, 2048)
_DEVIATION = 0.02


@dataclass(frozen=True)
class Denoiser:
    """A denoiser to measure.

    Attributes:
        header: the recorded header that it is built after.
        changes: arguments of the class that make it short.
        inputs: what its forward takes, by the side of a picture in pixels and its configuration.
    """

    header: str
    changes: dict[str, Any]
    inputs: Callable[[int, Any], dict[str, Any]]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _time() -> Tensor:
    return torch.full((1,), 0.5, device="cuda", dtype=torch.bfloat16)


def _z_image(side: int, config: Any) -> dict[str, Any]:
    return {
        "x": [_draw(config.in_channels, 1, side // 8, side // 8)],
        "t": _time(),
        "cap_feats": [_draw(TEXT_TOKENS, config.cap_feat_dim)],
    }


def _flux_1(side: int, config: Any) -> dict[str, Any]:
    patches = (side // 16) ** 2
    return {
        "hidden_states": _draw(1, patches, config.in_channels),
        "encoder_hidden_states": _draw(1, TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": _draw(1, config.pooled_projection_dim),
        "timestep": _time(),
        "img_ids": torch.zeros(patches, 3, device="cuda"),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3, device="cuda"),
        "guidance": _time() if config.guidance_embeds else None,
    }


def _flux_2(side: int, config: Any) -> dict[str, Any]:
    patches = (side // 16) ** 2
    return {
        "hidden_states": _draw(1, patches, config.in_channels),
        "encoder_hidden_states": _draw(1, TEXT_TOKENS, config.joint_attention_dim),
        "timestep": _time(),
        "img_ids": torch.zeros(1, patches, 4, device="cuda"),
        "txt_ids": torch.zeros(1, TEXT_TOKENS, 4, device="cuda"),
        "guidance": _time() if config.guidance_embeds else None,
    }


def _qwen_image(side: int, config: Any) -> dict[str, Any]:
    return {
        "hidden_states": _draw(1, (side // 16) ** 2, config.in_channels),
        "encoder_hidden_states": _draw(1, TEXT_TOKENS, config.joint_attention_dim),
        "encoder_hidden_states_mask": torch.ones(1, TEXT_TOKENS, device="cuda", dtype=torch.int64),
        "timestep": _time(),
        "img_shapes": [[(1, side // 16, side // 16)]],
    }


def _sdxl(side: int, config: Any) -> dict[str, Any]:
    text = {"text_embeds": _draw(1, 1280), "time_ids": _draw(1, 6)}
    return {
        "sample": _draw(1, config.in_channels, side // 8, side // 8),
        "timestep": _time(),
        "encoder_hidden_states": _draw(1, 77, config.cross_attention_dim),
        "added_cond_kwargs": text,
    }


def _wan(side: int, config: Any) -> dict[str, Any]:
    return {
        "hidden_states": _draw(1, config.in_channels, 1, side // 8, side // 8),
        "timestep": _time(),
        "encoder_hidden_states": _draw(1, TEXT_TOKENS, config.text_dim),
    }


DENOISERS = {
    "z-image": Denoiser("z-image-turbo--comfy-bf16", {"n_layers": 2, "n_refiner_layers": 1}, _z_image),
    "flux-1": Denoiser("flux1-dev--bfl-native", {"num_layers": 2, "num_single_layers": 2}, _flux_1),
    "flux-2": Denoiser("flux2-klein-4b--bfl-bf16", {"num_layers": 2, "num_single_layers": 2}, _flux_2),
    "qwen-image": Denoiser("qwen-image--comfy-bf16", {"num_layers": 2}, _qwen_image),
    "sdxl": Denoiser("sdxl--unet-diffusers", {}, _sdxl),
    "wan": Denoiser("wan2.1-t2v-14b--native", {"num_layers": 2}, _wan),
}
VAES = {
    "flux-1-vae": "vae-flux1--ae-ldm",
    "kl-vae": "sdxl--vae-diffusers",
    "flux-2-vae": "vae-flux2--diffusers",
    "wan-2.1-vae (picture)": "vae-qwen-image--comfy-bf16",
    "wan-2.1-vae (video)": "vae-wan2.1--native",
}


def add_options(parser: Any) -> None:
    """The options of this part."""
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of these alone (all)")
    parser.add_argument("--sides", nargs="+", type=int, default=list(SIZES), help="pixels (%(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each model at each size. One that fails is left out, and the reason kept."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in (*DENOISERS, *VAES):
        if options.models and name not in options.models:
            continue
        try:
            measured = _denoiser(name, options.sides) if name in DENOISERS else _vae(VAES[name], options.sides)
        except Exception as failure:
            failed[name] = f"{type(failure).__name__}: {failure}"
            print(f"{name} failed: {failed[name][:500]}", file=sys.stderr)
        else:
            found[name] = measured
            print(f"{name}: measured", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()
    return {"text_tokens": TEXT_TOKENS, "models": found, "failed": failed}


def _denoiser(name: str, sides: list[int]) -> dict[str, Any]:
    denoiser = DENOISERS[name]
    model, sampling = _random_model(denoiser.header, denoiser.changes)
    peaks, units = {}, {}
    for side in sides:
        inputs = denoiser.inputs(side, model.config)
        peaks[side] = _peak(lambda inputs=inputs: model(**inputs, return_dict=False))
        units[side] = tokens(ImageSize(side, side), sampling) + TEXT_TOKENS
    return {"activation_bytes_per_token": _fitted(peaks, units)}


def _vae(header: str, sides: list[int]) -> dict[str, Any]:
    model, _ = _random_model(header, {})
    config = model.config
    video = "AutoencoderKLWan" in type(model).__name__ or "Qwen" in type(model).__name__
    channels = config.z_dim if video else config.latent_channels
    frame = (1,) if video else ()
    decode, encode, units = {}, {}, {}
    for side in sides:
        latents, pixels = _draw(1, channels, *frame, side // 8, side // 8), _draw(1, 3, *frame, side, side)
        decode[side] = _peak(lambda latents=latents: model.decode(latents, return_dict=False))
        encode[side] = _peak(lambda pixels=pixels: model.encode(pixels, return_dict=False))
        units[side] = side * side
    return {"decode_bytes_per_pixel": _fitted(decode, units), "encode_bytes_per_pixel": _fitted(encode, units)}


def _fitted(peaks: dict[int, int], units: dict[int, int]) -> dict[str, Any]:
    """The coefficient that no size exceeds, and what each size has."""
    each = {side: peaks[side] / units[side] for side in peaks}
    return {"peaks": peaks, "each": each, "coefficient": max(each.values())}


@torch.no_grad()
def _peak(work: Callable[[], Any]) -> int:
    """Bytes that a call takes at most above what is there before it, after one to warm up."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        above = torch.cuda.max_memory_allocated() - before
    return above


def _random_model(header: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """A model with random weights on the GPU, and its family's facts."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.recorded import recorded, write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(recorded(header), Path(folder) / f"{header}.safetensors")
        found = slipcast.inspect(path)
        config = {name: list(value) if isinstance(value, tuple) else value for name, value in found.config.items()}
        kind: Any = model_class(slipcast.plan(path, device="cpu").origin.model)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = kind(**(config | changes)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, _DEVIATION)
    return model.to(torch.bfloat16), load_catalogue()[found.main.family].sampling


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"Peak of activations above the weights, one picture, {result['text_tokens']} tokens of text:\n")
    rows = []
    for name, coefficients in result["models"].items():
        for what, found in coefficients.items():
            peaks = " ".join(f"{peak / MIB:,.0f}" for peak in found["peaks"].values())
            each = " ".join(f"{value:,.0f}" for value in found["each"].values())
            rows.append((name, what, f"{found['coefficient']:,.0f}", each, peaks))
    sides = " ".join(
        str(side) for side in next((f["peaks"] for c in result["models"].values() for f in c.values()), {})
    )
    print_table(("", "fact", "bytes", f"at {sides}", "peak, MiB"), rows)
    for name, reason in result["failed"].items():
        print(f"\n{name} failed: {reason}")
