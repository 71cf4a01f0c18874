"""Train the demonstration's model: a small transformer that draws handwritten digits, by flow matching.

    python benchmarks/train_digits.py --out slipcast/demo       # minutes on one GPU
    python benchmarks/train_digits.py --check slipcast/demo     # counts again, through diffusers' own conversion

It writes ``digits.safetensors``, a single file as ComfyUI keeps them (bfloat16, native names behind
``model.diffusion_model.``), and ``captions.safetensors``, the table of caption features. Run twice on one kind of
device with the same versions it writes the same weights, unless ``--seconds`` ends the training first.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor
from training import Schedule, add_options, optimise, repeatable

from slipcast.demo.recognise import DIGITS, IMAGE_SIZE, count_recognised, real_digits, train_recogniser
from slipcast.demo.sampling import CAPTIONS, draw_noise, integrate, load_captions, sample

CONFIG: dict[str, Any] = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "in_channels": 1,
    "dim": 192,
    "n_layers": 4,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 64,
    "axes_dims": [16, 24, 24],
    "axes_lens": [1536, 512, 512],
}
PATCH = 2
CAPTION_TOKENS = 8
PREFIX = "model.diffusion_model."
MODEL_FILE, CAPTION_FILE = "digits.safetensors", "captions.safetensors"

SAMPLED = list(range(DIGITS)) * 20
SAMPLE_SEED = 0
SAMPLE_STEPS = 8

DATA = (
    "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, "
    "preprocessed with programs of NIST; its test set as sklearn.datasets.load_digits has it "
    "(scikit-learn is BSD-3-Clause)"
)
METADATA = {
    "title": "slipcast demonstration: handwritten digits, 16 x 16",
    "description": "A small class-conditional transformer trained by flow matching with benchmarks/train_digits.py.",
    "license": "Apache-2.0",
    "training_data": DATA,
}


# --- the model, and its forward for samples of one size ---------------------------------------------------------------


def build_model(seed: int, config: dict[str, Any]) -> ZImageTransformer2DModel:
    """An untrained model, the same for the same seed. Padding tokens start small and random, not at zero."""
    torch.manual_seed(seed)
    model = ZImageTransformer2DModel(**config)
    with torch.no_grad():
        model.x_pad_token.normal_(std=0.02)
        model.cap_pad_token.normal_(std=0.02)
    return model


def make_captions(seed: int, features: int) -> Tensor:
    """One random caption for each digit, ``[10, 8, features]`` float32 that bfloat16 holds exactly.

    They stand for a text encoder's output; all that the model needs of them is that they differ.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(DIGITS, CAPTION_TOKENS, features, generator=generator).bfloat16().float()


@dataclass(frozen=True)
class BatchedForward:
    """The model's forward for images of one size and captions of one length, as one batch.

    The class's own forward takes lists and handles each sample by itself in Python. With equal lengths nothing is
    padded between samples, so the same submodules on one batch compute the same; `assert_same_forward` compares them.
    """

    captions: Tensor
    image_rotary: Tensor
    caption_rotary: Tensor
    caption_padding: Tensor

    @classmethod
    def of(cls, model: ZImageTransformer2DModel, captions: Tensor) -> BatchedForward:
        """Take positions and padding from the model's own treatment of one sample."""
        image = torch.zeros(model.in_channels, 1, IMAGE_SIZE, IMAGE_SIZE, device=captions.device)
        _, _, _, image_ids, caption_ids, image_padding, caption_padding = model.patchify_and_embed(
            [image], [captions[0]], PATCH, 1
        )
        assert not image_padding[0].any(), "images must fill whole multiples of the sequence's unit"
        rotary = model.rope_embedder
        # The class counts a caption's padding twice in the positions and cuts the surplus off again.
        caption_ids = caption_ids[0][: len(caption_padding[0])]
        return cls(captions, rotary(image_ids[0])[None], rotary(caption_ids)[None], caption_padding[0])

    def __call__(self, model: ZImageTransformer2DModel, x: Tensor, t: Tensor, digits: Tensor) -> Tensor:
        """``dx/dt`` of images ``[n, 1, 16, 16]`` at times ``[n]`` that show ``digits`` ``[n]``."""
        modulation = model.t_embedder(t * model.t_scale).type_as(x)
        tokens = model.all_x_embedder[f"{PATCH}-1"](patchify(x))
        for layer in model.noise_refiner:
            tokens = layer(tokens, None, self.image_rotary, modulation)
        words = self._refined_captions(model)[digits]
        tokens = torch.cat([tokens, words], dim=1)
        rotary = torch.cat([self.image_rotary, self.caption_rotary], dim=1)
        for layer in model.layers:
            tokens = layer(tokens, None, rotary, modulation)
        tokens = model.all_final_layer[f"{PATCH}-1"](tokens, c=modulation)
        return unpatchify(tokens[:, : self.image_rotary.shape[1]], x.shape)

    def _refined_captions(self, model: ZImageTransformer2DModel) -> Tensor:
        """All ten captions after the refiner, which does not see the time, so they are computed once per batch."""
        padding = self.caption_padding
        words = model.cap_embedder(self.captions)
        words = torch.nn.functional.pad(words, (0, 0, 0, len(padding) - words.shape[1]))
        words = torch.where(padding[:, None], model.cap_pad_token, words)
        for layer in model.context_refiner:
            words = layer(words, None, self.caption_rotary)
        return words


