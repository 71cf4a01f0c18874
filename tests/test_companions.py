"""Where the parts of a pipeline are found, and what is said of those that are not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import slipcast
from slipcast.engine.pipeline.classes import processor_class
from slipcast.engine.pipeline.pipeline_plan import make_pipeline_plan
from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.companions import Companion
from slipcast.registry.errors import CompanionError, IdentificationError
from slipcast.registry.found_pipeline import find_pipeline
from slipcast.registry.settings import resolve_settings
from support.fake_opener import FakeOpener
from support.tiny_pipelines import VOCABULARY, flux_vae, model_of, write_pipeline, write_single


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline("z-image", tmp_path_factory.mktemp("published") / "pipeline")


@pytest.fixture(scope="module")
def single(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_single(published, tmp_path_factory.mktemp("single") / "z_image_turbo.safetensors")


def found(path: Path, **companions: object) -> dict[str, Companion]:
    settings = resolve_settings({"companions": companions} if companions else {}).values
    return {part.role: part for part in find_pipeline(path, settings).parts}


def where(parts: Mapping[str, Companion]) -> dict[str, str]:
    return {role: part.found for role, part in parts.items()}


def missing(path: Path, **companions: object) -> CompanionError:
    with pytest.raises(CompanionError) as caught:
        found(path, **companions)
    return caught.value


def weights(published: Path, role: str) -> Path:
    (file,) = (published / role).glob("*.safetensors")
    return file


def test_a_pipelines_folder_has_all_its_parts(published: Path) -> None:
    parts = found(published)
    assert set(where(parts).values()) == {"in the pipeline's folder"}
    assert [part.role for part in parts.values()] == ["transformer", "text_encoder", "vae", "tokenizer", "scheduler"]
    assert parts["vae"].path == published / "vae"
    assert (parts["vae"].family, parts["vae"].class_name) == ("flux-1-vae", "diffusers.AutoencoderKL")
    assert parts["transformer"].path == published / "transformer"


def test_the_denoisers_folder_in_a_pipelines_folder_finds_what_lies_around_it(published: Path) -> None:
    parts = found(published / "transformer")
    assert where(parts)["transformer"] == "the path itself"
    assert parts["text_encoder"].path == (published / "text_encoder").resolve()


def test_of_a_lone_file_all_that_is_missing_is_named_with_what_would_do(single: Path) -> None:
    error = missing(single)
    assert error.roles == ("text_encoder", "vae", "tokenizer")
    assert error.items[0] == (
        "text_encoder: Qwen3 4b (family qwen3, transformers.Qwen3Model): setting companions.text_encoder"
    )
    assert error.items[2] == "tokenizer: a folder with the files of transformers.Qwen2Tokenizer: setting " + (
        "companions.tokenizer"
    )
    assert error.to_dict()["roles"] == ["text_encoder", "vae", "tokenizer"]


def test_a_scheduler_is_made_of_what_the_family_file_says_of_the_variant(single: Path, published: Path) -> None:
    own = {"text_encoder": published / "text_encoder", "vae": published / "vae", "tokenizer": published / "tokenizer"}
    scheduler = found(single, **{role: str(path) for role, path in own.items()})["scheduler"]
    assert (scheduler.path, dict(scheduler.arguments)) == (None, {"shift": 3.0})
    assert find_pipeline(single, resolve_settings({"companions": own}).values).variant == "turbo"


def test_where_the_family_file_states_no_scheduler_one_has_to_be_given(
    single: Path, published: Path, tmp_path: Path
) -> None:
    base = tmp_path / "z_image_base.safetensors"
    shutil.copy(single, base)
    own = {role: str(published / role) for role in ("text_encoder", "vae", "tokenizer")}
    error = missing(base, **own)
    assert error.roles == ("scheduler",)
    assert error.items == (
        "scheduler: a folder with the configuration of diffusers.FlowMatchEulerDiscreteScheduler: setting "
        "companions.scheduler",
    )
    assert error.hint.startswith("give a diffusers folder of the family that has them all by companions=FOLDER")
    named = found(base, **own, scheduler=str(published / "scheduler"))["scheduler"]
    assert (named.found, named.path) == ("setting companions.scheduler", published / "scheduler")
    assert found(base, folder=str(published))["scheduler"].path == published / "scheduler"


def test_settings_name_files_and_a_tokenizer_lies_beside_its_text_encoder(single: Path, published: Path) -> None:
    parts = found(single, text_encoder=str(weights(published, "text_encoder")), vae=str(weights(published, "vae")))
    assert where(parts) == {
        "transformer": "the path itself",
        "text_encoder": "setting companions.text_encoder",
        "vae": "setting companions.vae",
        "tokenizer": "beside its text encoder",
        "scheduler": "made from what the family file says",
    }


@pytest.mark.parametrize(
    ("named", "fits"),
    [
        ("Qwen2Tokenizer", True),
        ("Qwen2TokenizerFast", True),
        ("PreTrainedTokenizerFast", True),
        ("TokenizersBackend", True),
        (None, True),
        ("CLIPTokenizer", False),
        ("T5TokenizerFast", False),
    ],
)
@pytest.mark.parametrize("by", ["tokenizer", "folder"])
def test_another_tokenizer_than_the_family_names_is_refused(
    single: Path, published: Path, tmp_path: Path, named: str | None, fits: bool, by: str
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(published / "tokenizer", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("tokenizer_class", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": named} if named else {})))
    settings = {role: str(weights(published, role)) for role in ("text_encoder", "vae")}
    settings[by] = str(folder if by == "tokenizer" else tmp_path)
    if fits:
        assert found(single, **settings)["tokenizer"].path == folder
        return
    error = missing(single, **settings)
    assert error.roles == ("tokenizer",)
    assert error.found == f"as the tokenizer: a tokenizer of the class transformers.{named}"
    assert error.expected == "a folder with the files of transformers.Qwen2Tokenizer"
    assert "companions.tokenizer" in error.hint


def test_a_setting_goes_before_the_pipelines_folder(single: Path, published: Path, tmp_path: Path) -> None:
    other = tmp_path / "vae.safetensors"
    shutil.copy(weights(published, "vae"), other)
    parts = found(published, vae=str(other))
    assert (parts["vae"].found, parts["vae"].path) == ("setting companions.vae", other)


@pytest.mark.parametrize("depth", ["", "z-image"])
def test_comfyuis_folders_are_looked_into(single: Path, published: Path, tmp_path: Path, depth: str) -> None:
    shelf = tmp_path / "models"
    for name in ("diffusion_models", "text_encoders", "vae"):
        (shelf / name / depth).mkdir(parents=True)
    file = shelf / "diffusion_models" / depth / single.name
    shutil.copy(single, file)
    shutil.copy(weights(published, "text_encoder"), shelf / "text_encoders" / depth / "qwen.safetensors")
    shutil.copy(weights(published, "vae"), shelf / "vae" / depth / "ae.safetensors")
    (shelf / "vae" / depth / "broken.safetensors").write_bytes(b"no safetensors")
    parts = found(file, tokenizer=str(published / "tokenizer"))
    assert where(parts)["text_encoder"] == where(parts)["vae"] == "beside the file"
    assert parts["vae"].path == shelf / "vae" / depth / "ae.safetensors"


@pytest.fixture
def around(single: Path, published: Path, tmp_path: Path) -> Path:
    """A folder with one denoiser, and the parts of its pipeline in folders beside it."""
    for name in ("text_encoders", "vae"):
        (tmp_path / "zi" / name).mkdir(parents=True)
    shutil.copy(single, tmp_path / "zi" / single.name)
    shutil.copy(weights(published, "text_encoder"), tmp_path / "zi" / "text_encoders" / "qwen.safetensors")
    shutil.copy(weights(published, "vae"), tmp_path / "zi" / "vae" / "ae.safetensors")
    shutil.copytree(published / "tokenizer", tmp_path / "zi" / "tokenizer")
    return tmp_path / "zi"


def test_a_folder_that_stands_for_a_file_is_as_that_file(around: Path, single: Path, tmp_path: Path) -> None:
    file = around / single.name
    assert slipcast.inspect(around) == slipcast.inspect(file)
    assert slipcast.plan(around).origin == slipcast.plan(file).origin
    assert slipcast.plan(around).origin.variant == "turbo"
    values = resolve_settings().values
    assert found(around) == found(file)
    plans = [make_pipeline_plan(path, values).to_json() for path in (around, file)]
    assert all(plans[0][name] == plans[1][name] for name in ("path", "variant", "pipeline", "parts"))
    told = [slipcast.convert(path, tmp_path / f"{path.stem}.out.safetensors") for path in (around, file)]
    assert told[0].conversion == told[1].conversion
    assert told[0].path.read_bytes() == told[1].path.read_bytes()


def test_settings_for_a_file_hold_for_the_folder_that_stands_for_it(
    around: Path, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.yaml").write_text(f"models: {{{single.name}: {{dtype: float16}}}}")
    monkeypatch.setenv("SLIPCAST_CONFIG", str(tmp_path / "settings.yaml"))
    assert slipcast.plan(around).settings["dtype"].requested == "float16"


def test_a_session_holds_one_pipeline_for_a_file_and_its_folder(around: Path, single: Path) -> None:
    opener = FakeOpener()
    session = slipcast.Session(opener=opener)
    session.load(around / single.name)
    session.load(around)
    assert opener.opened == [around / single.name]


def test_of_two_that_would_do_one_has_to_be_named(single: Path, published: Path, tmp_path: Path) -> None:
    file = tmp_path / single.name
    shutil.copy(single, file)
    for name in ("one", "two"):
        shutil.copy(weights(published, "vae"), tmp_path / f"{name}.safetensors")
    settings = {role: str(published / role) for role in ("text_encoder", "tokenizer")}
    error = missing(file, **settings)
    assert error.roles == ("vae",)
    assert [Path(item).stem for item in error.items] == ["one", "two"]
    assert error.hint == "name the one that you mean by the setting companions.vae"
    chosen = found(file, **settings, vae=str(tmp_path / "two.safetensors"))
    assert chosen["vae"].path == tmp_path / "two.safetensors"


def test_a_wrong_part_is_refused_by_what_it_is(single: Path, published: Path) -> None:
    error = missing(single, folder=str(published), vae=str(weights(published, "text_encoder")))
    assert error.found == "as the vae: Qwen3"
    assert error.expected == "FLUX.1 and Stable Diffusion 3 VAE flux-1 (family flux-1-vae, diffusers.AutoencoderKL)"


def test_a_pipeline_does_not_begin_from_a_vae(published: Path) -> None:
    with pytest.raises(IdentificationError, match=r"a vae, FLUX\.1 and Stable Diffusion 3 VAE, and no denoiser"):
        found(published / "vae")


def with_index(published: Path, tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **changes}))
    return folder


@pytest.mark.parametrize(
    ("role", "named"),
    [
        ("tokenizer", ["transformers", "AutoModel"]),
        ("tokenizer", ["os", "system"]),
        ("tokenizer", ["pipeline.custom", "Qwen2Tokenizer"]),
        ("scheduler", ["diffusers", "ZImagePipeline"]),
        ("scheduler", ["diffusers", "__loader__"]),
        ("scheduler", ["torch", "load"]),
    ],
)
def test_a_class_that_an_index_names_is_only_taken_from_its_own_kind(
    published: Path, tmp_path: Path, role: str, named: list[str]
) -> None:
    folder = with_index(published, tmp_path, **{role: named})
    with pytest.raises(CompanionError) as caught:
        make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values)
    assert caught.value.found == f"the class {'.'.join(named)!r}"


def test_an_index_of_another_pipeline_is_refused(published: Path, tmp_path: Path) -> None:
    folder = with_index(published, tmp_path, _class_name="os.system")
    with pytest.raises(CompanionError, match=r"a folder of the pipeline 'os.system'"):
        found(folder)


def test_arguments_that_the_class_does_not_take_are_passed_over(published: Path, tmp_path: Path) -> None:
    folder = with_index(published, tmp_path, some_number=7, requires_safety_checker=True)
    plan = make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values)
    assert plan.arguments == {}


def test_a_pickle_beside_the_file_is_not_looked_at(single: Path, published: Path, tmp_path: Path) -> None:
    file = tmp_path / single.name
    shutil.copy(single, file)
    (tmp_path / "vae.ckpt").write_bytes(b"\x80\x04.")
    assert missing(file).roles == ("text_encoder", "vae", "tokenizer")
    with pytest.raises(slipcast.SlipcastError, match="Python pickle"):
        found(file, vae=str(tmp_path / "vae.ckpt"))


def test_a_sd3_file_without_t5_does_without(tmp_path: Path) -> None:
    folder = write_pipeline("sd3", tmp_path / "sd3")
    shutil.rmtree(folder / "text_encoder_3")
    shutil.rmtree(folder / "tokenizer_3")
    pipe = slipcast.pipeline(folder, device="cpu")
    assert (pipe.text_encoder_3, pipe.tokenizer_3) == (None, None)
    file = write_single(folder, tmp_path / "sd3.safetensors")
    found_there = find_pipeline(file, resolve_settings({"companions": folder}).values)
    assert found_there.absent["text_encoder_3"] == "none was found, and the pipeline does without"


def test_a_component_without_a_family_is_read_by_its_own_library(tmp_path: Path) -> None:
    folder = write_pipeline("cogview-4", tmp_path / "pipeline")
    plan = make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values)
    encoder = plan.parts["text_encoder"]
    assert (encoder.plan, encoder.loaded_by, encoder.companion.class_name) == (
        None,
        "transformers",
        "transformers.GlmModel",
    )
    pipe = slipcast.pipeline(folder, device="cpu", dtype="bfloat16")
    assert sum(parameter.nbytes for parameter in pipe.text_encoder.parameters()) == encoder.nbytes
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    file.unlink()
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(slipcast.SlipcastError, match="pickle"):
        slipcast.pipeline(folder, device="cpu")
    save_file(tensors, file)


def test_of_a_class_alone_no_file_is_taken_that_merely_lies_there(published: Path, tmp_path: Path) -> None:
    folder = write_pipeline("cogview-4", tmp_path / "pipeline")
    file = write_single(folder, tmp_path / "cogview.safetensors")
    shutil.copy(weights(published, "vae"), tmp_path / "other.safetensors")
    assert missing(file).roles == ("text_encoder", "vae", "tokenizer", "scheduler")


def test_a_variant_that_tensors_show_to_be_another_is_refused(single: Path, published: Path, tmp_path: Path) -> None:
    encoder = model_of("qwen3", vocab_size=VOCABULARY, hidden_size=1024, num_hidden_layers=1)
    encoder.save_pretrained(tmp_path / "small")
    (file,) = (tmp_path / "small").glob("*.safetensors")
    error = missing(single, folder=str(published), text_encoder=str(file))
    assert (error.found, error.expected[:8]) == ("as the text_encoder: Qwen3 0.6b", "Qwen3 4b")


def test_the_variant_that_the_pipeline_needs_is_taken_where_no_tensor_shows_one(tmp_path: Path) -> None:
    folder = write_pipeline("sdxl", tmp_path / "pipeline")
    vae = tmp_path / "vae.safetensors"
    slipcast.convert(folder / "vae", vae, layout="native")
    part = found(write_single(folder, tmp_path / "unet.safetensors"), folder=str(folder), vae=str(vae))["vae"]
    assert part.match is not None
    assert (part.match.variant, part.match.config["scaling_factor"]) == ("sdxl", 0.13025)
    assert slipcast.inspect(vae).main.variant == "sd"


def another_familys_vae(folder: Path, **config: float) -> Path:
    """A pipeline's folder that has a VAE alone, of SD3's scale."""
    own = {"scaling_factor": 1.5305, "shift_factor": 0.0609, **config}
    flux_vae(**own).save_pretrained(folder / "vae")
    return folder


@pytest.mark.parametrize("place", [".", "vae"])
def test_a_vae_of_the_same_tensors_and_another_scale_is_refused(
    single: Path, published: Path, tmp_path: Path, place: str
) -> None:
    other = another_familys_vae(tmp_path / "sd3") / place
    error = missing(single, folder=str(published), vae=str(other))
    assert (error.found, error.roles) == ("as the vae: FLUX.1 and Stable Diffusion 3 VAE sd3", ("vae",))
    assert error.expected.startswith("FLUX.1 and Stable Diffusion 3 VAE flux-1 ")


def test_a_vae_of_another_scale_in_the_folder_of_companions_is_refused(
    single: Path, published: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(published, tmp_path / "copy")
    shutil.rmtree(folder / "vae")
    assert missing(single, folder=str(another_familys_vae(folder))).roles == ("vae",)


@pytest.mark.parametrize(("name", "variant"), [("sd3_vae", None), ("ae", "flux-1")])
def test_the_files_name_tells_a_vae_of_another_scale(
    single: Path, published: Path, tmp_path: Path, name: str, variant: str | None
) -> None:
    file = tmp_path / f"{name}.safetensors"
    shutil.copy(weights(published, "vae"), file)
    if variant is None:
        assert missing(single, folder=str(published), vae=str(file)).found.endswith("VAE sd3")
        return
    match = found(single, folder=str(published), vae=str(file))["vae"].match
    assert match is not None
    assert (match.variant, match.config["scaling_factor"]) == (variant, 0.3611)


def test_a_setting_for_a_part_that_the_pipeline_has_not_is_refused(published: Path) -> None:
    error = missing(published, text_encoder_3=str(published / "text_encoder"))
    assert error.found == "companions.text_encoder_3, and the pipeline has no such part"
    assert error.expected == "parts that it has: text_encoder, tokenizer, vae, scheduler"
    assert error.roles == ("text_encoder_3",)


@pytest.mark.parametrize("role", ["text_encoder", "vae", "tokenizer", "scheduler"])
def test_a_setting_that_names_nothing_is_refused(published: Path, tmp_path: Path, role: str) -> None:
    with pytest.raises(slipcast.SlipcastError, match="there is no such file or folder"):
        found(published, **{role: str(tmp_path / "nofile")})


def test_parts_of_other_widths_than_the_denoiser_takes_are_refused(published: Path, tmp_path: Path) -> None:
    changes = {"in_channels": 1, "cap_feat_dim": 80}
    model_of("z-image", siglip_feat_dim=None, **changes).save_pretrained(tmp_path / "other")
    (file,) = (tmp_path / "other").glob("*.safetensors")
    error = missing(file, folder=str(published))
    assert error.roles == ("text_encoder", "vae")
    assert error.found == (
        "the text_encoder, Qwen3, gives hidden states 64 wide; "
        "the vae, FLUX.1 and Stable Diffusion 3 VAE, gives latents of 16 channels"
    )
    assert error.expected.startswith("hidden states 80 wide, which the denoiser takes; latents of 1 channels")


@pytest.mark.parametrize("family", [id_ for id_, family in load_catalogue().items() if family.sampling])
def test_what_a_family_says_of_widths_is_of_its_arguments_and_its_companions(family: str) -> None:
    known = load_catalogue()[family]
    assert known.sampling is not None
    assert known.sampling.takes.keys() <= known.companions.keys()
    assert set(known.sampling.takes.values()) <= known.config.keys()


def test_companions_compute_in_the_denoisers_dtype(tmp_path: Path) -> None:
    folder = write_pipeline("sd-1", tmp_path / "pipeline")
    (file,) = (folder / "unet").glob("*.safetensors")
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    plan = make_pipeline_plan(folder, resolve_settings({"device": "cpu", "dtype": "float16"}).values)
    assert plan.compute_dtype == "float16"
    encoder = plan.parts["text_encoder"].plan
    assert encoder is not None
    assert (encoder.compute_dtype, encoder.request.dtype) == ("float16", "float16")
    plan = make_pipeline_plan(folder, resolve_settings({"device": "cpu"}).values)
    assert {part.plan.request.dtype for part in plan.parts.values() if part.plan} == {"auto", plan.compute_dtype}


def test_a_tokenizer_without_transformers_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CompanionError, match=r"the class 'transformers\.Qwen2Tokenizer'") as caught:
        processor_class("transformers.Qwen2Tokenizer")
    assert "slipcast[pipelines]" in caught.value.hint
