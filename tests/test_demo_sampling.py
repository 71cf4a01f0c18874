"""The demonstration's sampler, its recogniser, and the script that trains its model."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slipcast.demo.recognise import count_recognised, held_out, real_digits, train_recogniser
from slipcast.demo.sampling import draw_noise, integrate, load_captions, model_velocity, sample
from slipcast.registry.errors import SlipcastError

PROGRAMS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, PROGRAMS)
    try:
        return import_module("train_digits")
    finally:
        sys.path.remove(PROGRAMS)


@pytest.fixture(scope="module")
def training(script: ModuleType) -> ModuleType:
    return sys.modules["training"]


def small_config(script: ModuleType) -> dict:
    return {**script.CONFIG, "dim": 64, "n_heads": 1, "n_kv_heads": 1, "n_layers": 1, "cap_feat_dim": 16}


@pytest.fixture(scope="module")
def small(script: ModuleType) -> tuple[ZImageTransformer2DModel, torch.Tensor]:
    return script.build_model(0, small_config(script)).eval(), script.make_captions(0, 16)


class Recorder(torch.nn.Module):
    """A model of the same signature that remembers what it was fed and answers with a constant."""

    def __init__(self, answer: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.answer = answer
        self.calls: list[tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]] = []

    def forward(self, x, t, cap_feats, return_dict=True):
        self.calls.append((x, t, cap_feats))
        return ([torch.full_like(one, self.answer) for one in x],)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def test_same_seed_same_samples(small):
    model, captions = small
    first, again = (sample(model, captions, [3, 1, 4], seed=5, steps=2, compute_dtype=torch.float32) for _ in range(2))
    other = sample(model, captions, [3, 1, 4], seed=6, steps=2, compute_dtype=torch.float32)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (3, 1, 16, 16)
    assert first.dtype == torch.float32
    assert first.abs().max() <= 1
    assert not first.requires_grad


def test_batch_size_changes_only_rounding(small):
    model, captions = small
    together = sample(model, captions, range(5), seed=0, steps=2, compute_dtype=torch.float32, batch=5)
    apart = sample(model, captions, range(5), seed=0, steps=2, compute_dtype=torch.float32, batch=2)
    assert relative_error(apart, together) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_model_starts_from_the_same_noise(dtype):
    model = Recorder()
    sample(model, torch.zeros(10, 2, 4), [7, 8, 9], seed=11, steps=1, compute_dtype=dtype, batch=2)
    fed = torch.stack([one for x, _, _ in model.calls for one in x])
    assert fed.dtype == dtype
    assert torch.equal(fed.squeeze(2), draw_noise(3, seed=11).to(dtype))


def test_noise_is_standard_normal():
    noise = draw_noise(500, seed=0)
    assert noise.dtype == torch.float32
    assert abs(noise.mean().item()) < 0.01
    assert abs(noise.std().item() - 1) < 0.01


def test_each_image_is_given_its_digits_caption():
    model = Recorder()
    captions = torch.randn(10, 2, 4, generator=torch.Generator().manual_seed(0))
    sample(model, captions, [4, 2, 4], seed=0, steps=1, compute_dtype=torch.float32, batch=2)
    fed = torch.stack([one for _, _, rows in model.calls for one in rows])
    assert torch.equal(fed, captions[[4, 2, 4]])


def test_progress_counts_images():
    seen = []
    sample(
        Recorder(),
        torch.zeros(10, 2, 4),
        [4, 2, 4],
        seed=0,
        compute_dtype=torch.float32,
        batch=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(2, 3), (3, 3)]


def test_constant_velocity_is_followed_exactly():
    noise = draw_noise(2, seed=0)
    target = noise + 3.0
    assert torch.allclose(integrate(lambda _x, _t: target - noise, noise, steps=8), target, atol=1e-6)


def test_euler_step_law():
    """For dx/dt = a x, n Euler steps give x (1 + a / n)^n."""
    noise = draw_noise(2, seed=0).double()
    for steps in (1, 3, 8):
        expected = noise * (1 - 0.7 / steps) ** steps
        assert torch.allclose(integrate(lambda x, _t: -0.7 * x, noise, steps=steps), expected, rtol=1e-12)


def test_times_grow_from_noise_to_image():
    times = []

    def velocity(x, t):
        times.append(t.tolist())
        return t.view(-1, 1, 1, 1).expand_as(x)

    moved = integrate(velocity, torch.zeros(2, 1, 16, 16), steps=4)
    assert times == [[0.0, 0.0], [0.25, 0.25], [0.5, 0.5], [0.75, 0.75]]
    assert torch.equal(moved, torch.full_like(moved, (0 + 0.25 + 0.5 + 0.75) / 4))


def test_same_path_as_the_pipelines_scheduler(small):
    """diffusers' scheduler, fed as its pipeline feeds it, goes the same way."""
    model, captions = small
    rows = [captions[digit] for digit in (0, 1)]
    latents = noise = draw_noise(2, seed=3)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    scheduler.set_timesteps(sigmas=[1 - step / 4 for step in range(4)])
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            t = ((1000 - timestep) / 1000).expand(2)
            output = model(list(latents.unsqueeze(2).unbind(0)), t, rows, return_dict=False)[0]
            velocity = -torch.stack(output).squeeze(2)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        ours = integrate(model_velocity(model, rows, torch.float32), noise, steps=4)
    assert relative_error(ours, latents) < 1e-5


