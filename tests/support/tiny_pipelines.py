"""Whole pipelines of every family, small and with random weights: made of the classes of diffusers and transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

import slipcast
from slipcast.registry.catalogue import load_catalogue

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
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    settings = {"model_max_length": 77, "chat_template": CHAT, **more}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        **settings,
    )


def model_of(family: str, config: Mapping[str, Any] | None = None, *, kind: Any = None, **changes: Any) -> Any:
    """The class of a family, of the size of its small model but for some arguments, with random weights in bfloat16."""
    described = load_catalogue()[family]
    if config is None:
        assert described.tiny is not None
        config = described.tiny.config
    library, _, name = described.model.partition(".")
    kind = kind or getattr({"diffusers": diffusers, "transformers": transformers}[library], name)
    arguments = {**config, **changes}
    return randomised(kind(kind.config_class(**arguments)) if library == "transformers" else kind(**arguments))


def randomised(model: nn.Module, spread: float = 0.05) -> Any:
    """The model with random values in every parameter, none of them zero, in bfloat16."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random) * spread
            parameter.copy_(1 + noise if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else noise)
    return model.to(torch.bfloat16).eval()


def vae(family: str, kind: Any = diffusers.AutoencoderKL, **changes: Any) -> Any:
    """A VAE of eight pixels for each latent."""
    shape = {
        "block_out_channels": [32, 32, 32, 32],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 1,
        "sample_size": 64,
    }
    return model_of(family, shape, kind=kind, **changes)


def flux_vae(**changes: Any) -> Any:
    settings = {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latent_channels": 16, **changes}
    return vae("flux-1-vae", use_quant_conv=False, use_post_quant_conv=False, **settings)


def qwen_image_vae() -> Any:
    return model_of("wan-2.1-vae", {"base_dim": 8, "z_dim": 16}, kind=diffusers.AutoencoderKLQwenImage)


def clip_l(**changes: Any) -> Any:
    return model_of("clip-l", vocab_size=VOCABULARY, max_position_embeddings=77, **changes)


def clip_g() -> Any:
    return model_of("clip-g", vocab_size=VOCABULARY, max_position_embeddings=77)


def t5(width: int = 32) -> Any:
    return model_of("t5-xxl", vocab_size=VOCABULARY, d_model=width)


def dynamic(**more: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **more)


def z_image() -> Any:
    return diffusers.ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux_vae(),
        text_encoder=model_of("qwen3", vocab_size=VOCABULARY),
        tokenizer=byte_tokenizer(),
        transformer=model_of("z-image", in_channels=16, cap_feat_dim=64, siglip_feat_dim=None),
    )


def heavy_z_image() -> Any:
    """A pipeline whose weights take more than what it works on: 100 MB of them."""
    denoiser = {"dim": 512, "n_heads": 16, "n_kv_heads": 16, "n_layers": 24}
    return diffusers.ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux_vae(),
        text_encoder=model_of("qwen3", vocab_size=VOCABULARY, num_hidden_layers=24, intermediate_size=8192),
        tokenizer=byte_tokenizer(),
        transformer=model_of("z-image", in_channels=16, cap_feat_dim=64, siglip_feat_dim=None, **denoiser),
    )


def flux_1() -> Any:
    return diffusers.FluxPipeline(
        scheduler=dynamic(shift=3.0),
        vae=flux_vae(),
        text_encoder=clip_l(),
        tokenizer=byte_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=byte_tokenizer(model_max_length=128),
        transformer=model_of("flux-1", in_channels=64, pooled_projection_dim=768),
    )


def flux_2() -> Any:
    return diffusers.Flux2KleinPipeline(
        scheduler=dynamic(shift=3.0),
        vae=vae("flux-2-vae", kind=diffusers.AutoencoderKLFlux2, latent_channels=32),
        text_encoder=model_of(
            "qwen3", kind=transformers.Qwen3ForCausalLM, vocab_size=VOCABULARY, num_hidden_layers=28, hidden_size=32
        ),
        tokenizer=byte_tokenizer(model_max_length=512),
        transformer=model_of("flux-2", in_channels=128, joint_attention_dim=96, guidance_embeds=False),
        is_distilled=True,
    )


