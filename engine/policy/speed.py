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
    """What a denoiser is planned with as ``compile``: that setting, or blocks where the speed takes them on a GPU."""
    return "blocks" if speed != "off" and compile_ == "off" and device.kind != "cpu" else compile_


def decide_speed(
    mode: Mode, device: Device, denoisers: Mapping[str, Plan], vae: Plan | None, *, room: int, resident: bool
) -> SpeedDecision:
    """What is done for speed, after the placement is decided.

    Args:
        mode: the setting ``speed``.
        device: what the pipeline computes on.
        denoisers: role -> plan, with ``compile`` decided.
        vae: the VAE's plan, if slipcast loads it.
        room: bytes of the device that are left at the peak.
        resident: whether all stays on the device.
    """
    if mode == "off":
        off = Decision(requested="off", engaged="off", reason="as requested: the bits of the plain pipeline")
        return SpeedDecision(False, False, (), False, off)
    done: list[str] = []
    why: list[str] = []
    flat = vae is not None and all(len(target.shape) != 5 for target in vae.targets)
    _note(flat, "channels-last VAE", "the VAE convolves in three dimensions, or its own library loads it", done, why)
    gguf = any(is_gguf(plan) for plan in denoisers.values())
    compiled = any(plan.compiled for plan in denoisers.values())
    decode = gguf and not compiled and vae is not None and device.kind != "cpu"
    if decode:
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


def without_compile(plan: Plan, reason: str) -> Plan:
    """A plan whose blocks are not compiled after all."""
    decision = plan.settings["compile"].model_copy(update={"engaged": "off", "reason": reason})
    return plan.model_copy(update={"compiled": (), "settings": {**plan.settings, "compile": decision}})


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