def patchify(x: Tensor) -> Tensor:
    """Images ``[n, channels, height, width]`` as tokens ``[n, patches, 4 * channels]``, row by row, channels last."""
    n, channels, height, width = x.shape
    x = x.view(n, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(n, -1, PATCH * PATCH * channels)


def unpatchify(tokens: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `patchify`, for images of ``shape``."""
    n, channels, height, width = shape
    tokens = tokens.view(n, height // PATCH, width // PATCH, PATCH, PATCH, channels)
    return tokens.permute(0, 5, 1, 3, 2, 4).reshape(shape)


@torch.no_grad()
def assert_same_forward(model: ZImageTransformer2DModel, forward: BatchedForward) -> None:
    """Refuse to train if the batched forward and the class's own differ by more than rounding."""
    device = forward.captions.device
    digits = torch.arange(DIGITS, device=device)
    x = draw_noise(DIGITS, seed=1).to(device)
    t = torch.linspace(0, 0.9, DIGITS, device=device)
    own = model(list(x.unsqueeze(2)), t, list(forward.captions[digits]), return_dict=False)[0]
    expected = torch.stack(own).squeeze(2)
    error = ((forward(model, x, t, digits) - expected).norm() / expected.norm()).item()
    assert error < 1e-4, f"the forwards differ: relative L2 {error:.2e}"


# --- training ---------------------------------------------------------------------------------------------------------


def flow_matching_loss(
    forward: BatchedForward, model: ZImageTransformer2DModel, images: Tensor, digits: Tensor, generator: torch.Generator
) -> Tensor:
    """Mean squared error of the predicted ``image - noise`` at uniform times (Lipman et al., 2023)."""
    device = images.device
    noise = torch.randn(images.shape, generator=generator, device=device)
    t = torch.rand(len(images), generator=generator, device=device)
    mix = t.view(-1, 1, 1, 1)
    predicted = forward(model, mix * images + (1 - mix) * noise, t, digits)
    return torch.nn.functional.mse_loss(predicted, images - noise)


def train(arguments: argparse.Namespace) -> tuple[ZImageTransformer2DModel, Tensor]:
    """Train on all the real digits; the averaged model in float32 on the CPU, and its caption table."""
    device = torch.device(arguments.device)
    model = build_model(arguments.seed, CONFIG)
    model.to(device)  # type: ignore[arg-type]  # a wrapped method
    captions = make_captions(arguments.seed, CONFIG["cap_feat_dim"]).to(device)
    forward = BatchedForward.of(model, captions)
    assert_same_forward(model, forward)
    torch.set_float32_matmul_precision("high")  # only now: the comparison is made in full float32
    average = copy.deepcopy(model).requires_grad_(False)
    images, digits = (part.to(device) for part in real_digits())
    recogniser = train_recogniser()
    generator = torch.Generator(device).manual_seed(arguments.seed)

    def loss_of(_: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        loss = flow_matching_loss(forward, model, images[rows], digits[rows], generator)
        return loss, loss

    def report(loss: str) -> str:
        recognised = count_recognised(recogniser, sample_batched(forward, average), SAMPLED)
        return f"loss {loss}  recognised {recognised} of {len(SAMPLED)}"

    schedule = Schedule(arguments.steps, arguments.batch, arguments.learning_rate, arguments.seconds, report_every=100)
    optimise("digits", model, schedule, len(images), loss_of, report, generator, average=average)
    return average.cpu(), captions.cpu()


@torch.no_grad()
def sample_batched(forward: BatchedForward, model: ZImageTransformer2DModel) -> Tensor:
    """The 200 samples that are counted, in one batch, ``[200, 1, 16, 16]``."""
    device = forward.captions.device
    digits = torch.tensor(SAMPLED, device=device)
    noise = draw_noise(len(SAMPLED), seed=SAMPLE_SEED).to(device)
    return integrate(lambda x, t: forward(model, x, t, digits), noise, steps=SAMPLE_STEPS).clamp(-1, 1)


# --- the files --------------------------------------------------------------------------------------------------------


def native_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's state under the names of the original single files, queries, keys and values joined, in bfloat16."""
    renamed = {
        f"all_x_embedder.{PATCH}-1.": "x_embedder.",
        f"all_final_layer.{PATCH}-1.": "final_layer.",
        ".attention.to_out.0.": ".attention.out.",
        ".attention.norm_q.": ".attention.q_norm.",
        ".attention.norm_k.": ".attention.k_norm.",
    }
    native = {}
    for name, value in state.items():
        if ".attention.to_k." in name or ".attention.to_v." in name:
            continue  # joined where its query is met
        if ".attention.to_q." in name:
            value = torch.cat([state[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")])
            name = name.replace("to_q", "qkv")
        for own, original in renamed.items():
            name = name.replace(own, original)
        native[PREFIX + name] = value.detach().bfloat16().contiguous()
    return native


def write(folder: Path, model: ZImageTransformer2DModel, captions: Tensor) -> None:
    """Write both files, each to a temporary file beside it that is then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    caption_metadata = {
        "title": "slipcast demonstration: caption features of the digits 0 to 9",
        "description": "Seeded random numbers [digit, token, feature] that stand for a text encoder's output.",
        "license": "Apache-2.0",
    }
    for name, tensors, metadata in (
        (MODEL_FILE, native_state_dict(model.state_dict()), METADATA),
        (CAPTION_FILE, {CAPTIONS: captions}, caption_metadata),
    ):
        partial = folder / f"{name}.partial"
        save_file(tensors, partial, {"format": "pt", **metadata})
        partial.replace(folder / name)
        print(f"wrote {folder / name}, {(folder / name).stat().st_size:,} bytes")


def load_with_diffusers(path: Path) -> ZImageTransformer2DModel:
    """The written file as diffusers' own single-file conversion reads it, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        ZImageTransformer2DModel(**CONFIG).save_config(folder)
        return ZImageTransformer2DModel.from_single_file(path, config=folder, torch_dtype=torch.float32).eval()


@torch.no_grad()
def round_to_fp8(model: ZImageTransformer2DModel) -> ZImageTransformer2DModel:
    """A copy whose linear weights, but for the embedders', are as float8 with a scale for each row would hold them."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith(("t_embedder", "cap_embedder")):
            scale = module.weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            module.weight.copy_((module.weight / scale).to(torch.float8_e4m3fn).float() * scale)
    return model


def check(folder: Path) -> None:
    """Count the recognised samples of the written file: in float32, in bfloat16, and with weights rounded to fp8."""
    model = load_with_diffusers(folder / MODEL_FILE)
    captions = load_captions(folder / CAPTION_FILE)
    recogniser = train_recogniser()
    for title, variant, dtype in (
        ("float32", model, torch.float32),
        ("fp8 weights, float32", round_to_fp8(model), torch.float32),
        ("bfloat16", copy.deepcopy(model).bfloat16(), torch.bfloat16),
    ):
        started = time.perf_counter()
        images = sample(variant, captions, SAMPLED, seed=SAMPLE_SEED, steps=SAMPLE_STEPS, compute_dtype=dtype)
        recognised = count_recognised(recogniser, images, SAMPLED)
        seconds = time.perf_counter() - started
        print(f"{title}: recognised {recognised} of {len(SAMPLED)}  {seconds:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write, or check what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="train, and write the two files to this folder")
    what.add_argument("--check", type=Path, metavar="FOLDER", help="count the recognised samples of the written files")
    parser.add_argument("--steps", type=int, default=3000, help="training steps (%(default)s)")
    add_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.check:
        check(arguments.check)
        return
    with repeatable():
        model, captions = train(arguments)
    write(arguments.out, model, captions)


if __name__ == "__main__":
    main()
