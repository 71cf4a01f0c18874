"""Whole pipelines of every family, small and with random weights: made of the classes of diffusers and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL)
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(**more: Any) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that knows bytes and a few marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate((*SPECIAL, *letters))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=77,
        **more,
    )


def randomised(model: nn.Module, seed: int = 0, spread: float = 0.05) -> Any:
    """The model with random values in every parameter, none of them zero, in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random) * spread
            parameter.copy_(1 + noise if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else noise)
    return model.to(torch.bfloat16).eval()


def tiny_vae(channels: int = 16, **more: Any) -> AutoencoderKL:
    """A VAE of eight pixels for each latent."""
    down, up = ["DownEncoderBlock2D"] * 4, ["UpDecoderBlock2D"] * 4
    return randomised(
        AutoencoderKL(
            latent_channels=channels,
            block_out_channels=[32, 32, 32, 32],
            down_block_types=down,
            up_block_types=up,
            layers_per_block=1,
            sample_size=64,
            **more,
        )
    )


def flux_vae() -> AutoencoderKL:
    return tiny_vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)


def qwen3(width: int = 64, layers: int = 3, kind: Any = transformers.Qwen3Model) -> Any:
    return randomised(
        kind(
            transformers.Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=96,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                tie_word_embeddings=True,
            )
        )
    )


def z_image() -> ZImagePipeline:
    transformer = ZImageTransformer2DModel(
        dim=64,
        n_heads=2,
        n_kv_heads=2,
        n_layers=2,
        n_refiner_layers=1,
        cap_feat_dim=64,
        in_channels=16,
        axes_dims=[8, 12, 12],
        axes_lens=[1536, 512, 512],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux_vae(),
        text_encoder=qwen3(),
        tokenizer=byte_tokenizer(chat_template=CHAT),
        transformer=randomised(transformer),
    )


PIPELINES: dict[str, Callable[[], DiffusionPipeline]] = {"z-image": z_image}
"""By the id of the family."""


def write_pipeline(family: str, folder: Path) -> Path:
    """Write the pipeline of a family as a diffusers folder."""
    PIPELINES[family]().save_pretrained(folder)
    return folder