@pytest.mark.parametrize(
    ("digits", "wrong", "message"),
    [
        ([], {}, "0 digits.*expected: at least one digit"),
        ([1], {"batch": 0}, "batches of 0.*batches of at least one"),
        ([1], {"steps": 0}, "0 steps.*expected: at least 1"),
    ],
)
def test_nothing_to_sample_is_refused(digits, wrong, message):
    with pytest.raises(SlipcastError, match=f"(?s){message}"):
        sample(Recorder(), torch.zeros(10, 2, 4), digits, seed=0, compute_dtype=torch.float32, **wrong)


def test_captions_are_read_back(tmp_path):
    table = torch.randn(10, 2, 4)
    save_file({"captions": table}, tmp_path / "captions.safetensors")
    assert torch.equal(load_captions(tmp_path / "captions.safetensors"), table)


def test_real_digits():
    images, labels = real_digits()
    assert images.shape == (1797, 1, 16, 16)
    assert images.dtype == torch.float32
    assert images.min() == -1
    assert images.max() == 1
    assert labels.unique().tolist() == list(range(10))


def test_recogniser_knows_digits_it_never_saw():
    images, labels = real_digits()
    unseen = held_out(labels)
    recognised = count_recognised(train_recogniser(), images[unseen], labels[unseen].tolist())
    assert unseen.sum() >= 300
    assert recognised >= 0.95 * unseen.sum()


def test_count_is_by_image_and_digit():
    images, labels = real_digits()
    recogniser = train_recogniser()
    seen = (~held_out(labels)).nonzero().flatten()[:50]
    right = labels[seen].tolist()
    assert count_recognised(recogniser, images[seen], right) == 50
    assert count_recognised(recogniser, images[seen], [(digit + 1) % 10 for digit in right]) == 0
    with pytest.raises(SlipcastError, match=r"(?s)50 images for 49 digits.*one digit for each image"):
        count_recognised(recogniser, images[seen], right[1:])


def test_import_of_slipcast_stays_light():
    code = "import slipcast, slipcast.demo, sys; print([n for n in ('torch', 'sklearn') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the training script ----------------------------------------------------------------------------------------------


def test_batched_forward_equals_the_models_own(script, small):
    model, captions = small
    forward = script.BatchedForward.of(model, captions)
    script.assert_same_forward(model, forward)
    wrong = dataclasses.replace(forward, image_rotary=forward.image_rotary.roll(1, dims=1))
    with pytest.raises(AssertionError, match="the forwards differ"):
        script.assert_same_forward(model, wrong)


def test_patches_are_put_back(script):
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(script.unpatchify(script.patchify(x), x.shape), x)


def test_loss_of_one_batch_falls(script, small):
    captions = small[1]
    config = small_config(script)
    model = script.build_model(2, config)
    forward = script.BatchedForward.of(model, captions)
    images, digits = (part[:8] for part in real_digits())
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = script.flow_matching_loss(forward, model, images, digits, torch.Generator().manual_seed(0))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.5 * losses[0]


