"""The program that trains the demonstration's pipeline, against diffusers' and transformers' own ways."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from torch import Tensor

import slipcast
from slipcast.demo.prompted import draw
from slipcast.demo.recognise import as_recognised, count_recognised, enlarged_digits, held_out, train_recogniser
from support.isolation import isolate

PROGRAMS = str(Path(__file__).parents[1] / "benchmarks")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    sys.path.insert(0, PROGRAMS)
    try:
        return import_module("train_demo")
    finally:
        sys.path.remove(PROGRAMS)


@pytest.fixture(scope="module")
def prompts(program: ModuleType) -> ModuleType:
    return sys.modules["demo_prompts"]


@pytest.fixture(scope="module")
def files(program: ModuleType) -> ModuleType:
    return sys.modules["demo_files"]


@pytest.fixture(scope="module")
def vae_program(program: ModuleType) -> ModuleType:
    return sys.modules["demo_vae"]


@pytest.fixture(scope="module")
def written(program, files, vae_program, tmp_path_factory) -> Path:
    """An untrained pipeline, as the program writes it."""
    folder = tmp_path_factory.mktemp("demo") / "pipeline"
    denoiser = program.build_model(0, program.DENOISER)
    files.write(folder, program.build_encoder(0, program.ENCODER), program.ENCODER, denoiser, vae_program.build_vae(0))
    return folder


@pytest.fixture(scope="module")
def pipeline(files, written):
    return files.load(written, torch.float32, CPU)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_every_prompt_has_a_token_for_each_byte(prompts):
    ids = prompts.token_ids(prompts.build_tokenizer(), "a séven")
    assert ids[0] == ids[-1] == 257
    assert ids[-2] == 258
    assert len(ids) == len("a séven".encode()) + 3


def test_tables_hold_every_spelling_at_its_padded_length(prompts):
    tokenizer = prompts.build_tokenizer()
    short, long = prompts.prompt_tables(tokenizer, ("{}", "a {}, written by hand, in white on black"), CPU)
    assert (short.ids.shape[1], long.ids.shape[1]) == (32, 64)
    for table, text in ((short, "{}"), (long, "a {}, written by hand, in white on black")):
        for digit, rows in enumerate(table.rows):
            kept = {
                tuple(table.ids[row][~table.padding(table.rows[digit])[at]].tolist()) for at, row in enumerate(rows)
            }
            forms = (prompts.NAMES[digit], prompts.NAMES[digit].title(), prompts.NAMES[digit].upper(), str(digit))
            assert kept == {tuple(prompts.token_ids(tokenizer, text.format(form))) for form in forms}
    assert short.ids[short.empty, : short.lengths[short.empty]].tolist() == prompts.token_ids(tokenizer, "")
    assert long.empty == -1


def test_prompts_are_chosen_for_their_digits_and_some_are_empty(prompts):
    (table,) = prompts.prompt_tables(prompts.build_tokenizer(), ("{}", "a {}"), CPU)
    digits = torch.arange(10).repeat(200)
    rows = table.choose(digits, torch.Generator().manual_seed(0), 0.1)
    empty = rows == table.empty
    assert 0.07 < empty.float().mean() < 0.13
    assert all(row in table.rows[digit] for row, digit in zip(rows[~empty], digits[~empty], strict=True))
    assert len(rows.unique()) == 10 * 2 * 4 + 1


def test_sentences_never_seen_are_none_of_the_templates(prompts):
    assert not set(prompts.UNSEEN) & set(prompts.TEMPLATES)


# --- forwards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_the_batched_forward_is_the_models_own(program, prompts, which):
    encoder, denoiser = program.build_encoder(0, program.ENCODER), program.build_model(0, program.DENOISER)
    table = prompts.prompt_tables(prompts.build_tokenizer(), program.TEMPLATES, CPU)[which]
    forward = program.ConditionedForward.of(denoiser, table.ids.shape[1], CPU)
    program.assert_same_forward(denoiser, encoder, program.Prompts(table, forward))
    shifted = program.ConditionedForward(forward.image_rotary.roll(1, 1), forward.caption_rotary, forward.image_padding)
    with pytest.raises(AssertionError, match="the forwards differ"):
        program.assert_same_forward(denoiser, encoder, program.Prompts(table, shifted))


def test_captions_are_those_of_the_pipeline(program, prompts, pipeline):
    texts = ["seven", "a picture of the handwritten digit 7"]
    own, _ = pipeline.encode_prompt(list(texts), do_classifier_free_guidance=False, max_sequence_length=64)
    ids = [prompts.token_ids(pipeline.tokenizer, text) for text in texts]
    for one, expected in zip(ids, own, strict=True):
        with torch.no_grad():
            ours = program.encode(pipeline.text_encoder, torch.tensor([[*one, 256, 256]]))[0, : len(one)]
        assert relative_error(ours, expected) < 1e-5


def test_noise_levels_are_the_schedulers(program, files):
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=files.SHIFT)
    fractions = torch.linspace(1, 1 / 8, 8)
    scheduler.set_timesteps(sigmas=fractions.tolist())
    assert torch.allclose(program.noise_levels(fractions), scheduler.sigmas[:-1], atol=1e-6)


def test_samples_in_training_are_the_pipelines(program, prompts, files, vae_program, pipeline):
    table = prompts.prompt_tables(prompts.build_tokenizer(), program.TEMPLATES, CPU)[0]
    forward = program.ConditionedForward.of(pipeline.transformer, 32, CPU)
    digits = [7, 3]
    program.SAMPLED, kept = digits, program.SAMPLED
    try:
        pair = torch.nn.ModuleList([pipeline.text_encoder, pipeline.transformer])
        ours = program.sample(program.Prompts(table, forward), pair, pipeline.vae).clamp(-1, 1)
    finally:
        program.SAMPLED = kept
    assert relative_error(ours, draw(pipeline, ["seven", "three"], seed=0)) < 1e-4


# --- losses -----------------------------------------------------------------------------------------------------------


def test_the_pairs_loss_falls_and_reaches_the_encoder(program, prompts):
    encoder, denoiser = program.build_encoder(0, program.ENCODER), program.build_model(0, program.DENOISER)
    table = prompts.prompt_tables(prompts.build_tokenizer(), ("{}",), CPU)[0]
    batch = program.Prompts(table, program.ConditionedForward.of(denoiser, 32, CPU))
    latents = torch.randn(10, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    pair = torch.nn.ModuleList([encoder, denoiser])
    reader = torch.nn.Linear(64, 10)
    optimiser = torch.optim.AdamW([*pair.parameters(), *reader.parameters()], lr=3e-3)
    before = encoder.layers[0].mlp.up_proj.weight.detach().clone()
    losses = []
    for _ in range(12):
        generator = torch.Generator().manual_seed(0)
        loss = program.pair_loss(batch, denoiser, encoder, reader, latents, torch.arange(10), generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(encoder.layers[0].mlp.up_proj.weight, before)
    assert encoder.layers[-1].mlp.up_proj.weight.grad is None  # the pipeline does not take what it returns


def test_the_vaes_loss_falls(vae_program):
    vae = vae_program.build_vae(0)
    pixels = vae_program.to_pixels(enlarged_digits()[0][:2])
    optimiser = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    losses = []
    for _ in range(6):
        loss, _ = vae_program.vae_loss(vae, pixels, torch.Generator().manual_seed(0))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_pictures_are_shrunk_to_what_the_classifier_knows():
    images, labels = enlarged_digits()
    assert images.shape == (1797, 1, 64, 64)
    unseen = held_out(labels)
    shrunk = as_recognised(images[unseen].expand(-1, 3, -1, -1))
    assert shrunk.shape == (360, 1, 16, 16)
    assert count_recognised(train_recogniser(), shrunk, labels[unseen].tolist()) >= 0.95 * 360


# --- the folder -------------------------------------------------------------------------------------------------------


def test_the_folder_is_a_pipeline_with_the_weights_written(program, vae_program, written, pipeline):
    assert type(pipeline).__name__ == "ZImagePipeline"
    assert json.loads((written / "model_index.json").read_text())["text_encoder"] == ["transformers", "Qwen3Model"]
    for part, expected in (
        (pipeline.text_encoder, program.build_encoder(0, program.ENCODER)),
        (pipeline.transformer, program.build_model(0, program.DENOISER)),
        (pipeline.vae, vae_program.build_vae(0)),
    ):
        state = part.state_dict()
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(state[name], value.bfloat16().float()) for name, value in expected.state_dict().items())
    assert pipeline.text_encoder.config.rope_parameters["rope_theta"] == 1e6
    assert [path for path in written.parent.iterdir() if path != written] == []


def test_every_part_is_identified_with_its_configuration(program, vae_program, written, monkeypatch, tmp_path):
    isolate(monkeypatch, tmp_path)
    for part, family, config in (
        ("transformer/diffusion_pytorch_model", "z-image", program.DENOISER),
        ("vae/diffusion_pytorch_model", "flux-1-vae", vae_program.CONFIG),
        ("text_encoder/model", "qwen3", program.ENCODER),
    ):
        found = slipcast.inspect(written / f"{part}.safetensors").to_dict()
        assert found["family"] == family
        assert found["problems"] == []
        compared = (config.keys() & found["config"].keys()) - {"sample_size"}  # which no tensor shows
        assert len(compared) >= 8
        assert {name: found["config"][name] for name in compared} == {name: config[name] for name in compared}
        assert all(value.dtype == torch.bfloat16 for value in load_file(written / f"{part}.safetensors").values())


def test_the_whole_demonstration_stays_under_12_mb(written):
    shipped = Path(slipcast.__path__[0]) / "demo"
    pipeline = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    assert pipeline + sum(path.stat().st_size for path in shipped.glob("*.safetensors")) < 12_000_000