def qwen_image() -> Any:
    tiny = load_catalogue()["qwen2.5-vl"].tiny
    assert tiny is not None
    text = {**tiny.config["text_config"], "vocab_size": VOCABULARY}
    denoiser = {"in_channels": 64, "out_channels": 16, "joint_attention_dim": 128}
    return diffusers.QwenImagePipeline(
        scheduler=dynamic(shift_terminal=0.02),
        vae=qwen_image_vae(),
        text_encoder=model_of("qwen2.5-vl", text_config=text),
        tokenizer=byte_tokenizer(model_max_length=1024),
        transformer=model_of("qwen-image", use_additional_t_cond=False, use_layer3d_rope=False, **denoiser),
    )


def projected_clip_l() -> Any:
    """With the identity as its projection, as published."""
    size = {"vocab_size": VOCABULARY, "max_position_embeddings": 77, "projection_dim": 768}
    model = model_of("clip-l-projection", **size)
    torch.nn.init.eye_(model.text_projection.weight)
    return model


def sd3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=model_of(
            "sd3", in_channels=16, out_channels=16, joint_attention_dim=2048, pooled_projection_dim=800
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=projected_clip_l(),
        tokenizer=byte_tokenizer(),
        text_encoder_2=clip_g(),
        tokenizer_2=byte_tokenizer(),
        text_encoder_3=t5(2048),
        tokenizer_3=byte_tokenizer(),
    )


def sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        vae=vae("kl-vae", latent_channels=4, scaling_factor=0.13025),
        text_encoder=clip_l(num_hidden_layers=2),
        text_encoder_2=model_of("clip-g", vocab_size=VOCABULARY, max_position_embeddings=77, num_hidden_layers=2),
        tokenizer=byte_tokenizer(),
        tokenizer_2=byte_tokenizer(),
        unet=model_of("sdxl", projection_class_embeddings_input_dim=6 * 256 + 32, sample_size=8),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
    )


def sd_1() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=vae("kl-vae", latent_channels=4, scaling_factor=0.18215),
        text_encoder=clip_l(),
        tokenizer=byte_tokenizer(),
        unet=model_of("sd-1", sample_size=8),
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def wan() -> Any:
    return diffusers.WanPipeline(
        tokenizer=byte_tokenizer(model_max_length=512),
        text_encoder=model_of("umt5-xxl", vocab_size=VOCABULARY, d_model=32),
        vae=model_of("wan-2.1-vae"),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=model_of(
            "wan", in_channels=16, out_channels=16, image_dim=None, added_kv_proj_dim=None, pos_embed_seq_len=None
        ),
    )


def krea_2() -> Any:
    tiny = load_catalogue()["qwen3-vl"].tiny
    assert tiny is not None
    text = {**tiny.config["text_config"], "vocab_size": VOCABULARY}
    return diffusers.Krea2Pipeline(
        scheduler=dynamic(),
        vae=qwen_image_vae(),
        text_encoder=model_of("qwen3-vl", text_config=text),
        tokenizer=byte_tokenizer(model_max_length=1024),
        transformer=model_of("krea-2", in_channels=64, text_hidden_dim=64, num_text_layers=2),
        text_encoder_select_layers=(1, 2),
        is_distilled=False,
    )


def anima() -> Any:
    pipe = diffusers.AnimaModularPipeline()
    pipe.update_components(
        text_encoder=model_of("qwen3", vocab_size=VOCABULARY, hidden_size=48),
        tokenizer=byte_tokenizer(model_max_length=512),
        t5_tokenizer=byte_tokenizer(model_max_length=512),
        text_conditioner=model_of("anima-text-conditioner", target_vocab_size=VOCABULARY, min_sequence_length=512),
        transformer=model_of("cosmos-predict2", in_channels=16, out_channels=16),
        vae=qwen_image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return pipe


def cogview_4() -> Any:
    encoder = transformers.GlmModel(
        transformers.GlmConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            pad_token_id=0,
        )
    )
    return diffusers.CogView4Pipeline(
        tokenizer=byte_tokenizer(model_max_length=1024, padding_side="left"),
        text_encoder=randomised(encoder),
        vae=flux_vae(),
        transformer=model_of("cogview-4", in_channels=16, out_channels=16),
        scheduler=dynamic(base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )


def lumina_2() -> Any:
    return diffusers.Lumina2Pipeline(
        transformer=model_of("lumina-2", in_channels=16, cap_feat_dim=64),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=flux_vae(),
        text_encoder=model_of("gemma-2", vocab_size=VOCABULARY),
        tokenizer=byte_tokenizer(model_max_length=256),
    )


def chroma() -> Any:
    return diffusers.ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=flux_vae(),
        text_encoder=t5(),
        tokenizer=byte_tokenizer(model_max_length=128),
        transformer=model_of("chroma", in_channels=64),
    )


