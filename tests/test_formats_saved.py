"""Models in every format, saved with ``save_pretrained`` and loaded again from the folder: the same bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import pytest

import slipcast
from slipcast.engine.layers import QuantisedModule
from slipcast.registry.errors import ConfigError, QuantisationError, UnsupportedFormatError
from support.conversions import converted
from support.fp8_compute import fp8_of
from support.gguf_files import CROSSING, NARROW, write_gguf
from support.hinted_family import hinted_family
from support.isolation import isolate
from support.number_formats import bytes_of
from support.quantised_cases import CASES, draw_file
from support.quantised_checkpoints import EVEN, mxfp8, nvfp4, quantised_file


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def _save_and_load(path: Path, folder: Path, **settings: Any) -> slipcast.Loaded:
    """Load, save, load again; what comes back must be what was saved."""
    first = slipcast.load(path, device="cpu", dtype="float32", **settings)
    first.model.save_pretrained(folder)
    again = slipcast.load(folder, device="cpu", dtype="float32")
    assert again.report.differences == ()
    before, after = first.model.state_dict(), again.model.state_dict()
    assert before.keys() == after.keys()
    assert [key for key, tensor in before.items() if not (bytes_of(after[key]) == bytes_of(tensor)).all()] == []
    codecs = [
        {name: module.codec for name, module in loaded.model.named_modules() if isinstance(module, QuantisedModule)}
        for loaded in (first, again)
    ]
    assert codecs[0] == codecs[1]
    return again


@pytest.mark.parametrize("name", CASES)
def test_every_format(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = draw_file(case, "uneven").write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)
    _save_and_load(path, tmp_path / "folder")


@pytest.mark.parametrize("layout", ["comfy", "linear"])
def test_a_layout_that_no_shape_tells(tmp_path: Path, layout: str) -> None:
    """A family file told it when the model was loaded; of the folder the config.json does."""
    layers = ("layers.0.attention.qkv", "layers.0.attention.out")
    path = quantised_file(nvfp4(comfy=layout == "comfy"), EVEN, layers).write(tmp_path / "m.safetensors")
    with pytest.raises(QuantisationError, match="nothing in the file tells the byte layout"):
        slipcast.plan(path, device="cpu")
    loaded = _save_and_load(path, tmp_path / "folder", **hinted_family(tmp_path, EVEN, layout))
    assert loaded.model.get_submodule("layers.0.attention.to_q").codec.name == f"nvfp4/{layout}"
    converted(tmp_path / "folder", tmp_path / "comfy.safetensors", "native", format="nvfp4")
    again = slipcast.load(tmp_path / "comfy.safetensors", device="cpu", dtype="float32").model
    assert again.get_submodule("layers.0.attention.to_q").codec.name == "nvfp4/comfy"


def test_the_order_of_scales_that_no_shape_tells(tmp_path: Path) -> None:
    """Of mxfp8 a marker told it when the model was loaded; of the folder the config.json does."""
    path = quantised_file(mxfp8(), EVEN, ("layers.0.attention.out",)).write(
        tmp_path / "m.safetensors", marked="tensors"
    )
    loaded = _save_and_load(path, tmp_path / "folder")
    assert loaded.model.get_submodule("layers.0.attention.to_out.0").codec.name == "mxfp8"
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(tmp_path / "folder" / "diffusion_pytorch_model.safetensors", device="cpu")
    assert any("fits the swizzled and the linear order" in item for item in caught.value.items)


def test_a_config_that_forgot_int8_is_refused(tmp_path: Path) -> None:
    """Nothing else says whether its columns are rotated. Of float8 everything is in the tensors."""
    case = CASES["int8, rotated"]
    path = draw_file(case, "uneven").write(tmp_path / "m.safetensors", marked=case.marked)
    _save_and_load(path, tmp_path / "folder")
    config = json.loads((tmp_path / "folder/config.json").read_text())
    del config["quantization_config"]["modules"]["layers.0.attention.to_q"]
    (tmp_path / "folder/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is in int8, may be rotated, and is not among them"):
        slipcast.plan(tmp_path / "folder", device="cpu")


def test_gguf(tmp_path: Path) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf")
    loaded = _save_and_load(file.path, tmp_path / "folder")
    assert loaded.model.get_submodule("layers.0.attention.to_k").codec.name == "gguf/Q4_K"
    assert slipcast.inspect(tmp_path / "folder").formats["gguf"] == sum(
        isinstance(module, QuantisedModule) for module in loaded.model.modules()
    )
    converted(tmp_path / "folder", tmp_path / "plain.safetensors", "native", format="fp32")
    state = slipcast.load(tmp_path / "plain.safetensors", device="cpu", dtype="float32").model.state_dict()
    for key, tensor in file.expected.items():
        assert (state[key] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), key


def test_gguf_of_blocks_that_cross_rows(tmp_path: Path) -> None:
    layer = "layers.0.attention.out"
    file = write_gguf(gguf, tmp_path / "m.gguf", config=NARROW, types={layer: "Q6_K"}, folded=(layer, CROSSING))
    loaded = _save_and_load(file.path, tmp_path / "folder")
    assert loaded.model.get_submodule("layers.0.attention.to_out.0").codec.name == "gguf/Q6_K"


def test_without_its_config_blocks_are_bytes_that_mean_nothing(tmp_path: Path) -> None:
    file = write_gguf(gguf, tmp_path / "m.gguf")
    _save_and_load(file.path, tmp_path / "folder")
    with pytest.raises(UnsupportedFormatError) as caught:
        slipcast.plan(tmp_path / "folder" / "diffusion_pytorch_model.safetensors", device="cpu")
    assert any("codes of U8 without a scale" in item for item in caught.value.items)


@pytest.mark.parametrize("name", ["metadata", "legacy, marked in float32", "markers without scales"])
def test_layers_marked_for_products_in_full_precision_stay_marked(tmp_path: Path, name: str) -> None:
    """Saved, converted, or saved by one who overrode the marks: the folder plans the products of the first file."""
    case = CASES[name]
    file = draw_file(case, "uneven")
    for layer in ("layers.0.attention.qkv", "final_layer.linear"):
        file.markers[layer]["full_precision_matrix_mult"] = True
    path = file.write(tmp_path / "m.safetensors", marked=case.marked, extra=case.extra)
    planned = _planned_products(path)
    marked = {layer for layer, (_, precise, _) in planned.items() if precise}
    assert {"layers.0.attention.to_q", "all_final_layer.2-1.linear"} <= marked
    assert any(products == "fp8" for products, _, _ in planned.values()) is (case.extra == {})
    assert all("full precision" in planned[layer][2] for layer in marked if "not a multiple" not in planned[layer][2])
    for index, settings in enumerate(({}, {"fp8": fp8_of("compute")}, {"fp8": fp8_of("compute", hints="ignore")})):
        folder = tmp_path / f"saved{index}"
        loaded = slipcast.load(path, device="cpu", dtype="float32", **settings)
        copy.deepcopy(loaded.model).save_pretrained(folder)
        assert _planned_products(folder) == planned
    converted(folder, tmp_path / "back.safetensors", "native")
    assert _planned_products(tmp_path / "back.safetensors") == planned
    converted(path, tmp_path / "converted", "diffusers")
    assert _planned_products(tmp_path / "converted") == planned


def test_calibrated_scales_of_activations_are_saved_where_they_are_used(tmp_path: Path) -> None:
    case = CASES["metadata"]
    path = draw_file(case, "uneven").write(tmp_path / "m.safetensors", marked=case.marked)
    scaling: dict[str, set[str | None]] = {}
    for mode in ("compute", "storage"):
        slipcast.load(path, device="cpu", dtype="float32", fp8=fp8_of(mode)).model.save_pretrained(tmp_path / mode)
        modules = slipcast.plan(tmp_path / mode, device="cpu", fp8=fp8_of("compute")).modules
        scaling[mode] = {module.activation_scale for module in modules if module.products is not None}
    assert scaling == {"compute": {"static"}, "storage": {"row"}}


def _planned_products(path: Path) -> dict[str, tuple[str | None, bool, str]]:
    plan = slipcast.plan(path, device="cpu", fp8=fp8_of("compute"))
    return {
        module.path: (module.products, module.full_precision, module.reason)
        for module in plan.modules
        if module.codec is not None
    }
