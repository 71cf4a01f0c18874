"""A family file that says in which byte layout nvfp4 files of the family are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEXT = """\
schema: 1
id: hinted
title: A family whose nvfp4 files are known
kind: denoiser
model: diffusers.ZImageTransformer2DModel
identify: {has: [x_pad_token]}
config: CONFIG
keys:
  x_embedder: all_x_embedder.2-1
  final_layer: all_final_layer.2-1
  "{stack=layers|noise_refiner|context_refiner}.{i}.attention": {qkv: to_q + to_k + to_v, out: to_out.0, q_norm: norm_q, k_norm: norm_k}
precision: {fp16: safe, nvfp4_layout: LAYOUT, fp8: {storage: supported, compute: supported}}
"""  # noqa: E501


def hinted_family(folder: Path, config: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Write the file into a folder; returns the settings that load a checkpoint as of this family."""
    (folder / "hinted.yaml").write_text(_TEXT.replace("CONFIG", json.dumps(config)).replace("LAYOUT", layout))
    return {"families": [str(folder)], "family": "hinted"}
