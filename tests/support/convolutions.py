"""A family whose model has convolutions, one of them transposed."""

from __future__ import annotations

from typing import Any

ACE = """
schema: 1
id: ace
title: Ace
kind: denoiser
model: diffusers.AceStepTransformer1DModel
identify: {has: [proj_out_conv.weight, layers.0.self_attn.to_q.weight]}
precision:
  compute: checkpoint
  fp16: safe
  fp8: {storage: supported, compute: supported}
"""
ACE_CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "in_channels": 12,
}
