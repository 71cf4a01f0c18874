"""Sessions on pipelines of diffusers: what they draw, how they end, and that nothing stays behind."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch._subclasses.fake_tensor import is_fake

import slipcast
from slipcast import Session
from slipcast.engine.check.torchvision_stand_in import torchvision_or_stand_in
from slipcast.engine.pipeline.generate import GenerationProgress, generate
from slipcast.engine.pipeline.request import GenerationRequest
from slipcast.engine.policy.apply import Applied
from slipcast.engine.policy.sizes import AskedSize
from slipcast.engine.session.pipeline_opener import PipelineOpener
from slipcast.registry.errors import Cancelled, CompanionError, DeviceError, SettingsError
from slipcast.registry.settings import resolve_settings
from support.tiny_pipelines import write_pipeline

SMALL: dict[str, Any] = {"width": 64, "height": 64}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16"}
SIZE = (64, 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("z-image", "sdxl", "anima")
    return {family: write_pipeline(family, tmp_path_factory.mktemp(family) / "pipeline") for family in names}


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(**CPU) as session:
        yield session


class Forwards:
    """Counts the forward passes of a session's denoiser, and holds none of its models."""

    def __init__(self, session: Session) -> None:
        self.count = 0
        components = session._pipe.components
        models = [part for part in components.values() if isinstance(part, nn.Module)]
        self.models = [weakref.ref(model) for model in models]
        denoiser = components.get("transformer") or components["unet"]
        denoiser.register_forward_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1

    def alive(self) -> int:
        return sum(model() is not None for model in self.models)


def pixels(image: Any) -> np.ndarray:
    return np.asarray(image)


@pytest.mark.parametrize(
    ("asked", "drawn"),
    [
        ({}, (64, 96)),
        ({"width": 32}, (32, 96)),
        ({"height": 32}, (64, 32)),
        ({"width": 0, "height": 0}, (64, 96)),
        ({"width": 32, "height": 48}, (32, 48)),
        ({"image": Image.new("RGB", (48, 80)), "strength": 0.5}, (48, 80)),
    ],
)
def test_the_size_of_the_load_is_drawn_where_no_other_is_asked_for(
    asked: dict[str, Any], drawn: tuple[int, int], session: Session, folders: dict[str, Path]
) -> None:
    session.load(folders["z-image"], size=(64, 96))
    assert session.generate("seven", steps=2, **asked).images[0].size == drawn


def test_a_later_load_of_the_same_pipeline_changes_the_size_that_is_drawn(
    session: Session, folders: dict[str, Path]
) -> None:
    session.load(folders["z-image"], size=SIZE)
    first = session._pipe
    session.load(folders["z-image"], size=(32, 48))
    assert session._pipe is first
    assert session.generate("seven", steps=1).images[0].size == (32, 48)


@pytest.mark.parametrize("family", ["z-image", "sdxl"])
def test_a_session_draws_what_a_pipeline_draws(family: str, session: Session, folders: dict[str, Path]) -> None:
    session.load(folders[family], size=SIZE)
    seen: list[GenerationProgress] = []
    shapes = []

    def progress(at: GenerationProgress) -> None:
        seen.append(at)
        assert at.latents is not None
        shapes.append(at.latents.shape)

    drawn = session.generate("a seven", steps=3, seed=5, progress=progress, **SMALL)
    plain = slipcast.pipeline(folders[family], **CPU)
    expected = generate(plain, GenerationRequest("a seven", steps=3, seed=5, **SMALL))
    assert np.array_equal(pixels(drawn.images[0]), pixels(expected.images[0]))
    assert [(at.step, at.total) for at in seen] == [(1, 3), (2, 3), (3, 3)]
    assert len(set(shapes)) == 1
    start = Image.fromarray(pixels(drawn.images[0]))
    seen.clear()
    again = session.generate("a seven", steps=4, image=start, strength=0.5, progress=progress)
    assert pixels(again.images[0]).shape == pixels(drawn.images[0]).shape
    assert [(at.step, at.total) for at in seen] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("family", ["z-image", "sdxl", "anima"])
