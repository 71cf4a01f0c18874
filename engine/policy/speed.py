"""How far a pipeline is sped up: what each mode takes, and what stands in its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from slipcast.engine.build import build_on_meta
from slipcast.engine.devices import Device
from slipcast.engine.plan import Decision, Plan

Mode = Literal["off", "default", "max"]
_TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class SpeedDecision:
    """What is done for speed.

    Attributes:
        channels_last: whether the VAE's convolutions keep channels last.
        compile_decode: whether the VAE's decoder is compiled, in place of the denoiser's blocks.
        fuse: roles whose query, key and value projections become one.
        tf32: whether products of float32 are made in TF32.
        decision: requested, engaged, and why not more.
    """

    channels_last: bool
    compile_decode: bool
    fuse: tuple[str, ...]
    tf32: bool
    decision: Decision


def compile_request(speed: Mode, compile_: str, device: Device) -> str:
    """What a denoiser is planned with as ``compile``: that setting; for auto blocks where speed takes them on a GPU."""
    return "blocks" if speed != "off" and compile_ == "auto" and device.kind != "cpu" else compile_


def decide_speed(
    mode: Mode,
    device: Device,
    denoisers: Mapping[str, Plan],
    vae: Plan | None,
    *,
    compile_: str = "auto",
    room: int,
    resident: bool,
) -> SpeedDecision:
    """What is done for speed, after the placement is decided.

    Args:
        mode: the setting ``speed``.
        device: what the pipeline computes on.
        denoisers: role -> plan, with ``compile`` decided.
        vae: the VAE's plan, if slipcast loads it.
        compile_: the setting ``compile``, which wins over the speed where it is not auto.
        room: bytes of the device that are left at the peak.
        resident: whether all stays on the device.
    """
    compiled = any(plan.compiled for plan in denoisers.values())
    if mode == "off":
        plain = f"blocks are compiled, as compile={compile_} asks for" if compiled else "the bits of the plain pipeline"
        off = Decision(requested="off", engaged="off", reason=f"as requested: {plain}")
        return SpeedDecision(False, False, (), False, off)
    done: list[str] = []
    why: list[str] = []
    flat = vae is not None and all(len(target.shape) != 5 for target in vae.targets)
    _note(flat, "channels-last VAE", "the VAE convolves in three dimensions, or its own library loads it", done, why)
    gguf = any(is_gguf(plan) for plan in denoisers.values())
    decode = gguf and not compiled and vae is not None and device.kind != "cpu" and compile_ == "auto"
    if compile_ == "off":
        why.append("nothing is compiled, as compile=off was requested, which wins over speed")
    elif decode:
        done.append("compiled decode")
        why.append("the weights are GGUF, whose blocks are not compiled")
    else:
        reason = "; ".join(dict.fromkeys(plan.settings["compile"].reason for plan in denoisers.values()))
        _note(
            compiled, "compiled blocks", "blocks are compiled on a GPU" if device.kind == "cpu" else reason, done, why
        )
    tf32, fuse = False, tuple[str, ...]()
    if mode == "max":
        tf32 = device.backend == "cuda" and device.capability is not None and device.capability >= _TF32_CAPABILITY
        _note(tf32, "TF32", f"{device.label} has no TF32", done, why)
        fuse, obstacle = _fused(denoisers, room=room, resident=resident)
        _note(bool(fuse), "fused projections", obstacle, done, why)
    decision = Decision(requested=mode, engaged=", ".join(done) or "off", reason="; ".join(why) or "as requested")
    return SpeedDecision(flat, decode, fuse, tf32, decision)


def is_gguf(plan: Plan) -> bool:
    """Whether weights stay in the codes of GGUF."""
    return "gguf" in plan.precisions


def compiled_by_speed(plan: Plan, speed: Mode) -> Plan:
    """A denoiser's plan that leaves compilation to the speed: it says so, and compiles no blocks of GGUF."""
    found = plan.settings["compile"]
    if plan.compiled and is_gguf(plan):
        why = f"weights are GGUF: with speed={speed} only the VAE's decode is compiled"
        plan, engaged = plan.model_copy(update={"compiled": ()}), "off"
    elif found.requested == "auto":
        why, engaged = f"speed={speed} compiles blocks on a GPU alone", "off"
    else:
        why, engaged = f"by speed={speed}: {found.reason.removeprefix('as requested: ')}", found.engaged
    decision = Decision(requested="auto", engaged=engaged, reason=why)
    return plan.model_copy(update={"settings": {**plan.settings, "compile": decision}})


def _fused(denoisers: Mapping[str, Plan], *, room: int, resident: bool) -> tuple[tuple[str, ...], str]:
    """Roles whose projections are fused, or why none is. The fused ones lie beside those that they are made of."""
    if any(module.codec is not None for plan in denoisers.values() for module in plan.modules):
        return (), "quantised layers are not fused"
    if not resident:
        return (), "projections are fused only where everything stays on the device"
    added = {role: fused_bytes(plan) for role, plan in denoisers.items()}
    if not any(added.values()):
        return (), "the class fuses no projections"
    if sum(added.values()) > room:
        return (), f"the fused ones would take {sum(added.values()) / 2**20:,.0f} MiB more than fit"
    return tuple(role for role, nbytes in added.items() if nbytes), ""


def fused_bytes(plan: Plan) -> int:
    """Bytes that fusing a model's query, key and value projections adds."""
    model = build_on_meta(plan.origin.model, plan.origin.config)
    fuse = getattr(model, "fuse_qkv_projections", None)
    if fuse is None:
        return 0
    before = {name for name, _ in model.named_parameters()}
    fuse()
    item_size = _item_size(plan)
    return sum(tensor.numel() for name, tensor in model.named_parameters() if name not in before) * item_size


def _item_size(plan: Plan) -> int:
    """Bytes of an element in the compute dtype."""
    size: int = getattr(torch, plan.compute_dtype).itemsize
    return size


def _note(engaged: bool, what: str, obstacle: str, done: list[str], why: list[str]) -> None:
    if engaged:
        done.append(what)
    elif obstacle:
        why.append(f"no {what}: {obstacle}")
