"""Train the demonstration's pipeline: a text encoder, a VAE and a denoiser that draw the digit a prompt names.

    python benchmarks/train_demo.py --out slipcast/demo/pipeline      # minutes on one GPU
    python benchmarks/train_demo.py --check slipcast/demo/pipeline    # counts again, with diffusers' own pipeline

The VAE is trained first. The encoder and the denoiser are then trained together by flow matching in its latents: the
encoder learns what the denoiser needs of a prompt. ``--out`` writes a folder that diffusers loads as a whole, weights
in bfloat16. Run twice on one kind of device with the same versions it writes the same weights, unless ``--seconds``
ends the training first.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from demo_files import SHIFT, check, write
from demo_prompts import TEMPLATES, PromptTable, build_tokenizer, prompt_tables
from demo_vae import LATENT_SHAPE, all_latents, decode, train_vae
from diffusers import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch import Tensor, nn
from train_digits import PATCH, SAMPLED, build_model, patchify, unpatchify
from training import Schedule, add_options, optimise, repeatable
from transformers import Qwen3Config, Qwen3Model

from slipcast.demo.prompted import NAMES, STEPS, start_noise
from slipcast.demo.recognise import as_recognised, count_recognised, enlarged_digits, train_recogniser

ENCODER: dict[str, Any] = {
    "architectures": ["Qwen3Model"],
    "model_type": "qwen3",
    "vocab_size": 272,  # 259 tokens; quantised rows come in sixteens
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,  # the pipeline takes what the last but one returns
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
DENOISER: dict[str, Any] = {
    "all_patch_size": [PATCH],
    "all_f_patch_size": [1],
    "in_channels": LATENT_SHAPE[0],
    "dim": 96,
    "n_layers": 5,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": ENCODER["hidden_size"],
    "axes_dims": [8, 12, 12],
    "axes_lens": [1536, 512, 512],
}
UNCONDITIONAL = 0.1
NAMING_WEIGHT = 0.1
LONG_EVERY = 4
"""Every so many steps the prompts are of the longer table."""


# --- the models, and their forwards for one batch ---------------------------------------------------------------------


def build_encoder(seed: int, config: dict[str, Any]) -> Qwen3Model:
    """An untrained text encoder, the same for the same seed."""
    torch.manual_seed(seed)
    return Qwen3Model(Qwen3Config(**{**config, "use_cache": False})).float()


def encode(encoder: Qwen3Model, ids: Tensor) -> Tensor:
    """What the pipeline takes of the encoder, ``[n, length, hidden]``.

    Attention is causal, so padding behind a prompt changes nothing before it, and there is no mask.
    """
    states: Tensor = encoder(input_ids=ids, output_hidden_states=True).hidden_states[-2]
    return states


@dataclass(frozen=True)
class ConditionedForward:
    """The denoiser's forward for latents of one size and captions of one padded length, as one batch.

    The class's own forward takes lists and handles each sample by itself in Python; `assert_same_forward` compares.
    """

    image_rotary: Tensor
    caption_rotary: Tensor
    image_padding: Tensor

    @classmethod
    def of(cls, model: ZImageTransformer2DModel, length: int, device: torch.device) -> ConditionedForward:
        """Take positions and padding from the model's own treatment of one sample."""
        latents = torch.zeros(LATENT_SHAPE, device=device).unsqueeze(1)
        features = torch.zeros(length, model.config.cap_feat_dim, device=device)
        _, _, _, image_ids, caption_ids, image_padding, _ = model.patchify_and_embed([latents], [features], PATCH, 1)
        rotary = model.rope_embedder
        return cls(rotary(image_ids[0])[None], rotary(caption_ids[0])[None], image_padding[0])

    def __call__(
        self, model: ZImageTransformer2DModel, x: Tensor, t: Tensor, features: Tensor, padding: Tensor
    ) -> Tensor:
        """``dx/dt`` of latents ``[n, 16, 8, 8]`` at times ``[n]``.

        ``features`` are the captions' ``[n, length, hidden]``, and ``padding`` ``[n, length]`` says which are none.
        """
        modulation = model.t_embedder(t * model.t_scale).type_as(x)
        tokens = model.all_x_embedder[f"{PATCH}-1"](patchify(x))
        patches = tokens.shape[1]
        tokens = nn.functional.pad(tokens, (0, 0, 0, len(self.image_padding) - patches))
        tokens = torch.where(self.image_padding[:, None], model.x_pad_token, tokens)
        for layer in model.noise_refiner:
            tokens = layer(tokens, None, self.image_rotary, modulation)
        words = torch.where(padding[..., None], model.cap_pad_token, model.cap_embedder(features))
        for layer in model.context_refiner:
            words = layer(words, None, self.caption_rotary)
        tokens = torch.cat([tokens, words], dim=1)
        rotary = torch.cat([self.image_rotary, self.caption_rotary], dim=1)
        for layer in model.layers:
            tokens = layer(tokens, None, rotary, modulation)
        tokens = model.all_final_layer[f"{PATCH}-1"](tokens, c=modulation)
        return unpatchify(tokens[:, :patches], x.shape)