def test_cancel_ends_a_pipeline_within_one_step_and_leaves_it_whole(
    family: str, session: Session, folders: dict[str, Path]
) -> None:
    session.load(folders[family], size=SIZE)
    forwards = Forwards(session)
    with torchvision_or_stand_in(session._pipe.components.get("transformer", nn.Identity())):
        expected = session.generate("a seven", steps=2, **SMALL)
        forwards.count = 0

        def cancel_soon() -> None:
            while not forwards.count:
                time.sleep(0.001)
            at_cancel.append(forwards.count)
            session.cancel()

        at_cancel: list[int] = []
        canceller = threading.Thread(target=cancel_soon)
        canceller.start()
        with pytest.raises(Cancelled):
            session.generate("a seven", steps=500, **SMALL)
        canceller.join()
        # guidance may take two passes a step; one more may have begun before the flag was set
        assert forwards.count <= at_cancel[0] + 3
        assert session.status().state == "ready"
        again = session.generate("a seven", steps=2, **SMALL)
    assert np.array_equal(pixels(again.images[0]), pixels(expected.images[0]))


def test_an_error_in_a_callback_frees_the_latents(session: Session, folders: dict[str, Path]) -> None:
    session.load(folders["z-image"], size=SIZE)
    latents: list[weakref.ref[torch.Tensor]] = []

    def fail(at: GenerationProgress) -> None:
        assert at.latents is not None
        latents.append(weakref.ref(at.latents))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        session.generate("a seven", progress=fail, **SMALL)
    assert latents
    assert latents[0]() is None, "the error keeps the latents alive"
    assert caught.value.__traceback__ is not None


def test_models_are_gone_after_unloading_and_after_another_load(session: Session, folders: dict[str, Path]) -> None:
    session.load(folders["z-image"], size=SIZE)
    first = Forwards(session)
    session.generate("a seven", steps=1, **SMALL)
    gone_at_first_byte: list[int] = []
    session.load(folders["sdxl"], size=SIZE, progress=lambda *_: gone_at_first_byte.append(first.alive()))
    assert first.models
    assert set(gone_at_first_byte) == {0}
    second = Forwards(session)
    session.unload()
    assert second.alive() == 0


def test_a_load_that_is_cancelled_or_fails_leaves_no_tensor(session: Session, folders: dict[str, Path]) -> None:
    session.load(folders["z-image"], size=SIZE)  # whatever is kept from the first time on
    session.unload()
    before = tensors()
    for error, action in ((Cancelled, session.cancel), (ZeroDivisionError, lambda: 1 / 0)):

        def late(done: int, total: int, action: Any = action) -> None:
            if done > total // 2:
                action()

        with pytest.raises(error) as caught:
            session.load(folders["z-image"], size=SIZE, progress=late)
        assert caught.value.__traceback__ is not None
        assert tensors() == before
        assert session.status().state == "empty"


def tensors() -> int:
    """Bytes of all tensors that are alive, but for those that a compiler traces with, which have no memory."""
    gc.collect()
    alive = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    real = (each for each in alive if not is_fake(each) and each.device.type == "cpu")
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in real}
    return sum(found.values())


