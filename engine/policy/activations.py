"""What activations take: the family's measured coefficient, or a high guess from the widths of the model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from slipcast.engine.plan import Plan
from slipcast.engine.policy.sizes import ImageSize, tokens
from slipcast.registry.runtime import Runtime, Sampling

TEXT_TOKENS = 512
"""Tokens of a prompt: what most pipelines cut it to."""

_WIDTHS = {"denoiser": 8, "text_encoder": 16}
"""Where nobody measured: so many times the widest layer for each token. A block holds its input, its queries, keys and
values, their rotated copies, and the inner product of its MLP twice; an encoder also the states of all its layers."""
_DECODE_BYTES, _ENCODE_BYTES = 6144, 3072
"""Where nobody measured: for each pixel, in a dtype of two bytes. A decoder ends in two tensors of 256 and four of 128
channels at full size, normalised in float32; an encoder starts with half of that."""


def denoiser_batch(sampling: Sampling, config: Mapping[str, Any]) -> int:
    """How many pictures a denoiser works on for each one that is drawn: guidance draws another beside it.

    Not where the strength of guidance is an input of the model.
    """
    guided = sampling.guidance is not None and sampling.guidance > 1
    return 2 if guided and not config.get("guidance_embeds") else 1


def denoiser_bytes(plan: Plan, runtime: Runtime, sampling: Sampling, size: ImageSize) -> tuple[int, bool]:
    """Peak of a denoiser's activations in bytes, and whether that rests on a measurement."""
    sequence = tokens(size, sampling) + TEXT_TOKENS * size.batch
    per_token = runtime.activation_bytes_per_token
    each = _coefficient(plan, "denoiser") if per_token is None else per_token * _item_size(plan) / 2
    work = round(each * sequence * denoiser_batch(sampling, plan.origin.config))
    return work + dequantised_bytes(plan), per_token is not None


def encoder_bytes(plan: Plan, runtime: Runtime, size: ImageSize) -> tuple[int, bool]:
    """Peak of a text encoder's activations in bytes, and whether that rests on a measurement."""
    per_token = runtime.activation_bytes_per_token
    each = _coefficient(plan, "text_encoder") if per_token is None else per_token * _item_size(plan) / 2
    return round(each * TEXT_TOKENS * size.batch) + dequantised_bytes(plan), per_token is not None


def lookup_bytes(plan: Plan, widths: Sequence[int], size: ImageSize) -> int:
    """Peak of a text encoder's activations in bytes while it looks its input up: a row for each token, and a copy."""
    return 2 * TEXT_TOKENS * size.batch * sum(widths) * _item_size(plan)


def vae_bytes_per_pixel(runtime: Runtime | None, item_size: int) -> tuple[float, float, bool]:
    """Bytes for each pixel that is decoded and encoded at a time, and whether both were measured."""
    decode = runtime.decode_bytes_per_pixel if runtime is not None else None
    encode = runtime.encode_bytes_per_pixel if runtime is not None else None
    scale = item_size / 2
    measured = decode is not None and encode is not None
    return (decode or _DECODE_BYTES) * scale, (encode or _ENCODE_BYTES) * scale, measured


def dequantised_bytes(plan: Plan) -> int:
    """Bytes of the largest quantised weight in the compute dtype: layers decode theirs one after another."""
    quantised = (target.shape for target in plan.targets if target.codec is not None)
    return max((_elements(shape) for shape in quantised), default=0) * _item_size(plan)


def _coefficient(plan: Plan, kind: str) -> int:
    return _WIDTHS[kind] * max(_widths(plan), default=0) * _item_size(plan)


def _widths(plan: Plan) -> Iterator[int]:
    """Inputs and outputs of the layers, but of tables, of which only rows are looked up, and of their transposes."""
    layers = {module.path for module in plan.modules if not module.kind.endswith("Embedding")}
    shapes = {target.name: target.shape for target in plan.targets if target.how != "tie"}
    tables = {shape for name, shape in shapes.items() if _owner(name) not in layers}
    for name, shape in shapes.items():
        if len(shape) >= 2 and shape not in tables and _owner(name) in layers:
            yield max(shape[:2])


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _item_size(plan: Plan) -> int:
    size: int = getattr(torch, plan.compute_dtype).itemsize
    return size
