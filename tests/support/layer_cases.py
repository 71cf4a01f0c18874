"""One layer of each kind that can be quantised, plain and quantised, its input, and ways to cast and copy it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slipcast.engine.codecs.base import Codec
from slipcast.engine.codecs.float8 import Float8
from slipcast.engine.layers import QUANTISED_CLASSES, QuantisedModule, quantise_module_, weight_shape
from support.number_formats import bytes_of

Make = Callable[[], nn.Module]

LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 16), (3, 5, 24)),
    "linear without bias": (lambda: nn.Linear(16, 16, bias=False), (4, 16)),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3, padding=1, padding_mode="reflect"), (2, 8, 10)),
    "conv2d": (lambda: nn.Conv2d(8, 12, (3, 2), stride=2, groups=4), (2, 8, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, dilation=2), (1, 4, 5, 5, 5)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(8, 6, 3, stride=2, output_padding=1), (2, 8, 7)),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(8, 12, 3, groups=2, padding=1), (2, 8, 5, 5)),
    "conv transpose 3d": (lambda: nn.ConvTranspose3d(4, 4, 2, bias=False), (1, 4, 3, 3, 3)),
    "embedding": (lambda: nn.Embedding(20, 16, padding_idx=3), (2, 6)),
}
KINDS = list(LAYERS)
ROW = Float8("row")


def plain_layer(kind: str, seed: int = 0) -> nn.Module:
    """A new layer with random weights of uneven rows."""
    layer = LAYERS[kind][0]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.mul_(torch.logspace(-2, 2, parameter.shape[0]).reshape(-1, *[1] * (parameter.ndim - 1)))
    return layer.eval()


def layer_input(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input that the layer takes."""
    shape = LAYERS[kind][1]
    generator = torch.Generator().manual_seed(1)
    if kind == "embedding":
        return torch.randint(0, 20, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def quantised(kind: str, codec: Codec = ROW, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QuantisedModule:
    return quantise_module_(plain_layer(kind, seed), codec, dtype)


def weight_bits(layer: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    assert isinstance(layer, QuantisedModule)
    tensors = {name: getattr(layer, name) for name in layer.expected_tensors()}
    assert "weight_scale" in tensors
    return {name: (tensor.dtype, tuple(tensor.shape), bytes_of(tensor).tobytes()) for name, tensor in tensors.items()}


def dequantised(layer: QuantisedModule) -> nn.Module:
    """The plain layer that holds the decoded weight: what a quantised one must compute."""
    bases = {new: old for old, new in QUANTISED_CLASSES.items()}
    plain = copy.deepcopy(layer)
    weight = layer.codec.decode(layer.parts(), weight_shape(layer), torch.float32).to(layer.compute_dtype)
    plain.__class__ = bases[type(layer)]
    for name in layer.expected_tensors():
        plain._buffers.pop(name, None)
    plain._parameters["weight"] = nn.Parameter(weight)
    return plain


CASTS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.float16), torch.float16),
    "to device and dtype": (lambda m: m.to("cpu", torch.float32), torch.float32),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "type by name": (lambda m: m.type("torch.DoubleTensor"), torch.float64),
}


def through_torch_save(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_state_dict(layer: nn.Module, assign: bool = False, strict: bool = True) -> nn.Module:
    other = copy.deepcopy(layer)
    for name in other.expected_tensors():
        bits = getattr(other, name).data.view(torch.uint8)
        bits.copy_(bits + 1)
    assert weight_bits(other) != weight_bits(layer)
    result = other.load_state_dict(layer.state_dict(), strict=strict, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    return other


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "old pickle": lambda layer: pickle.loads(pickle.dumps(layer, protocol=2)),
    "torch.save": through_torch_save,
    "state dict": through_state_dict,
    "state dict, assigned": lambda layer: through_state_dict(layer, assign=True),
    "state dict, not strict": lambda layer: through_state_dict(layer, strict=False),
    "within a model": lambda layer: copy.deepcopy(nn.ModuleDict({"a": layer}))["a"],
    "pickled within a model": lambda layer: pickle.loads(pickle.dumps(nn.ModuleDict({"a": layer})))["a"],
    "to the meta device and back": lambda layer: through_meta(layer),
}


def through_meta(layer: nn.Module) -> nn.Module:
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    moved = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    assert {n: t.dtype for n, t in moved.state_dict().items()} == {n: t.dtype for n, t in state.items()}
    moved.load_state_dict(state)
    return moved
