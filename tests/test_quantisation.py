"""Recognition of quantisation formats: every recorded header, and what single layers look like."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.quantisation import assemble, count_formats
from support.quantised_records import QUANTISED
from support.raw_safetensors import write_raw
from support.recorded import recorded, recorded_names, write_checkpoint


def bundles_of(name, tmp_path):
    path = tmp_path / f"{name}.safetensors"
    write_checkpoint(recorded(name), path)
    return assemble(read_checkpoint(path).headers[""])


def codes_in(record):
    """Number of weights in codes, counted from dtypes and names alone."""
    return Counter(
        dtype
        for name, (dtype, shape) in record.tensors.items()
        if dtype in ("F8_E4M3", "F8_E5M2", "I8") and not name.endswith(("scaled_fp8", "_scale"))
    ).total()


@pytest.mark.parametrize("name", recorded_names())
def test_recorded_headers(name, tmp_path):
    bundles = bundles_of(name, tmp_path)
    counts = count_formats(bundles.weights.values())
    assert bundles.orphans == ()
    assert bundles.problems == ()
    quantised = {form: count for form, count in counts.items() if form != "plain"}
    assert set(quantised) == QUANTISED.get(name, set())
    assert sum(quantised.values()) == codes_in(recorded(name))
    held = [tensor.name for bundle in bundles.weights.values() for tensor in bundle.tensors]
    held += [tensor.name for tensor in bundles.markers] + list(bundles.ignored)
    assert sorted(held) == sorted(recorded(name).tensors)


def assemble_tensors(tmp_path, tensors, metadata=None):
    path = tmp_path / "m.safetensors"
    write_checkpoint(tensors, path, metadata=metadata or {})
    return assemble(read_checkpoint(path).headers[""])


def test_nvfp4_layouts_are_told_by_one_layer_whose_shape_is_padded(tmp_path):
    def layer(name, rows, columns, scale):
        return {
            f"{name}.weight": ("U8", (rows, columns // 2)),
            f"{name}.weight_scale": ("F8_E4M3", scale),
            f"{name}.weight_scale_2": ("F32", ()),
        }

    even = layer("a", 128, 64, (128, 4))
    unknown = assemble_tensors(tmp_path, even).weights["a.weight"]
    assert unknown.format == "nvfp4"
    assert "layout" not in unknown.options
    assert unknown.shape == (128, 64)
    comfy = assemble_tensors(tmp_path, even | layer("b", 16, 64, (128, 4)))
    assert {bundle.options["layout"] for bundle in comfy.weights.values()} == {"comfy"}
    linear = assemble_tensors(tmp_path, even | layer("b", 16, 64, (16, 4)))
    assert {bundle.options["layout"] for bundle in linear.weights.values()} == {"linear"}
    both = assemble_tensors(tmp_path, layer("a", 16, 64, (128, 4)) | layer("b", 16, 64, (16, 4)))
    assert both.problems == ("its nvfp4 layers are in two byte layouts",)


@pytest.mark.parametrize(
    ("tensors", "format_"),
    [
        (
            {
                "a.weight": ("U8", (64, 1)),
                "a.weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
                "a.weight.absmax": ("F32", (2,)),
                "a.weight.quant_map": ("F32", (16,)),
            },
            "bnb_nf4",
        ),
        (
            {
                "a.weight": ("U8", (64, 1)),
                "a.weight.quant_state.bitsandbytes__fp4": ("U8", (80,)),
                "a.weight.absmax": ("F32", (2,)),
                "a.weight.quant_map": ("F32", (16,)),
            },
            "bnb_fp4",
        ),
        ({"a.weight": ("I8", (8, 8)), "a.SCB": ("F32", (8,)), "a.weight_format": ("U8", ())}, "bnb_int8"),
        (
            {
                "a.qweight": ("I8", (8, 4)),
                "a.wscales": ("BF16", (1, 8)),
                "a.smooth_factor": ("BF16", (8,)),
                "a.proj_down": ("BF16", (8, 2)),
                "a.proj_up": ("BF16", (8, 2)),
            },
            "nunchaku",
        ),
        ({"a.qweight": ("I32", (2, 4)), "a.qzeros": ("I32", (1, 1)), "a.scales": ("F16", (1, 8))}, "awq"),
        (
            {
                "a.weight_packed": ("U8", (8, 4)),
                "a.weight_scale": ("F8_E4M3", (8, 1)),
                "a.weight_global_scale": ("F32", (1,)),
            },
            "compressed_tensors",
        ),
        ({"a.weight": ("I8", (8, 8)), "a.scale": ("F32", (8, 1)), "a.zero_point": ("F32", (8, 1))}, "sdnq"),
        ({"a.weight": ("F8_E5M2", (8, 8)), "a.scale_weight": ("F32", (1,))}, "fp8_scaled"),
        ({"a.weight": ("F8_E4M3", (8, 8))}, "fp8_raw"),
        ({"a.weight": ("I8", (8, 8)), "a.weight_scale": ("F32", (8, 1))}, "int8"),
        ({"a.weight": ("F8_E4M3", (32, 32)), "a.weight_scale": ("U8", (128, 4))}, "mxfp8"),
        ({"a.norm.scale": ("BF16", (8,)), "a.weight": ("BF16", (8, 8))}, "plain"),
    ],
)
def test_formats_by_what_only_they_have(tmp_path, tensors, format_):
    bundles = assemble_tensors(tmp_path, tensors)
    assert set(count_formats(bundles.weights.values())) == {format_}
    assert bundles.orphans == ()


def test_torchao_is_told_by_its_metadata(tmp_path):
    metadata = {"tensor_names": '["a.weight"]', "a.weight": '{"_type": "Float8Tensor"}'}
    tensors = {"a._weight_qdata": ("F8_E4M3", (8, 8)), "a._weight_scale": ("F32", (8, 1))}
    assert set(count_formats(assemble_tensors(tmp_path, tensors, metadata).weights.values())) == {"torchao"}


@pytest.mark.parametrize(
    ("tensors", "orphans"),
    [
        ({"a.scale_weight": ("F32", (1,)), "b.weight": ("BF16", (8, 8))}, ["a.scale_weight"]),
        ({"a.weight": ("BF16", (8, 8)), "a.weight_scale": ("F32", (1,))}, ["a.weight_scale"]),
        ({"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale_inv": ("F32", (1, 1))}, ["a.weight_scale_inv"]),
        (
            {"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale": ("F32", ()), "a.weight_scale_2": ("F32", ())},
            ["a.weight_scale_2"],
        ),
        (
            {"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale": ("F32", ()), "a.scale_weight": ("F32", ())},
            ["a.scale_weight"],
        ),
        (
            {"a.weight": ("F8_E4M3", (8, 8)), "a.scale_weight": ("F32", ()), "a.weight_scale": ("F32", ())},
            ["a.weight_scale"],
        ),
        (
            {"a.weight": ("BF16", (8, 8)), "a.scale_weight": ("F32", ()), "a.weight_scale": ("F32", ())},
            ["a.scale_weight", "a.weight_scale"],
        ),
        ({"a.comfy_quant": ("U8", (72,)), "b.weight": ("BF16", (8, 8))}, ["a.comfy_quant"]),
        ({"a.absmax": ("F32", (4,)), "b.weight": ("BF16", (8, 8))}, ["a.absmax"]),
        ({"a.input_scale": ("F32", ()), "b.weight": ("BF16", (8, 8))}, ["a.input_scale"]),
    ],
)
def test_side_tensors_that_no_weight_consumes_are_orphans(tmp_path, tensors, orphans):
    assert [tensor.name for tensor in assemble_tensors(tmp_path, tensors).orphans] == orphans


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [
        ((), "tensor"),
        ((1,), "tensor"),
        ((1, 1), "tensor"),
        ((8,), "row"),
        ((8, 1), "row"),
        ((8, 1, 1), "row"),
        ((8, 2, 1), "block"),
        ((8, 4), "block"),
    ],
)
def test_the_scale_s_shape_gives_its_granularity(tmp_path, shape, granularity):
    tensors = {"a.weight": ("F8_E4M3", (8, 12)), "a.weight_scale": ("BF16", shape)}
    bundle = assemble_tensors(tmp_path, tensors).weights["a.weight"]
    assert (bundle.format, bundle.granularity) == ("fp8_scaled", granularity)


@pytest.mark.parametrize("shape", [(2, 2), (1, 8), (12,), (7,), (8, 5), (8, 0), (8, 2, 2), (2, 4), (16,), (0,)])
def test_a_scale_that_fits_no_part_of_its_weight_makes_the_format_unknown(tmp_path, shape):
    tensors = {"a.weight": ("F8_E4M3", (8, 12)), "a.weight_scale": ("F32", shape)}
    bundles = assemble_tensors(tmp_path, tensors)
    assert bundles.weights["a.weight"].format == "unknown"
    needed = "floats: one, [rows] or [rows, 1], [rows, blocks] or [rows, blocks, 1]"
    assert bundles.problems == (f"a.weight: float8 codes [8, 12] with a scale of F32 {list(shape)}, needed: {needed}",)


@pytest.mark.parametrize(("shape", "granularity"), [((8,), "row"), ((6,), "column"), ((8, 1, 1, 1), "row")])
def test_a_convolution_s_scales_lie_along_its_outputs(tmp_path, shape, granularity):
    tensors = {"a.weight": ("F8_E4M3", (8, 6, 3, 3)), "a.weight_scale": ("F32", shape)}
    assert assemble_tensors(tmp_path, tensors).weights["a.weight"].granularity == granularity


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"])
def test_codes_of_a_dtype_that_no_format_has_alone_are_unknown(tmp_path, dtype):
    header = {"a.weight": {"dtype": dtype, "shape": [8, 8], "data_offsets": [0, 32 if dtype == "F4" else 64]}}
    path = write_raw(tmp_path / "m.safetensors", header, bytes(32 if dtype == "F4" else 64))
    bundles = assemble(read_checkpoint(path).headers[""])
    assert bundles.weights["a.weight"].format == "unknown"
    assert dtype in bundles.problems[0]


def test_metadata_that_names_layers_describes_them(tmp_path):
    layers = {"x.a": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, "x.gone": {"format": "nvfp4"}}
    tensors = {"x.a.weight": ("F8_E4M3", (8, 8)), "x.a.weight_scale": ("F32", ())}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    bundles = assemble_tensors(tmp_path, tensors, metadata)
    assert bundles.weights["x.a.weight"].full_precision
    assert bundles.problems == ("the file's metadata describes x.gone, which has no weight",)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"layers": 3}', '{"layers": {"a": 3}}', '{"layers": {"a": {"params": 3}}}']
)
def test_unreadable_metadata_is_a_problem_and_the_tensors_rule(tmp_path, text):
    tensors = {"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale": ("F32", ())}
    bundles = assemble_tensors(tmp_path, tensors, {"_quantization_metadata": text})
    assert bundles.weights["a.weight"].format == "fp8_scaled"
    assert len(bundles.problems) == 1
    assert "can't be read" in bundles.problems[0]


@pytest.mark.parametrize(("count", "full_precision"), [(0, False), (1, False), (2, True)])
def test_the_legacy_marker_s_element_count_carries_meaning(tmp_path, count, full_precision):
    tensors = {"scaled_fp8": ("F8_E4M3", (count,)), "a.weight": ("F8_E4M3", (8, 8)), "a.scale_weight": ("F32", (1,))}
    bundles = assemble_tensors(tmp_path, tensors)
    assert bundles.weights["a.weight"].full_precision is full_precision
    assert [marker.name for marker in bundles.markers] == ["scaled_fp8"]


def test_a_marker_does_not_overrule_the_weight_s_own_dtype(tmp_path):
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": "float8_e4m3fn"}}})}
    tensors = {"a.weight": ("F8_E5M2", (8, 8)), "a.weight_scale": ("F32", ())}
    bundles = assemble_tensors(tmp_path, tensors, metadata)
    bundle = bundles.weights["a.weight"]
    assert (bundle.format, bundle.weight.dtype) == ("fp8_scaled", "F8_E5M2")
    assert bundles.problems == ("a.weight: marked as 'float8_e4m3fn', stored as F8_E5M2",)


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ({"format": "int8_tensorwise"}, "marked as 'int8_tensorwise', stored as F8_E4M3"),
        ({"format": "nvfp4"}, "marked as 'nvfp4', stored as F8_E4M3"),
        ({"format": "float8_of_tomorrow"}, "marked as 'float8_of_tomorrow', stored as F8_E4M3"),
        ({"format": ["float8_e4m3fn"]}, "marked as ['float8_e4m3fn'], stored as F8_E4M3"),
        ({"format": "x" * 9000}, "stored as F8_E4M3"),
        ({"format": "float8_e4m3fn", "convrot": True}, "says that columns are rotated"),
        ({"convrot": "yes"}, "says that columns are rotated"),
    ],
)
def test_a_marker_of_another_format_is_not_passed_over(tmp_path, marker, problem):
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": marker}})}
    tensors = {"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale": ("F32", ())}
    bundles = assemble_tensors(tmp_path, tensors, metadata)
    assert bundles.weights["a.weight"].format == "unknown"
    (line,) = bundles.problems
    assert problem in line
    assert len(line) < 200


def test_codes_without_a_scale_beside_others_with_one_are_noted(tmp_path):
    """Nothing says that they ought to have one: a few may be raw on purpose."""
    tensors = {
        "a.weight": ("F8_E4M3", (8, 8)),
        "a.weight_scale": ("F32", ()),
        "b.weight": ("F8_E4M3", (8, 8)),
        "c.weight": ("F8_E4M3", (8, 8)),
        "b.bias": ("F8_E4M3", (8,)),
    }
    bundles = assemble_tensors(tmp_path, tensors)
    assert count_formats(bundles.weights.values()) == {"fp8_raw": 3, "fp8_scaled": 1}
    assert bundles.problems == (
        "b.weight and 1 more in float8 without a scale, beside 1 weights with one: taken for the values themselves",
    )


def test_the_legacy_marker_of_one_component_says_nothing_of_another(tmp_path):
    layer = {"weight": ("F8_E4M3", (8, 8)), "scale_weight": ("F32", (1,))}
    tensors = {f"{prefix}a.{leaf}": info for prefix in ("model.", "text.t5.") for leaf, info in layer.items()}
    marks = {"model.scaled_fp8": ("F8_E4M3", (0,)), "text.t5.scaled_fp8": ("F8_E4M3", (2,))}
    weights = assemble_tensors(tmp_path, tensors | marks).weights
    assert [weights[f"{prefix}a.weight"].full_precision for prefix in ("model.", "text.t5.")] == [False, True]


@pytest.mark.parametrize(("mark", "dtype"), [("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")])
def test_float8_codes_in_a_tensor_of_bytes_are_told_by_what_the_file_says(tmp_path, mark, dtype):
    tensors = {"a.weight": ("U8", (8, 12)), "a.weight_scale": ("F32", (8, 1))}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": mark}}})}
    bundle = assemble_tensors(tmp_path, tensors, metadata).weights["a.weight"]
    assert (bundle.format, bundle.weight.dtype, bundle.shape, bundle.granularity) == (
        "fp8_scaled",
        dtype,
        (8, 12),
        "row",
    )
    assert assemble_tensors(tmp_path, tensors).weights["a.weight"].format == "unknown"


TILED = ("U8", (128, 4))
CODES4 = ("U8", (16, 32))
TILED4 = ("F8_E4M3", (128, 4))
ONE = ("F32", ())


@pytest.mark.parametrize(
    ("weight", "sides", "marker", "problem"),
    [
        (("I8", (8, 12)), {"weight_scale": ("F32", (12,))}, {}, "int8 codes [8, 12] with a scale of F32 [12]"),
        (("I8", (8, 12)), {"weight_scale": ("F32", (8, 3))}, {}, "int8 codes [8, 12] with a scale of F32 [8, 3]"),
        (("I8", (8, 12)), {"weight_scale": ("U8", (8,))}, {}, "int8 codes [8, 12] with a scale of U8 [8]"),
        (("I8", (8, 12)), {"weight_scale": ONE}, {"convrot": True, "convrot_groupsize": 16}, "in groups of 16"),
        (("I8", (8, 16)), {"weight_scale": ONE}, {"convrot": True, "convrot_groupsize": 8}, "in groups of 8"),
        (("I8", (8, 16)), {"weight_scale": ONE}, {"convrot": True, "convrot_groupsize": [4]}, "in groups of [4]"),
        (("I8", (8, 16)), {"weight_scale": ONE}, {"convrot": True, "convrot_groupsize": -16}, "in groups of -16"),
        (("I8", (8, 16)), {"weight_scale": ONE}, {"convrot": True}, "in groups of 256"),
        (("F8_E4M3", (32, 32)), {"weight_scale": ("U8", (32, 1))}, {}, "mxfp8 codes [32, 32] with a scale of U8"),
        (("F8_E4M3", (20, 32)), {"weight_scale": TILED}, {}, "mxfp8 codes [20, 32] with a scale of U8"),
        (("F8_E5M2", (32, 32)), {"weight_scale": TILED}, {}, "mxfp8 codes [32, 32] with a scale of U8"),
        (("F8_E4M3", (32, 32)), {"weight_scale": ("F32", (128, 4))}, {"format": "mxfp8"}, "a scale of F32 [128, 4]"),
        (CODES4, {"weight_scale_2": ONE}, {}, "nvfp4 codes [16, 32] without weight_scale"),
        (CODES4, {"weight_scale": TILED4}, {"format": "nvfp4"}, "nvfp4 codes [16, 32] without weight_scale_2"),
        (CODES4, {"weight_scale": ("F8_E4M3", (16, 2)), "weight_scale_2": ONE}, {}, "a scale of F8_E4M3 [16, 2]"),
        (
            CODES4,
            {"weight_scale": ("F8_E4M3", (16, 4)), "weight_scale_2": ONE},
            {"format": "nvfp4"},
            "a scale of F8_E4M3 [16, 4]",
        ),
        (("U8", (20, 32)), {"weight_scale": TILED4, "weight_scale_2": ONE}, {}, "a scale of F8_E4M3 [128, 4]"),
        (CODES4, {"weight_scale": TILED4, "weight_scale_2": ("F32", (2,))}, {}, "a scale of F32 [2]"),
    ],
)
def test_scales_that_do_not_fit_their_codes_make_the_format_unknown(tmp_path, weight, sides, marker, problem):
    tensors = {"a.weight": weight, **{f"a.{leaf}": info for leaf, info in sides.items()}}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": marker}})} if marker else {}
    bundles = assemble_tensors(tmp_path, tensors, metadata)
    assert bundles.weights["a.weight"].format == "unknown"
    assert any(line.startswith("a.weight: ") and problem in line for line in bundles.problems)


ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}


def int8_layers(tmp_path, descriptions):
    """Two int8 layers, a and b, described in the file's metadata."""
    layer = {"weight": ("I8", (16, 16)), "weight_scale": ("F32", (16, 1))}
    tensors = {f"{name}.{leaf}": what for name in "ab" for leaf, what in layer.items()}
    text = descriptions if isinstance(descriptions, str) else json.dumps({"layers": descriptions})
    return assemble_tensors(tmp_path, tensors, {"_quantization_metadata": text})


