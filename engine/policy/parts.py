"""What the memory policy needs to know of a model: bytes of its weights, of the blocks that stream, of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from slipcast.engine.build import build_on_meta
from slipcast.engine.plan import Plan, Stored, Target
from slipcast.engine.policy.activations import denoiser_bytes, encoder_bytes, lookup_bytes
from slipcast.engine.policy.memory import Part
from slipcast.engine.policy.sizes import ImageSize
from slipcast.registry.runtime import Offload, Runtime, Sampling

STREAMED_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    nn.Embedding,
)
"""The layers that hold nearly all weights of a text encoder, as diffusers' group offloading moves them too."""


def part_of_plan(role: str, plan: Plan, runtime: Runtime, sampling: Sampling, size: ImageSize) -> Part:
    """A denoiser, text encoder or other model that slipcast loads.

    Args:
        role: the pipeline's name of it.
        plan: of its load.
        runtime: its family's facts.
        sampling: the denoiser's family's facts.
        size: what is drawn.
    """
    sizes = stored_bytes(plan)
    if denoises(role, sampling):
        names = streamed_paths(role, build_on_meta(plan.origin.model, plan.origin.config), runtime, sampling)
        activations, measured = denoiser_bytes(plan, runtime, sampling, size)
        return Part(role, "denoiser", sum(sizes.values()), _grouped(sizes, names), activations, measured)
    if role.startswith("text_encoder"):
        return _text_encoder(role, plan, runtime, sampling, size, sizes)
    return Part(role, "vae" if role == "vae" else "other", sum(sizes.values()))


def _text_encoder(
    role: str, plan: Plan, runtime: Runtime, sampling: Sampling, size: ImageSize, sizes: dict[str, int]
) -> Part:
    model = build_on_meta(plan.origin.model, plan.origin.config)
    tables = tables_of(model)
    layers = [name for name in streamed_paths(role, model, runtime, sampling) if name not in tables]
    activations, measured = encoder_bytes(plan, runtime, size)
    return Part(
        role,
        "text_encoder",
        sum(sizes.values()),
        _grouped(sizes, layers),
        activations,
        measured,
        table_bytes=_grouped(sizes, tables),
        lookup_bytes=lookup_bytes(plan, [tables[name] for name in tables], size),
    )


def denoises(role: str, sampling: Sampling) -> bool:
    """Whether a role is the denoiser's, or that of the second of two."""
    return role in (sampling.denoiser, f"{sampling.denoiser}_2")


def streamed_paths(role: str, model: nn.Module, runtime: Runtime, sampling: Sampling) -> tuple[str, ...]:
    """Paths of what comes to the device one by one: a denoiser's blocks, of other models their layers.

    Args:
        role: the pipeline's name of the model.
        model: the model, or one like it on the meta device.
        runtime: its family's facts.
        sampling: the denoiser's family's facts.
    """
    if not denoises(role, sampling):
        return layers_of(model)
    return blocks_of(model, runtime.offload) if runtime.offload is not None else ()


def blocks_of(model: nn.Module, offload: Offload) -> tuple[str, ...]:
    """Paths of the blocks of the lists that a family names, of those that have weights."""
    names = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    return tuple(dict.fromkeys(block for name in names if (block := offload.block_of(name)) is not None))


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """Paths of the layers that come one by one where a model is not streamed by blocks."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, STREAMED_LAYERS))


def tables_of(model: nn.Module) -> dict[str, int]:
    """Path -> width of the tables that a text encoder looks its input up in: those outside its repeated blocks."""
    return {
        name: module.embedding_dim
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not any(part.isdecimal() for part in name.split("."))
    }


def stored_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of each tensor of the loaded model that takes memory of its own; a view of the mapped file takes none."""
    return {stored.name: stored.nbytes for target in plan.targets for stored in _own(target)}


def _own(target: Target) -> tuple[Stored, ...]:
    return target.stored[1:] if target.mapped else target.stored


def _grouped(sizes: dict[str, int], paths: Iterable[str]) -> tuple[int, ...]:
    """Bytes under each path that has any."""
    found = dict.fromkeys(paths, 0)
    for name, nbytes in sizes.items():
        owner = next((path for path in _parents(name) if path in found), None)
        if owner is not None:
            found[owner] += nbytes
    return tuple(nbytes for nbytes in found.values() if nbytes)


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