@dataclass(frozen=True)
class Prompts:
    """Prompts of one padded length, with the denoiser's forward for them."""

    table: PromptTable
    forward: ConditionedForward


@torch.no_grad()
def assert_same_forward(model: ZImageTransformer2DModel, encoder: Qwen3Model, prompts: Prompts) -> None:
    """Refuse to train if the batched forward and the class's own differ by more than rounding."""
    device = prompts.table.ids.device
    rows = prompts.table.rows[:, -1]
    features, padding = encode(encoder, prompts.table.ids[rows]), prompts.table.padding(rows)
    x, t = start_noise(len(rows), seed=1).to(device), torch.linspace(0, 0.9, len(rows), device=device)
    captions = [one[~gone] for one, gone in zip(features, padding, strict=True)]
    own = model(list(x.unsqueeze(2)), t, captions, return_dict=False)[0]
    expected = torch.stack(own).squeeze(2)
    error = ((prompts.forward(model, x, t, features, padding) - expected).norm() / expected.norm()).item()
    assert error < 1e-4, f"the forwards differ: relative L2 {error:.2e}"


# --- training ---------------------------------------------------------------------------------------------------------


def noise_levels(fractions: Tensor) -> Tensor:
    """The scheduler's noise levels for evenly spread fractions in (0, 1]; its shift moves them towards 1."""
    return SHIFT * fractions / (1 + (SHIFT - 1) * fractions)


