"""The sample families against recorded headers and the real model classes, both ways."""

from __future__ import annotations

from math import prod

import pytest

from slipcast.registry.expression import check_config, evaluate_config
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.lint import lint
from slipcast.registry.keymap.operations import accepts
from support import links as executor
from support.keymaps import (
    MODEL_PAIRS,
    NATIVE_PAIRS,
    Shapes,
    meta_shapes,
    sample,
    sample_names,
    sections,
    shapes_of,
)


def _wanted(key_map: KeyMap, names: Shapes) -> Shapes:
    """What of a header is this model's."""
    return {
        name: shape
        for name, shape in names.items()
        if key_map.drop_reason(name) is None and key_map.contained(name) is None
    }


def _shrunk(shapes: Shapes) -> Shapes:
    """Small shapes with the same ties between them: equal sizes stay equal, even ones even."""
    return {name: tuple(size if size <= 4 else 4 + size % 2 for size in shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("family", "record", "prefix"), NATIVE_PAIRS)
def test_native_header_is_a_bijection_onto_the_model(family: str, record: str, prefix: str) -> None:
    family_file = sample(family)
    header = shapes_of(record, prefix)
    config = evaluate_config(family_file.config, family_file.let, header)
    model = meta_shapes(family_file.model, config, header)
    wanted = _wanted(family_file.key_map, header)

    links = family_file.key_map.links(model, header)

    assert sorted(term.model for link in links for term in link.terms) == sorted(model)
    assert sorted(file for link in links for file in link.files) == sorted(wanted)
    for link in links:
        if len(link.terms) == 1:
            assert accepts(link.terms[0].operation, wanted[link.files[0]], model[link.terms[0].model]), link
        else:
            assert wanted[link.files[0]][0] == sum(model[term.model][0] for term in link.terms), link
    _assert_view_is_the_header(family_file.key_map, wanted, model)
    assert evaluate_config(family_file.config, family_file.let, family_file.key_map.native_view(model)) == config


def _assert_view_is_the_header(key_map: KeyMap, header: Shapes, model: Shapes) -> None:
    """The view has the header's names and shapes, but for other spellings and the freedom of ``reshape``, ``flat``."""
    view = key_map.native_view(model)
    for link, written in zip(key_map.links(model, header), key_map.links(model), strict=True):
        if link.terms[0].operation in ("reshape", "flat"):
            assert prod(view[written.files[0]]) == prod(header[link.files[0]]), link
        else:
            assert view[written.files[0]] == header[link.files[0]], link
    assert len(view) == len(header)


@pytest.mark.parametrize(("family", "record"), MODEL_PAIRS)
def test_header_in_the_models_names_gives_the_same_model(family: str, record: str) -> None:
    family_file = sample(family)
    header = shapes_of(record)
    view = family_file.key_map.native_view(header)
    model = meta_shapes(family_file.model, evaluate_config(family_file.config, family_file.let, view))
    assert _squeezed(header) == _squeezed(model)


def _squeezed(shapes: Shapes) -> Shapes:
    return {name: tuple(size for size in shape if size != 1) for name, shape in shapes.items()}


@pytest.mark.parametrize(("family", "record", "prefix"), NATIVE_PAIRS)
def test_every_element_survives_saving_and_loading(family: str, record: str, prefix: str) -> None:
    family_file = sample(family)
    header = shapes_of(record, prefix)
    model = _shrunk(meta_shapes(family_file.model, evaluate_config(family_file.config, family_file.let, header)))
    links = family_file.key_map.links(model)
    values = executor.numbered(model)

    native = executor.save(links, values)
    loaded = executor.load(links, native, model)

    assert {name: tuple(tensor.shape) for name, tensor in native.items()} == family_file.key_map.native_view(model)
    assert sum(tensor.numel() for tensor in native.values()) == sum(tensor.numel() for tensor in values.values())
    assert loaded.keys() == values.keys()
    assert all(loaded[name].equal(values[name]) for name in values)


def test_grouped_heads_need_no_sizes() -> None:
    family_file = sample("lumina-2")
    config = {
        "in_channels": 4, "hidden_size": 64, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 8,
        "num_kv_heads": 2, "cap_feat_dim": 16,
    }  # fmt: skip
    model = meta_shapes(family_file.model, config)
    view = family_file.key_map.native_view(model)
    assert view["layers.1.attention.qkv.weight"] == (64 + 16 + 16, 64)
    assert evaluate_config(family_file.config, family_file.let, view) == config
    values = executor.numbered(model)
    links = family_file.key_map.links(model)
    loaded = executor.load(links, executor.save(links, values), model)
    assert all(loaded[name].equal(values[name]) for name in values)


def test_fused_tensor_keeps_the_order_of_its_terms() -> None:
    links = sample("z-image").key_map.links([f"layers.0.attention.{name}.weight" for name in ("to_v", "to_q", "to_k")])
    assert [term.model.split(".")[3] for term in links[0].terms] == ["to_q", "to_k", "to_v"]


def test_last_block_is_read_in_its_own_order() -> None:
    names = [f"transformer_blocks.{block}.norm1_context.linear.weight" for block in range(3)]
    operations = [link.terms[0].operation for link in sample("sd3").key_map.links(names)]
    assert operations == [None, None, "swap_halves"]


def test_blocks_counted_from_the_output() -> None:
    names = [f"decoder.up_blocks.{block}.resnets.0.norm1.weight" for block in range(4)]
    files = [link.files[0] for link in sample("ldm-vae").key_map.links(names)]
    assert files == [f"decoder.up.{block}.block.0.norm1.weight" for block in (3, 2, 1, 0)]


def test_spelling_of_the_file_decides() -> None:
    key_map = sample("flux2").key_map
    model = ["transformer_blocks.0.attn.norm_q.weight"]
    weight = "double_blocks.0.img_attn.norm.query_norm.weight"
    assert key_map.links(model, {weight})[0].files == (weight,)
    assert key_map.links(model)[0].files == ("double_blocks.0.img_attn.norm.query_norm.scale",)


@pytest.mark.parametrize("family", sample_names())
def test_samples_are_clean(family: str) -> None:
    family_file = sample(family)
    check_config(family_file.config, family_file.let)
    assert lint(family_file.key_map) == ()


@pytest.mark.parametrize("family", sample_names())
def test_order_of_rules_means_nothing(family: str) -> None:
    data = sections(family)
    family_file = sample(family)
    record, prefix = next(((record, prefix) for name, record, prefix in NATIVE_PAIRS if name == family), ("", ""))
    if not record:
        pytest.skip("no recorded header")
    header = shapes_of(record, prefix)
    model = meta_shapes(family_file.model, evaluate_config(family_file.config, family_file.let, header))
    turned = KeyMap.parse(dict(reversed(data.get("keys", {}).items())), data.get("drop", {}), {})
    shuffled = KeyMap(tuple(sorted(turned.rules, key=str)), turned.drops)
    assert family_file.key_map.links(model, header) == turned.links(model, header) == shuffled.links(model, header)
