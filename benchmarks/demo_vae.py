"""The demonstration's VAE: digits of 64 x 64 pixels to latents of 16 x 8 x 8 and back."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor
from training import Schedule, optimise

from slipcast.demo.recognise import as_recognised, count_recognised, enlarged_digits, held_out, train_recogniser

# Latents are trained to the scale and the mean that the published sixteen-channel VAEs have, so that a reader who
# takes these two numbers from the kind of VAE, and not from a configuration, gets them right.
SCALE, SHIFT = 0.3611, 0.1159
CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "block_out_channels": [32, 32, 32, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 64,
    "scaling_factor": SCALE,
    "shift_factor": SHIFT,
}
LATENT_SHAPE = (16, 8, 8)
DIVERGENCE_WEIGHT = 1e-4
MOMENTS_WEIGHT = 0.1
JITTER = 0.1
"""Noise on normalised latents before they are decoded: the decoder learns to forgive what a denoiser leaves."""


def build_vae(seed: int) -> AutoencoderKL:
    """An untrained VAE, the same for the same seed."""
    torch.manual_seed(seed)
    return AutoencoderKL(**CONFIG)


def to_pixels(images: Tensor) -> Tensor:
    """Grey images ``[n, 1, h, w]`` as the VAE's three channels."""
    return images.expand(-1, 3, -1, -1)


def normalise(latents: Tensor) -> Tensor:
    """Latents as the denoiser sees them: about zero, about one wide."""
    return (latents - SHIFT) * SCALE


def decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Pixels ``[n, 3, 64, 64]`` of normalised latents, as the pipeline decodes them."""
    return vae.decode(latents / SCALE + SHIFT, return_dict=False)[0]


def vae_loss(vae: AutoencoderKL, pixels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The loss and, as a part of it, the mean squared error of the pixels.

    The rest is a small divergence of the posterior from a standard normal in normalised latents (Kingma and Welling,
    2014), and a pull of each channel's mean and deviation to 0 and 1, which so weak a divergence does not give.
    """
    posterior = vae.encode(pixels, return_dict=False)[0]
    mean, log_variance = normalise(posterior.mean), posterior.logvar + 2 * torch.tensor(SCALE).log().item()
    noise = torch.randn((2, *mean.shape), generator=generator, device=pixels.device)
    latents = mean + (log_variance / 2).exp() * noise[0]
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
    channels = latents.transpose(0, 1).flatten(1)
    moments = channels.mean(1).square().mean() + channels.std(1).log().square().mean()
    error = torch.nn.functional.mse_loss(decode(vae, latents + JITTER * noise[1]), pixels)
    return error + DIVERGENCE_WEIGHT * divergence + MOMENTS_WEIGHT * moments, error


def train_vae(seed: int, schedule: Schedule, device: torch.device) -> AutoencoderKL:
    """Train on all the real digits."""
    vae = build_vae(seed)
    vae.to(device)
    images, digits = (part.to(device) for part in enlarged_digits())
    generator = torch.Generator(device).manual_seed(seed)

    def loss_of(_: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        return vae_loss(vae, to_pixels(images[rows]), generator)

    optimise("vae", vae, schedule, len(images), loss_of, lambda error: f"squared error {error}", generator)
    vae.eval().requires_grad_(False)
    _report(vae, images, digits)
    return vae


@torch.no_grad()
def all_latents(vae: AutoencoderKL, images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the posterior of each image, normalised, each ``[n, 16, 8, 8]``."""
    posteriors = [vae.encode(to_pixels(part), return_dict=False)[0] for part in images.split(256)]
    mean = normalise(torch.cat([one.mean for one in posteriors]))
    return mean, SCALE * torch.cat([one.std for one in posteriors])


@torch.no_grad()
def _report(vae: AutoencoderKL, images: Tensor, digits: Tensor) -> None:
    mean, deviation = all_latents(vae, images)
    unseen = held_out(digits.cpu()).to(images.device)
    restored = torch.cat([decode(vae, part) for part in mean[unseen].split(256)])
    right = digits[unseen].tolist()
    recognised = count_recognised(train_recogniser(), as_recognised(restored), right)
    print(
        f"vae: recognised {recognised} of {len(right)} real digits after encoding and decoding; normalised latents "
        f"mean {mean.mean().item():.3f}, deviation {mean.std().item():.3f}, of the posterior "
        f"{deviation.mean().item():.3f}",
        flush=True,
    )
