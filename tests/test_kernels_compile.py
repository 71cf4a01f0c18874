"""Every fused kernel compiles for every card that it may run on: Triton's compiler needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends import backends  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from slipcast.engine.kernels import dequantise_kernel, nvfp4_kernel, quantise_kernel  # noqa: E402

NVIDIA = [75, 80, 86, 89, 90, 120]
AMD = ["gfx90a", "gfx942", "gfx1100", "gfx1201"]
TARGETS = [GPUTarget("cuda", number, 32) for number in NVIDIA] + [
    GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32) for name in AMD
]
FLOATS = ["fp16", "bf16", "fp32"]


def reads_float8(target: Any) -> bool:
    return target.backend == "cuda" and target.arch >= 89


def writes_float8(target: Any) -> bool:
    return target.backend == "cuda" and target.arch >= 90


def quantising(target: Any) -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    whole, long = quantise_kernel.quantise_whole_rows, quantise_kernel.quantise_long_rows
    for kernel, sizes in ((whole, {"block": 4096}), (long, {"block": 8192, "parts": 3})):
        for dtype in FLOATS:
            signature = {"rows": f"*{dtype}", "codes": "*u8", "scales": "*fp32", "columns": "i32", "row_step": "i32"}
            signature |= {"factor": "fp32", "smallest": "fp32"}
            for static in (False, True):
                yield kernel, signature, {"static": static, "native": writes_float8(target), **sizes}


def dequantising(target: Any) -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    for dtype in FLOATS:
        for float8 in (False, True):
            codes = "*u8" if float8 else "*i8"
            signature = {"codes": codes, "scales": "*fp32", "values": f"*{dtype}", "rows": "i32", "columns": "i32"}
            chosen = {"float8": float8, "native": reads_float8(target), "block_rows": 16, "block_columns": 256}
            for one_scale in (False, True):
                yield dequantise_kernel.dequantise, signature, {"one_scale": one_scale, **chosen}


def dequantising_nvfp4(target: Any) -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    for dtype in FLOATS:
        signature = {"codes": "*u8", "scales": "*u8", "scale_2": "*fp32", "values": f"*{dtype}"}
        signature |= {"lines": "i32", "blocks": "i32", "columns": "i32"}
        for comfy in (False, True):
            constants = {"comfy": comfy, "native": reads_float8(target), "block_lines": 256}
            yield nvfp4_kernel.dequantise_nvfp4, signature, constants


def compiled(target: Any, kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> Any:
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types if name not in constants}
    aligned = {place: value for place, value in aligned.items() if types[kernel.arg_names[place[0]]] != "fp32"}
    return triton.compile(ASTSource(kernel, types, constants, aligned), target=target, options={"num_warps": 8})


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.backend}-{target.arch}")
def test_kernels_compile(target: Any) -> None:
    if ("nvidia" if target.backend == "cuda" else "amd") not in backends:
        pytest.skip("this Triton has no backend for it")
    last = "cubin" if target.backend == "cuda" else "hsaco"
    for case in (*quantising(target), *dequantising(target), *dequantising_nvfp4(target)):
        assert compiled(target, *case).asm[last], case


def test_codes_are_rounded_once_by_instructions_where_they_are_used() -> None:
    """Ada's would round float32 to float16 first, by cutting."""
    case = next(quantising(GPUTarget("cuda", 90, 32)))
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled(GPUTarget("cuda", 90, 32), *case).asm["ptx"]
    for number in (75, 80, 86, 89):
        target = GPUTarget("cuda", number, 32)
        text = compiled(target, *next(quantising(target))).asm["ptx"]
        assert "e4m3" not in text
        assert "cvt.rz.f16" not in text


@pytest.mark.parametrize("number", NVIDIA)
def test_quotients_are_rounded_as_torch_rounds_them(number: int) -> None:
    """Not by an approximate division, and tiny ones not to zero."""
    target = GPUTarget("cuda", number, 32)
    text = compiled(target, *next(quantising(target))).asm["ptx"]
    assert "div.rn.f32" in text
    assert "div.full" not in text
    assert ".ftz" not in text


def test_a_row_is_read_once() -> None:
    target = GPUTarget("cuda", 90, 32)
    text = compiled(target, *next(quantising(target))).asm["ptx"]
    # 4096 elements of 16 bits by 256 threads: two reads of 8 elements each.
    assert text.count("ld.global") == 2