PIPELINES: dict[str, Callable[[], Any]] = {
    "anima": anima,
    "chroma": chroma,
    "cogview-4": cogview_4,
    "flux-1": flux_1,
    "flux-2": flux_2,
    "krea-2": krea_2,
    "lumina-2": lumina_2,
    "qwen-image": qwen_image,
    "sd-1": sd_1,
    "sd3": sd3,
    "sdxl": sdxl,
    "wan": wan,
    "z-image": z_image,
}
"""By the id of the family."""


def write_pipeline(family: str, folder: Path) -> Path:
    """Write the pipeline of a family as a diffusers folder."""
    PIPELINES[family]().save_pretrained(str(folder))
    return folder


def plain_pipeline(kind: Any, folder: Path) -> Any:
    """What diffusers itself makes of a folder, in bfloat16."""
    if issubclass(kind, diffusers.ModularPipeline):
        pipe = kind.from_pretrained(str(folder))
        pipe.load_components(dtype=torch.bfloat16)
        return pipe
    return kind.from_pretrained(folder, dtype=torch.bfloat16)


def write_single(folder: Path, out: Path) -> Path:
    """Write the denoiser of a pipeline's folder as one file in native names, with what files of the family hold."""
    slipcast.convert(folder, out, layout="native")
    if (folder / "text_conditioner").is_dir():
        inner = out.with_name("inner.safetensors")
        slipcast.convert(folder / "text_conditioner", inner, layout="native")
        held = {f"net.{name}": tensor for name, tensor in load_file(out).items()}
        held |= {f"net.llm_adapter.{name}": tensor for name, tensor in load_file(inner).items()}
        save_file(held, out)
        inner.unlink()
    return out


def write_all_in_one(family: str, folder: Path, out: Path) -> Path:
    """Write the models of a pipeline's folder as the one file that Stable Diffusion's authors publish."""
    held: dict[str, torch.Tensor] = {}
    for role, (prefix, layout) in ALL_IN_ONE[family].items():
        part = out.with_name(f"{role}.safetensors")
        slipcast.convert(folder / role, part, layout=layout)
        held |= {prefix + name: tensor for name, tensor in load_file(part).items()}
        part.unlink()
    if family == "sd3":  # whose files hold no projection: it is the identity
        del held["text_encoders.clip_l.transformer.text_projection.weight"]
    save_file(held, out)
    return out


ALL_IN_ONE: dict[str, dict[str, tuple[str, Any]]] = {
    "sd-1": {
        "unet": ("model.diffusion_model.", "native"),
        "vae": ("first_stage_model.", "native"),
        "text_encoder": ("cond_stage_model.transformer.", "native"),
    },
    "sdxl": {
        "unet": ("model.diffusion_model.", "native"),
        "vae": ("first_stage_model.", "native"),
        "text_encoder": ("conditioner.embedders.0.transformer.", "native"),
        "text_encoder_2": ("conditioner.embedders.1.model.", "native"),
    },
    "sd3": {
        "transformer": ("model.diffusion_model.", "native"),
        "vae": ("first_stage_model.", "native"),
        "text_encoder": ("text_encoders.clip_l.transformer.", None),
        "text_encoder_2": ("text_encoders.clip_g.transformer.", "diffusers"),
        "text_encoder_3": ("text_encoders.t5xxl.transformer.", "diffusers"),
    },
}
"""Family -> role -> what stands before its names, and whose names they are."""


def without_models(folder: Path, out: Path) -> Path:
    """Write a pipeline's folder without its models: tokenizers and scheduler."""
    for inside in folder.iterdir():
        if inside.is_dir() and not any(inside.glob("*.safetensors")):
            shutil.copytree(inside, out / inside.name)
    return out
