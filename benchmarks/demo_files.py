"""The demonstration's pipeline as a folder that diffusers loads, and how many of its digits are recognised."""

from __future__ import annotations

import copy
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from demo_prompts import UNSEEN, build_tokenizer
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from safetensors.torch import save_file
from torch import nn
from train_digits import DATA, SAMPLED, round_to_fp8
from transformers import Qwen3Model

from slipcast.demo.prompted import NAMES, draw
from slipcast.demo.recognise import as_recognised, count_recognised, train_recogniser

SHIFT = 3.0
"""Of the scheduler: most steps go where there is much noise, for latents say early what they show."""
MODEL_INDEX = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": diffusers.__version__,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
METADATA = {
    "license": "Apache-2.0",
    "description": "Part of a small pipeline that draws handwritten digits, trained with benchmarks/train_demo.py.",
    "training_data": DATA,
}


def write(
    folder: Path, encoder: Qwen3Model, encoder_config: dict[str, Any], denoiser: nn.Module, vae: nn.Module
) -> None:
    """Write the pipeline's folder, weights in bfloat16: each file in a folder beside it first, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        partial = Path(name)
        _write_json(partial / "model_index.json", MODEL_INDEX)
        FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT).save_pretrained(partial / "scheduler")
        build_tokenizer().save_pretrained(partial / "tokenizer")
        for part, model in (("transformer", denoiser), ("vae", vae)):
            model.save_config(partial / part)  # type: ignore[operator]  # diffusers' models have it
        _write_json(partial / "text_encoder" / "config.json", encoder_config)
        # The names of the published encoders, which have an output matrix beside the model.
        encoder_state = {f"model.{key}": value for key, value in encoder.state_dict().items()}
        for part, state in (
            ("transformer", denoiser.state_dict()),
            ("vae", vae.state_dict()),
            ("text_encoder", encoder_state),
        ):
            tensors = {key: value.detach().cpu().bfloat16().contiguous() for key, value in state.items()}
            save_file(tensors, partial / part / WEIGHTS[part], {"format": "pt", **METADATA})
        total = 0
        for path in sorted(path for path in partial.rglob("*") if path.is_file()):
            target = folder / path.relative_to(partial)
            target.parent.mkdir(exist_ok=True)
            path.replace(target)
            total += target.stat().st_size
            print(f"wrote {target}, {target.stat().st_size:,} bytes")
    print(f"in all {total:,} bytes")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> ZImagePipeline:
    """The written folder as diffusers and transformers load it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = ZImagePipeline.from_pretrained(folder, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def check(folder: Path, device: torch.device, seed: int) -> None:
    """Count the recognised samples: in float32, in bfloat16, with weights rounded to fp8, and in unseen sentences."""
    recogniser = train_recogniser()
    names = [NAMES[digit] for digit in SAMPLED]
    sentences = [UNSEEN[index % len(UNSEEN)].format(name) for index, name in enumerate(names)]
    for title, dtype, rounded, prompts in (
        ("float32", torch.float32, (), names),
        ("bfloat16", torch.bfloat16, (), names),
        ("bfloat16, sentences never seen", torch.bfloat16, (), sentences),
        ("float32, fp8 denoiser", torch.float32, ("transformer",), names),
        ("float32, fp8 encoder", torch.float32, ("text_encoder",), names),
        ("float32, fp8 both", torch.float32, ("transformer", "text_encoder"), names),
    ):
        started = time.perf_counter()
        pipeline = load(folder, dtype, device)
        for part in rounded:
            setattr(pipeline, part, round_to_fp8(copy.deepcopy(getattr(pipeline, part))))
        recognised = count_recognised(recogniser, as_recognised(draw(pipeline, prompts, seed=seed)), SAMPLED)
        print(f"{title}: recognised {recognised} of {len(SAMPLED)}  {time.perf_counter() - started:.0f} s", flush=True)
