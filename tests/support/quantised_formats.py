"""Decoders of quantised formats, written from the formats' descriptions with numpy, independently of the engine."""

from __future__ import annotations

import numpy as np

from support.number_formats import e4m3, small_float


def e2m1(codes: np.ndarray) -> np.ndarray:
    """4-bit floats: 1-2-1, bias 1, no special values, largest 6."""
    return small_float(codes, 2, 1, 1)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """Powers of two with bias 127; 0 marks a block of zeros."""
    return np.where(codes == 0, 0.0, np.exp2(codes.astype(np.float64) - 127))


def scale_grid(stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Bytes of the scales of so many rows and block columns, at the places that cuBLAS's swizzled order gives them."""
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    tiles = stored.shape[1] // 4
    return stored.reshape(-1)[((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4]


def mxfp8(codes: np.ndarray, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """float64 ``[rows, columns]`` from codes and swizzled scales, both as bytes."""
    scales = e8m0(scale_grid(scale, rows, -(-columns // 32)))
    return (e4m3(codes)[:rows] * np.repeat(scales, 32, axis=1)[:, : codes.shape[1]])[:, :columns]


def nvfp4(codes: np.ndarray, scale: np.ndarray, scale_2: float, rows: int, columns: int, comfy: bool) -> np.ndarray:
    """float64 ``[rows, columns]`` from bytes of two codes, bytes of the blocks' scales, and the weight's scale."""
    unpacked = np.empty((codes.shape[0], codes.shape[1] * 2), np.uint8)
    unpacked[:, 0::2] = codes >> 4 if comfy else codes & 15
    unpacked[:, 1::2] = codes & 15 if comfy else codes >> 4
    grid = scale_grid(scale, rows, -(-columns // 16)) if comfy else scale
    scales = np.repeat(e4m3(grid), 16, axis=1)
    return (e2m1(unpacked)[:rows, :columns] * scales[:, :columns]) * scale_2


def hadamard(size: int) -> np.ndarray:
    """ConvRot's matrix by its entries: a product over base-4 digits of row and column, over the root of the size."""
    regular = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64)
    row, column = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    matrix = np.ones((size, size))
    digit = 1
    while digit < size:
        matrix *= regular[row // digit % 4, column // digit % 4]
        digit *= 4
    return matrix / np.sqrt(size)


def int8(codes: np.ndarray, scale: np.ndarray, group: int = 0) -> np.ndarray:
    """float64 from int8 codes and a scalar or ``[N]`` scale, rotated back if there is a group."""
    values = codes.astype(np.float64) * (scale if scale.ndim == 0 else scale.reshape(-1, *[1] * (codes.ndim - 1)))
    if not group:
        return values
    return (values.reshape(codes.shape[0], -1, group) @ hadamard(group)).reshape(codes.shape)