def test_what_can_not_be_loaded_leaves_the_pipeline(
    session: Session, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = session.load(folders["z-image"], size=SIZE)
    lonely = tmp_path / "lonely.safetensors"
    slipcast.convert(folders["sdxl"], lonely, layout="native")
    with pytest.raises(CompanionError):
        session.load(lonely)
    with pytest.raises(DeviceError, match="needs") as caught:  # of memory: decided by the plan
        session.load(folders["sdxl"], size=(10**6, 10**6), vae={"tiling": "off"})
    assert "MiB" in caught.value.found
    with pytest.raises(DeviceError, match="not there"):
        session.load(folders["sdxl"], device="cuda:8.6,12GiB")
    assert session.status() == before
    with pytest.raises(SettingsError, match="multiple"):
        session.generate("a seven", width=65, height=64)
    assert session.generate("a seven", steps=1, **SMALL).images


def test_memory_of_the_present_pipeline_counts_as_free(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opener, settings = PipelineOpener(), resolve_settings(CPU).values
    present = opener.validate(folders["z-image"], settings, AskedSize(*SIZE), None)
    policies = present.plan.policies
    free = policies.memory.peak_bytes + policies.snapshot.reserve - present.plan.nbytes
    full = replace(policies.snapshot, free=free)
    monkeypatch.setattr("slipcast.engine.session.pipeline_opener.take_snapshot", lambda *_: full)
    with pytest.raises(DeviceError, match="needs"):
        opener.validate(folders["z-image"], settings, AskedSize(*SIZE), None)
    again = opener.validate(folders["z-image"], settings, AskedSize(*SIZE), present)
    assert again.plan.policies.memory.tier == policies.memory.tier


def test_global_flags_are_given_back_with_the_pipeline(
    session: Session, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[Applied] = []
    monkeypatch.setattr(Applied, "release", lambda applied: released.append(applied))
    session.load(folders["z-image"], size=SIZE)
    assert released == []
    session.unload()
    assert len(released) == 1


def test_settings_of_the_vae_need_no_new_load(session: Session, folders: dict[str, Path]) -> None:
    session.load(folders["sdxl"], size=(128, 128))
    models = Forwards(session)
    larger = {"width": 128, "height": 128}
    plain = session.generate("a seven", steps=1, **larger)
    status = session.load(folders["sdxl"], size=(128, 128), vae={"tiling": "on", "tile_size": 64})
    assert status.settings["vae.tiling"].requested == "on"
    assert models.alive() == len(models.models)
    vae = weakref.ref(session._pipe.vae)
    assert vae().tile_sample_min_size == 64  # type: ignore[union-attr]
    tiled = session.generate("a seven", steps=1, **larger)
    assert not np.array_equal(pixels(plain.images[0]), pixels(tiled.images[0]))
    session.load(folders["sdxl"], size=(128, 128))
    again = session.generate("a seven", steps=1, **larger)
    assert np.array_equal(pixels(plain.images[0]), pixels(again.images[0]))
    assert models.alive() == len(models.models)
    session.load(folders["sdxl"], size=(128, 128), fp8="storage")
    assert models.alive() == 0


def test_files_that_have_changed_are_loaded_anew(session: Session, folders: dict[str, Path]) -> None:
    session.load(folders["z-image"], size=SIZE)
    models = Forwards(session)
    session.load(folders["z-image"], size=SIZE)
    assert models.alive()
    (folders["z-image"] / "tokenizer" / "tokenizer_config.json").touch()
    session.load(folders["z-image"], size=SIZE)
    assert models.alive() == 0


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("vae/config.json", {"scaling_factor": 0.5}),
        ("transformer/config.json", {"norm_eps": 0.5}),
        ("scheduler/scheduler_config.json", {"shift": 7.0}),
        ("model_index.json", {"is_distilled": True}),
    ],
)
def test_a_changed_configuration_is_loaded_anew(
    file: str, change: dict[str, Any], session: Session, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["z-image"], tmp_path / "pipeline")
    session.load(folder, size=SIZE)
    models = Forwards(session)
    session.load(folder, size=SIZE)
    assert models.alive() == len(models.models)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))
    session.load(folder, size=SIZE)
    assert models.alive() == 0
    if file != "model_index.json":
        (name, value), role = next(iter(change.items())), file.partition("/")[0]
        assert session._pipe.components[role].config[name] == value


def test_a_changed_family_file_is_loaded_anew(session: Session, folders: dict[str, Path], tmp_path: Path) -> None:
    family = tmp_path / "mine.yaml"
    text = "schema: 1\nid: mine\nextends: z-image\ntitle: Mine\n"
    family.write_text(text)
    chosen: dict[str, Any] = {"size": SIZE, "families": [str(tmp_path)], "family": "mine"}
    session.load(folders["z-image"], **chosen)
    models = Forwards(session)
    session.load(folders["z-image"], **chosen)
    assert models.alive() == len(models.models)
    family.write_text(text + "config:\n  norm_eps: 0.25\n")
    session.load(folders["z-image"], **chosen)
    assert models.alive() == 0


def test_status_is_at_hand_while_a_pipeline_computes(
    session: Session, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    session.load(folders["z-image"], size=SIZE)
    done = threading.Event()
    took: list[float] = []

    def ask() -> None:
        while not done.is_set():
            began = time.perf_counter()
            seen.add(session.status().state)
            took.append(time.perf_counter() - began)
            time.sleep(0.001)

    seen: set[str] = set()
    asking = threading.Thread(target=ask)
    asking.start()
    began = time.perf_counter()
    session.generate("a seven", steps=100, **SMALL)
    whole = time.perf_counter() - began
    done.set()
    asking.join()
    assert "generating" in seen
    middle = sorted(took)[len(took) // 2]
    with capsys.disabled():
        print(
            f"\nstatus during a generation of {whole:.2f} s: {len(took)} times, "
            f"{1000 * middle:.3f} ms in the middle, {1000 * max(took):.1f} ms at most"
        )
    assert middle < 0.05
    assert len(took) > 10