@pytest.mark.parametrize(
    ("descriptions", "formats"),
    [
        ({"a": ROTATED, "b": ROTATED}, {"int8_convrot": 2}),
        ({"a": {"format": "int8_tensorwise"}}, {"int8": 2}),
        ({"a": ROTATED}, {"int8_convrot": 1, "unknown": 1}),
        ({"a": ROTATED, "b": {"per_row": True}}, {"int8_convrot": 1, "unknown": 1}),
        ({"a": {**ROTATED, "convrot": "true"}, "b": {"format": "int8_tensorwise"}}, {"unknown": 1, "int8": 1}),
        (
            {"a": {"format": "int8_tensorwise", "convrot_groupsize": 16}, "b": ROTATED},
            {"unknown": 1, "int8_convrot": 1},
        ),
        ('{"layers": {"a"', {"unknown": 2}),
    ],
)
def test_int8_that_may_be_rotated_is_never_guessed(tmp_path, descriptions, formats):
    bundles = int8_layers(tmp_path, descriptions)
    assert count_formats(bundles.weights.values()) == formats
    assert len([problem for problem in bundles.problems if ".weight:" in problem]) == formats.get("unknown", 0)


def test_int8_under_a_marker_of_scaled_fp8_is_never_guessed(tmp_path):
    tensors = {"a.weight": ("I8", (16, 16)), "a.weight_scale": ("F32", (16, 1))}
    assert assemble_tensors(tmp_path, tensors).weights["a.weight"].format == "int8"
    bundles = assemble_tensors(tmp_path, tensors | {"scaled_fp8": ("F8_E4M3", (0,))})
    assert bundles.weights["a.weight"].format == "unknown"
    assert bundles.problems == ("a.weight: int8 codes that nothing describes, under a marker of scaled fp8",)