def pair_loss(
    prompts: Prompts,
    denoiser: ZImageTransformer2DModel,
    encoder: Qwen3Model,
    reader: nn.Linear,
    latents: Tensor,
    digits: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Mean squared error of the predicted ``latents - noise`` (Lipman et al., 2023), at times as the steps have them.

    The gradient goes through the captions into the encoder. Added to it is the cross-entropy of the digit that
    ``reader``, a linear layer used in training alone, tells from a caption's last token, which has seen the others:
    the encoder has then learned its words long before pictures could have taught them.
    """
    device = latents.device
    noise = torch.randn(latents.shape, generator=generator, device=device)
    sigma = noise_levels(torch.rand(len(latents), generator=generator, device=device))
    rows = prompts.table.choose(digits, generator, UNCONDITIONAL)
    features = encode(encoder, prompts.table.ids[rows])
    mix = sigma.view(-1, 1, 1, 1)
    x = (1 - mix) * latents + mix * noise
    predicted = prompts.forward(denoiser, x, 1 - sigma, features, prompts.table.padding(rows))
    last = features[torch.arange(len(rows), device=device), prompts.table.lengths[rows] - 1]
    named = digits.masked_fill(rows == prompts.table.empty, -100)  # which the cross-entropy leaves out
    told = reader(nn.functional.rms_norm(last, last.shape[-1:]))
    naming = nn.functional.cross_entropy(told, named, reduction="sum") / len(rows)
    return nn.functional.mse_loss(predicted, latents - noise) + NAMING_WEIGHT * naming


def train_pair(
    seed: int, schedule: Schedule, vae: AutoencoderKL, device: torch.device
) -> tuple[Qwen3Model, ZImageTransformer2DModel]:
    """Train the encoder and the denoiser on all the real digits; the averaged models in float32."""
    encoder, denoiser = build_encoder(seed, ENCODER), build_model(seed, DENOISER)
    pair = nn.ModuleList([encoder, denoiser]).to(device)
    reader = nn.Linear(ENCODER["hidden_size"], len(NAMES), device=device)
    tables = prompt_tables(build_tokenizer(), TEMPLATES, device)
    short, *longer = (Prompts(table, ConditionedForward.of(denoiser, table.ids.shape[1], device)) for table in tables)
    for prompts in (short, *longer):
        assert_same_forward(denoiser, encoder, prompts)
    torch.set_float32_matmul_precision("high")  # only now: the comparison is made in full float32
    images, digits = (part.to(device) for part in enlarged_digits())
    mean, deviation = all_latents(vae, images)
    average = copy.deepcopy(pair).requires_grad_(False)
    recogniser = train_recogniser()
    generator = torch.Generator(device).manual_seed(seed)

    def loss_of(step: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        prompts = longer[step // LONG_EVERY % len(longer)] if longer and step % LONG_EVERY == 0 else short
        latents = mean[rows] + deviation[rows] * torch.randn(mean[rows].shape, generator=generator, device=device)
        loss = pair_loss(prompts, denoiser, encoder, reader, latents, digits[rows], generator)
        return loss, loss

    def report(loss: str) -> str:
        recognised = count_recognised(recogniser, as_recognised(sample(short, average, vae)), SAMPLED)
        return f"loss {loss}  recognised {recognised} of {len(SAMPLED)}"

    optimise(
        "pair", pair, schedule, len(images), loss_of, report, generator, beside=reader.parameters(), average=average
    )
    return average[0], average[1]  # type: ignore[return-value]  # what the list was made of


@torch.no_grad()
def sample(prompts: Prompts, pair: nn.ModuleList, vae: AutoencoderKL) -> Tensor:
    """The 200 pictures that are counted, of the bare names, in one batch, ``[200, 3, 64, 64]``."""
    device = prompts.table.ids.device
    rows = prompts.table.rows[torch.tensor(SAMPLED, device=device), 0]
    features, padding = encode(pair[0], prompts.table.ids[rows]), prompts.table.padding(rows)  # type: ignore[arg-type]
    x = start_noise(len(SAMPLED), seed=0).to(device)
    levels = [*noise_levels(torch.linspace(1, 1 / STEPS, STEPS)).tolist(), 0.0]
    for sigma, following in pairwise(levels):
        t = torch.full((len(x),), 1 - sigma, device=device)
        x = x + (sigma - following) * prompts.forward(pair[1], x, t, features, padding)  # type: ignore[arg-type]
    return torch.cat([decode(vae, part) for part in x.split(50)])


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write, or check what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="train, and write the pipeline to this folder")
    what.add_argument("--check", type=Path, metavar="FOLDER", help="count the recognised samples of a written pipeline")
    parser.add_argument("--steps", type=int, default=5000, help="training steps of encoder and denoiser (%(default)s)")
    parser.add_argument("--vae-steps", type=int, default=2000, help="training steps of the VAE (%(default)s)")
    add_options(parser)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if arguments.check:
        check(arguments.check, device, arguments.seed)
        return
    started = time.perf_counter()
    batch, peak, seconds = arguments.batch, arguments.learning_rate, arguments.seconds
    with repeatable():
        of_vae = Schedule(arguments.vae_steps, max(1, batch // 4), peak, seconds / 3, report_every=250)
        vae = train_vae(arguments.seed, of_vae, device)
        of_pair = Schedule(arguments.steps, batch, peak, seconds - (time.perf_counter() - started), report_every=250)
        encoder, denoiser = train_pair(arguments.seed, of_pair, vae, device)
    write(arguments.out, encoder, ENCODER, denoiser, vae)


if __name__ == "__main__":
    main()
