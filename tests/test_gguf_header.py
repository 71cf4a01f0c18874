"""Headers of GGUF files, against the gguf package."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.errors import HeaderError, SlipcastError, UnsupportedFormatError
from slipcast.registry.ggml import BLOCK_TYPES
from slipcast.registry.gguf_header import original_shape, read_gguf
from slipcast.registry.quantisation import assemble, count_formats

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")


def write_gguf(path, kinds=KINDS, shape=(8, 512), **arrays):
    writer = gguf.GGUFWriter(path, "wan")
    for index, name in enumerate(kinds):
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        codes = np.full((shape[0], shape[1] // block * size), index + 1, np.uint8)
        writer.add_tensor(f"blocks.{index}.weight", codes, raw_dtype=kind)
    for key, values in arrays.items():
        writer.add_array(key.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_what_the_gguf_package_reads(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tokenizer__ggml__tokens=["a"] * 100)
    header = read_checkpoint(path).headers[""]
    reader = gguf.GGUFReader(path)
    assert header.container == "gguf"
    assert header.metadata["general.architecture"] == "wan"
    assert "tokenizer.ggml.tokens" not in header.metadata
    ours = {t.name: (t.dtype, t.shape, t.start, t.nbytes) for t in header.tensors.values()}
    assert ours == {
        t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data_offset, t.n_bytes)
        for t in reader.tensors
    }


def test_every_block_type_of_the_gguf_package_is_known():
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.name, kind.elements, kind.nbytes) for number, kind in BLOCK_TYPES.items()} == theirs


def test_weights_are_counted_by_format_and_keep_their_original_shape(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", ("F16", "Q4_0"), comfy__gguf__orig_shape__blocks__1__weight=[8, 32, 4, 4])
    bundles = assemble(read_gguf(path)).weights
    assert count_formats(bundles.values()) == {"plain": 1, "gguf": 1}
    assert bundles["blocks.1.weight"].shape == (8, 32, 4, 4)
    assert bundles["blocks.0.weight"].shape == (8, 512)


def test_an_original_shape_of_other_elements_is_not_believed(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", ("F16", "Q4_0"), comfy__gguf__orig_shape__blocks__1__weight=[8, 32, 4, 5])
    assert assemble(read_gguf(path)).weights["blocks.1.weight"].shape == (8, 512)


def test_a_plain_tensor_has_its_original_shape_too(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", ("F16",), comfy__gguf__orig_shape__blocks__0__weight=[8, 32, 4, 4])
    bundle = assemble(read_gguf(path)).weights["blocks.0.weight"]
    assert (bundle.format, bundle.shape) == ("plain", (8, 32, 4, 4))


@pytest.mark.parametrize("text", ["[8, -1]", "8", "[8.5]", "not json", "[true]"])
def test_an_original_shape_that_makes_no_sense_is_not_believed(text):
    assert original_shape({"comfy.gguf.orig_shape.a": text}, "a") is None


def test_an_unknown_type_is_refused_by_number(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", ("Q8_0",))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blocks.0.weight") + len(b"blocks.0.weight") + 4 + 16
    raw[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(raw)
    with pytest.raises(UnsupportedFormatError, match="ggml type 999"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], "1 bytes of the tensor 'blocks.0.weight' are missing"),
        (lambda raw: raw[:30], "past the end of the header"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "GGUF of version 1"),
        (lambda raw: raw[:8] + struct.pack("<Q", 1 << 63) + raw[16:], "tensors and"),
        (lambda raw: raw[:24] + struct.pack("<Q", 1 << 62) + raw[32:], "past the end of the header"),
        (lambda raw: b"GGML" + raw[4:], "does not begin with GGUF"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    path = write_gguf(tmp_path / "m.gguf", ("Q8_0",), (1, 32))
    raw = path.read_bytes()
    path.write_bytes(change(raw.rstrip(b"\0")))
    with pytest.raises(HeaderError, match=message):
        read_gguf(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_raises_anything_else(tmp_path_factory, data):
    path = write_gguf(tmp_path_factory.mktemp("g") / "m.gguf", ("Q8_0", "F16"), (2, 64))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 400)) % len(raw)] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        header = read_gguf(path)
    except SlipcastError:
        return
    assert all(0 <= tensor.start <= tensor.stop <= len(raw) for tensor in header.tensors.values())