def test_what_a_layer_s_marker_does_not_say_the_file_s_metadata_does(tmp_path):
    """Both describe a layer; the marker lacks that its columns are rotated."""
    marker = b'{"format": "int8_tensorwise"}'
    text = json.dumps({"layers": {"a": ROTATED}})
    header = {
        "__metadata__": {"_quantization_metadata": text},
        "a.weight": {"dtype": "I8", "shape": [16, 16], "data_offsets": [0, 256]},
        "a.weight_scale": {"dtype": "F32", "shape": [16], "data_offsets": [256, 320]},
        "a.comfy_quant": {"dtype": "U8", "shape": [len(marker)], "data_offsets": [320, 320 + len(marker)]},
    }
    path = write_raw(tmp_path / "m.safetensors", header, bytes(320) + marker)
    assert assemble(read_checkpoint(path).headers[""]).weights["a.weight"].format == "int8_convrot"


@pytest.mark.parametrize("marking", ["metadata", "legacy"])
def test_float8_whose_scale_is_lost_is_never_taken_for_raw(tmp_path, marking):
    tensors = {
        "a.weight": ("F8_E4M3", (8, 8)),
        "a.weight_scale": ("F32", ()),
        "b.weight": ("F8_E4M3", (8, 8)),
        "b.bias": ("F8_E4M3", (8,)),
    }
    layers = {name: {"format": "float8_e4m3fn"} for name in "ab"}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})} if marking == "metadata" else {}
    if marking == "legacy":
        tensors["scaled_fp8"] = ("F8_E4M3", (0,))
    bundles = assemble_tensors(tmp_path, tensors, metadata)
    assert {name: bundle.format for name, bundle in bundles.weights.items()} == {
        "a.weight": "fp8_scaled",
        "b.weight": "unknown",
        "b.bias": "fp8_raw",
    }
    assert bundles.problems == (
        "b.weight: float8 codes without a scale, in a file that gives the others of their kind one",
    )