def test_loss_is_zero_for_the_true_velocity(script):
    """A forward that knows image and time recovers the noise, and with it the velocity, exactly."""
    images = real_digits()[0][:4]

    def knowing(model, x, t, digits):
        mix = t.view(-1, 1, 1, 1)
        return images - (x - mix * images) / (1 - mix)

    loss = script.flow_matching_loss(knowing, None, images, torch.arange(4), torch.Generator().manual_seed(0))
    assert loss < 1e-8


def test_every_image_is_seen_once_before_any_is_seen_twice(training):
    rows = torch.cat(list(training.batches(8, 6, 4, torch.Generator().manual_seed(0))))
    assert [sorted(rows[start : start + 8].tolist()) for start in (0, 8, 16)] == [list(range(8))] * 3


def test_written_file_is_what_diffusers_reads(script, tmp_path, monkeypatch):
    """Model to single file, and back through diffusers' own conversion: the weights, rounded to bfloat16."""
    config = small_config(script)
    monkeypatch.setattr(script, "CONFIG", config)
    model = script.build_model(3, config)
    captions = script.make_captions(3, 16)
    script.write(tmp_path, model, captions)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captions.safetensors", "digits.safetensors"]
    assert torch.equal(load_captions(tmp_path / "captions.safetensors"), captions)
    with safe_open(tmp_path / "digits.safetensors", "pt") as file:
        names = set(file.keys())
        assert "Handwritten Digits" in file.metadata()["training_data"]
        assert file.get_slice("model.diffusion_model.layers.0.attention.qkv.weight").get_shape() == [192, 64]
        assert all(file.get_slice(name).get_dtype() == "BF16" for name in names)
    assert all(name.startswith("model.diffusion_model.") for name in names)
    read = script.load_with_diffusers(tmp_path / "digits.safetensors").state_dict()
    expected = model.state_dict()
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(read[name], value.bfloat16().float()), name


def test_fp8_rounding_leaves_the_embedders(script, small):
    """Linear weights move by what float8 with a scale for each row costs; the precision-sensitive ones do not."""
    model = small[0]
    rounded = script.round_to_fp8(model)
    before, after = (one.layers[0].feed_forward.w1.weight for one in (model, rounded))
    assert 0.01 < relative_error(after, before) < 0.03
    assert torch.equal(rounded.cap_embedder[1].weight, model.cap_embedder[1].weight)
    assert torch.equal(rounded.t_embedder.mlp[0].weight, model.t_embedder.mlp[0].weight)


def test_learning_rate_rises_then_falls(training):
    rates = [training.learning_rate(step, 1000, 1.0) for step in range(1000)]
    peak = rates.index(max(rates))
    assert peak == 49
    assert rates[peak] == 1.0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.01, abs=1e-4)


@pytest.fixture
def torch_settings():
    """Puts back what the training script sets for its process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_float32_matmul_precision("highest")


def test_training_reports_writes_and_repeats(script, tmp_path, monkeypatch, capsys, torch_settings):
    config = small_config(script)
    monkeypatch.setattr(script, "CONFIG", config)
    for folder in ("first", "again"):
        script.main(["--out", str(tmp_path / folder), "--steps", "2", "--batch", "4", "--device", "cpu"])
    assert capsys.readouterr().out.count("step     2  loss") == 2
    first, again = (load_file(tmp_path / folder / "digits.safetensors") for folder in ("first", "again"))
    assert all(torch.equal(again[name], value) for name, value in first.items())
    untrained = script.native_state_dict(script.build_model(0, config).state_dict())
    assert not torch.equal(
        first["model.diffusion_model.x_embedder.bias"], untrained["model.diffusion_model.x_embedder.bias"]
    )
    script.main(["--check", str(tmp_path / "first")])
    assert re.findall(r"(.+): recognised \d+ of 200", capsys.readouterr().out) == [
        "float32",
        "fp8 weights, float32",
        "bfloat16",
    ]


def test_training_stops_after_its_time(script, tmp_path, monkeypatch, capsys, torch_settings):
    config = small_config(script)
    monkeypatch.setattr(script, "CONFIG", config)
    script.main(["--out", str(tmp_path), "--seconds", "0", "--batch", "4", "--device", "cpu"])
    assert "stopped after 0 s and 1 of 3000 steps" in capsys.readouterr().out


def test_trained_file_stays_under_8_mb(script):
    state = script.native_state_dict(script.build_model(0, script.CONFIG).state_dict())
    assert sum(value.nbytes for value in state.values()) < 7_950_000  # and the header on top
