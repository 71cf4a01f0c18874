"""Does to a pipeline what the policies decided, and says what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipcast.engine.compiled_blocks import CompiledBlocks, compile_blocks_
from slipcast.engine.policy.global_flags import Tf32
from slipcast.engine.policy.memory import MemoryDecision
from slipcast.engine.policy.parts import denoises, streamed_paths
from slipcast.engine.policy.speed import SpeedDecision
from slipcast.engine.policy.vae import VaeWay
from slipcast.engine.policy.vae_calls import VaeCalls, set_tile_side_
from slipcast.engine.policy.visiting import Turns, Visitor, visit_
from slipcast.registry.runtime import Runtime, Sampling


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done to a pipeline.

    Attributes:
        vae_calls: how its VAE runs; None where it has none.
        tf32: the flags that it holds; None where it set none.
        compiled_decode: what says how the VAE's decoder runs; None where it is not compiled.
    """

    vae_calls: VaeCalls | None
    tf32: Tf32 | None
    compiled_decode: CompiledBlocks | None

    def release(self) -> None:
        """Restore what is global: on unload, and after a failure."""
        if self.tf32 is not None:
            self.tf32.release()


def place_(
    pipe: Any, decision: MemoryDecision, device: torch.device, runtimes: Mapping[str, Runtime], sampling: Sampling
) -> dict[str, Visitor]:
    """Put the models of a pipeline where they were decided to lie.

    Args:
        pipe: with what stays on the device there, and the rest on the host.
        decision: where the models lie.
        device: what the pipeline computes on.
        runtimes: role -> its family's facts, of what is streamed.
        sampling: the denoiser's family's facts.

    Returns:
        role -> what brings it to the device, of those that come as a whole.
    """
    from slipcast.engine.policy.streaming import stream_

    turns = Turns()
    visitors = {}
    for role, placement in decision.placements.items():
        model = pipe.components[role]
        if placement == "streamed":
            paths = streamed_paths(role, model, runtimes[role], sampling)
            stream_(model, paths, device, whole_blocks=denoises(role, sampling))
        elif placement in ("moved", "in_turn"):
            visitors[role] = visit_(model, device, turns if placement == "in_turn" else None)
    return visitors


def apply_vae_(
    vae: Any, encode: VaeWay | None, decode: VaeWay | None, tile_size: int, visitor: Visitor | None
) -> VaeCalls:
    """Let a VAE encode and decode as decided.

    Args:
        vae: the pipeline's.
        encode: how it encodes; None: as it does by itself.
        decode: how it decodes.
        tile_size: pixels of a tile along each side; 0: as it has them.
        visitor: what brings it to the device, if it is not there.

    Returns:
        What it runs by.
    """
    set_tile_side_(vae, tile_size)
    return VaeCalls(vae, {"encode": encode, "decode": decode}, visitor)


def apply_speed_(pipe: Any, decision: SpeedDecision) -> tuple[Tf32 | None, CompiledBlocks | None]:
    """Do what was decided for speed; blocks of denoisers are compiled as they are loaded, by their own plans.

    Call it before models are placed. TF32 stays until it is released, or the pipeline's denoiser is gone.
    """
    vae = pipe.components.get("vae")
    if decision.channels_last and vae is not None:
        vae.to(memory_format=torch.channels_last)
    for role in decision.fuse:
        pipe.components[role].fuse_qkv_projections()
    compiled = None
    if decision.compile_decode and vae is not None:
        compiled = compile_blocks_(vae, [type(vae.decoder).__name__], "blocks")
    return (Tf32() if decision.tf32 else None), compiled
