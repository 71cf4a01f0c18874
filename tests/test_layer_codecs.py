"""Layers of every codec: they compute, copy, load and compile as those of float8 rows do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.codecs.gguf import GGUF
from slipcast.engine.codecs.int8 import Int8
from slipcast.engine.codecs.mxfp8 import MXFP8
from slipcast.engine.codecs.nvfp4 import NVFP4
from slipcast.engine.layers import (
    QuantisedModule,
    quantise_module_,
)
from slipcast.registry.errors import QuantisationError
from support.layer_cases import (
    CASTS,
    COPIES,
    ROW,
    dequantised,
    layer_input,
    plain_layer,
    quantised,
)
from support.number_formats import bytes_of

CODECS = [
    ROW,
    Float8("tensor"),
    Float8("none"),
    Float8("block", block=4),
    Int8(),
    Int8("tensor"),
    Int8(rotation=16),
    MXFP8(),
    NVFP4("comfy"),
    NVFP4("linear"),
]


def bits_of(layer: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor).tobytes() for name, tensor in layer.state_dict().items() if name != "bias"}


def filled_with_gguf_blocks(kind: str) -> QuantisedModule:
    """A layer as the loader makes one: GGUF is never encoded."""
    layer = quantise_module_(plain_layer(kind).to("meta"), GGUF("Q8_0"), torch.float32)
    blocks = torch.randint(0, 256, (8, 34), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[:, :2] = torch.full((8, 1), 0.01, dtype=torch.float16).view(torch.uint8)
    layer.set_weight({"weight": blocks.reshape(layer.expected_tensors()["weight"].shape)})
    return layer


@pytest.mark.parametrize("codec", [*CODECS, GGUF("Q8_0")], ids=lambda codec: codec.name)
def test_every_codec_works_in_a_layer(codec: Codec) -> None:
    kind = "linear without bias"
    layer = filled_with_gguf_blocks(kind) if codec == GGUF("Q8_0") else quantised(kind, codec, torch.float32)
    given_input, before = layer_input(kind), bits_of(layer)
    result = layer(given_input)
    assert torch.equal(result, dequantised(layer)(given_input))
    copies = [way(layer) for way in (copy.deepcopy, COPIES["pickle"], COPIES["torch.save"])]
    casts = [cast(copy.deepcopy(layer)).float() for cast, _ in CASTS.values()]
    loaded = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    loaded.load_state_dict(layer.state_dict())
    for other in (*copies, *casts, loaded):
        assert bits_of(other) == before
        assert torch.equal(other(given_input), result)
    float_weight = plain_layer(kind, seed=3).state_dict()
    if codec.encodes:
        layer.load_state_dict(float_weight)
        assert bits_of(layer) == bits_of(quantised(kind, codec, seed=3))
    else:
        with pytest.raises(RuntimeError, match="can only be read"):
            layer.load_state_dict(float_weight)
        assert bits_of(layer) == before


@pytest.mark.parametrize("codec", [*CODECS, GGUF("Q8_0")], ids=lambda codec: codec.name)
def test_only_codecs_of_single_rows_store_embeddings(codec: Codec) -> None:
    plain = nn.Embedding(16, 32)
    if codec.name.startswith(("float8", "int8")):
        expected = codec.decode(codec.encode(plain.weight), (16, 32), torch.float32)
        layer = quantise_module_(plain, codec, torch.float32)
        assert torch.equal(layer(torch.tensor([3, 15])), expected[[3, 15]])
    else:
        with pytest.raises(QuantisationError, match=rf"rows of {codec.name} can't be decoded by themselves"):
            quantise_module_(plain, codec, torch.float32)


@pytest.mark.parametrize(
    "codec", [Int8(rotation=16), MXFP8(), NVFP4("comfy"), GGUF("Q8_0")], ids=lambda codec: codec.name
)
def test_layers_of_every_codec_compile_without_a_graph_break(codec: Codec) -> None:
    kind = "linear without bias"
    layer = filled_with_gguf_blocks(kind) if codec == GGUF("Q8_0") else quantised(kind, codec, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(layer_input(kind)), layer(layer_input(kind)))
    assert torch.equal(layer(layer_input(kind)), dequantised(layer)(layer_input(kind)))
