"""The recorded headers of quantised checkpoints, and the formats that their weights are in."""

from __future__ import annotations

from collections.abc import Mapping

QUANTISED: Mapping[str, set[str]] = {
    "flux1-dev--comfyanonymous-fp8-scaled-test": {"fp8_scaled", "fp8_raw"},  # its biases are fp8 without a scale
    "flux2-dev--comfy-fp8mixed": {"fp8_scaled"},
    "ideogram4--fp8-official": {"fp8_scaled"},
    "krea2-turbo--comfy-fp8-scaled": {"fp8_scaled"},
    "krea2-turbo--comfy-mxfp8": {"mxfp8"},
    "qwen-image--comfy-fp8-e4m3fn": {"fp8_raw"},
    "qwen-image-2.1--comfy-int8-convrot": {"int8_convrot"},
    "qwen-image-2.1--comfy-int8-convrot-partial": {"int8_convrot"},
    "te-t5xxl--comfy-fp8-raw": {"fp8_raw"},
    "te-t5xxl--comfy-fp8-scaled": {"fp8_scaled"},
    "z-image-turbo--comfy-int8-convrot": {"int8_convrot"},
    "z-image-turbo--kijai-fp8-scaled": {"fp8_scaled"},
}