CODES8 = ("F8_E4M3", (96, 64))
CODES4_WIDE = ("U8", (144, 40))


@pytest.mark.parametrize(
    ("weight", "scale", "dtype", "needed"),
    [
        (CODES8, shape, dtype, "needed: F8_E4M3 codes of whole blocks of 32 by 32, U8 [128, 4]")
        for shape in ((4, 128), (512,), (1, 512), (128, 4, 1), (64, 8), (96, 2), (2, 96), (256, 2))
        for dtype in ("U8", "F8_E8M0")
    ]
    + [
        (CODES4_WIDE, shape, "F8_E4M3", "needed: F8_E4M3 [256, 8] (comfy) or F8_E4M3 [144, 5] (linear)")
        for shape in ((8, 256), (2048,), (2, 128, 8), (256, 8, 1), (128, 16), (5, 144), (720,), (144, 5, 1), (72, 10))
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_scales_of_blocks_in_another_shape_of_as_many_elements(tmp_path, weight, scale, dtype, needed, marked):
    """Transposed, flat or reshaped they would be decoded at the wrong places."""
    nvfp4 = weight is CODES4_WIDE
    tensors = {"a.weight": weight, "a.weight_scale": (dtype, scale)}
    tensors |= {"a.weight_scale_2": ONE} if nvfp4 else {}
    says = {"format": "nvfp4" if nvfp4 else "mxfp8"}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": says}})} if marked else {}
    bundles = assemble_tensors(tmp_path, tensors, metadata)
    assert bundles.weights["a.weight"].format == "unknown"
    (problem,) = bundles.problems
    assert f"with a scale of {dtype} {list(scale)}" in problem
    assert (needed.partition(" or F8_E4M3 [144")[0] if marked else needed) in problem
    right = {"a.weight": weight, "a.weight_scale": (dtype, (256, 8) if nvfp4 else (128, 4))}
    right |= {"a.weight_scale_2": ONE} if nvfp4 else {}
    assert assemble_tensors(tmp_path, right, metadata).weights["a.weight"].format == says["format"]


def test_mxfp8_whose_order_of_scales_nothing_tells_is_not_guessed(tmp_path):
    """Of whole tiles the swizzled order has the shape of the linear one, which other programs write."""
    even = {"a.weight": ("F8_E4M3", (128, 128)), "a.weight_scale": ("U8", (128, 4))}
    bundles = assemble_tensors(tmp_path, even)
    assert bundles.weights["a.weight"].format == "unknown"
    assert "fits the swizzled and the linear order" in bundles.problems[0]
    marked = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": "mxfp8"}}})}
    assert assemble_tensors(tmp_path, even, marked).weights["a.weight"].format == "mxfp8"
    other = {"b.weight": ("F8_E4M3", (32, 32)), "b.weight_scale": ("U8", (128, 4))}
    assert {bundle.format for bundle in assemble_tensors(tmp_path, even | other).weights.values()} == {"mxfp8"}


def test_mxfp8_whose_scale_is_lost_is_never_taken_for_raw(tmp_path):
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": "mxfp8"}}})}
    bundles = assemble_tensors(tmp_path, {"a.weight": ("F8_E4M3", (32, 32))}, metadata)
    assert bundles.weights["a.weight"].format == "unknown"
