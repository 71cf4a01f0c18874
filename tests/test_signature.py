"""Signatures choose which families are asked; they never leave one out that would claim the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import ask, plausible
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.names import Names
from slipcast.registry.quantisation import assemble
from slipcast.registry.signature import Signature, _in_the_model
from support.recorded import recorded, recorded_names, write_checkpoint


@pytest.mark.parametrize("name", recorded_names())
def test_no_family_that_would_claim_a_header_is_left_out(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(recorded(name), tmp_path / "model.safetensors")
    weights = assemble(read_checkpoint(path).headers[""]).weights
    catalogue = load_catalogue()
    asked = plausible(weights, catalogue)
    claiming = {answer.family.id for answer in ask(weights, catalogue) if answer.evidence.complete}
    assert claiming <= asked.keys()
    assert len(asked) <= len(claiming) + 4


@pytest.mark.parametrize(
    ("keys", "name", "alternatives"),
    [
        ({}, "a.b", ["a.b"]),
        ({"a": "x.y"}, "a.b", ["a.b", "x.y.b"]),
        ({"a.b": "x"}, "a", ["a", "x"]),
        (
            {"blocks.{i}.qkv": "layers.{i}.q + layers.{i}.k"},
            "blocks.3.qkv.weight",
            ["blocks.3.qkv.weight", "layers.3.q.weight", "layers.3.k.weight"],
        ),
        ({"blocks.{i}.q": "layers.{i}.q"}, "blocks", ["blocks", "layers"]),
        ({"{s=a|b}.{i}": "x.{s}.{i}"}, "b.0.weight", ["b.0.weight", "x.b.0.weight"]),
        ({"down.{3*b+1}.op": "down_blocks.{b}.conv"}, "down.7.op.weight", ["down.7.op.weight", "down_blocks"]),
        ({"{gamma|weight}": "weight"}, "gamma", ["gamma", "weight"]),
        ({"c": "x"}, "a.b", ["a.b"]),
    ],
)
def test_the_names_in_the_model(keys: dict[str, object], name: str, alternatives: list[str]) -> None:
    assert list(dict.fromkeys(_in_the_model(name, KeyMap.parse(keys, {}, {})))) == alternatives


def test_all_of_the_native_names_or_one_of_each_of_the_model() -> None:
    signature = Signature(("",), ("a.weight", "b"), (("x", "y"), ("z",)))
    assert signature.allows(Names({"a.weight": (1,), "b.c": (1,)}))
    assert not signature.allows(Names({"a.weight": (1,), "bc": (1,)}))
    assert signature.allows(Names({"y.weight": (1,), "z": (1,)}))
    assert not signature.allows(Names({"x": (1,), "y": (1,)}))
    assert Signature(("",), ("a",), (("",),)).allows(Names({"q": (1,)}))
