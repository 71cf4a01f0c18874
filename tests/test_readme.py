"""The README says what is so: its family file, its output and its three lines of Python."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
import torch

import slipcast
from slipcast.registry.catalogue import load_catalogue
from support.command_line import output_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def shown(command: str) -> str:
    """The output that the README shows for a command."""
    found = re.search(rf"\$ {re.escape(command)}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1].strip()


@pytest.fixture(autouse=True)
def _two_cores() -> Iterator[None]:
    """The machine of the README."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def printed(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    return output_of(*command.split()[1:], env={"COLUMNS": "160"}).strip()


def without_measurements(text: str) -> str:
    """The output without what differs from run to run and from machine to machine."""
    text = re.sub(r"seconds +[\d.]+", "seconds", text)
    text = re.sub(r"(host peak, anonymous +[\d,]+).*", r"\1", text)
    return re.sub(r" +", " ", text)


def test_the_family_file_is_shown_in_full() -> None:
    found = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    assert found[1].strip() == (ROOT / "families" / "z-image.yaml").read_text().strip()


def test_inspect_prints_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "slipcast inspect slipcast/demo/digits.safetensors"
    assert printed(command, monkeypatch) == shown(command)


def test_load_prints_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("slipcast.engine.devices._cpu_bfloat16", lambda: True)
    command = "slipcast load slipcast/demo/digits.safetensors --set fp8=storage"
    assert without_measurements(printed(command, monkeypatch)) == without_measurements(shown(command))


def test_the_three_lines_put_a_file_into_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    lines = found[1].strip().splitlines()
    assert len(lines) == 3
    code = found[1].replace("z_image_turbo_bf16.safetensors", str(ROOT / "slipcast/demo/digits.safetensors"))

    def from_pretrained(_: str, **components: object) -> diffusers.ZImagePipeline:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        return diffusers.ZImagePipeline(scheduler, vae=None, text_encoder=None, tokenizer=None, **components)

    monkeypatch.setattr(diffusers.ZImagePipeline, "from_pretrained", from_pretrained)
    names: dict[str, object] = {}
    exec(code, names)  # the README's own lines
    pipeline = names["pipeline"]
    assert isinstance(pipeline, diffusers.ZImagePipeline)
    assert isinstance(pipeline.transformer, diffusers.ZImageTransformer2DModel)
    assert pipeline.transformer.dtype == slipcast.compute_dtype(pipeline.transformer)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_the_first_screen_says_where_the_families_stand() -> None:
    first_screen = README[: README.index("```python")]
    (link,) = re.findall(r"\[docs/families\.md\]\((\S+)\) lists the families\s+that ship", first_screen)
    table = (ROOT / link).read_text(encoding="utf-8")
    assert [id_ for id_ in load_catalogue() if f"| `{id_}` |" not in table] == []


def test_the_functions_that_the_readme_names_are_those_that_there_are() -> None:
    named = set(re.findall(r"`slipcast\.(\w+)\(", README))
    functions = {name for name in slipcast.__all__ if inspect.isfunction(getattr(slipcast, name))}
    assert named == functions - {"compute_dtype"}


def test_the_extras_that_bring_packages_to_users_are_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("pipelines", "fast"):
        (package,) = (re.split("[<>=]", requirement)[0] for requirement in extras[extra])
        assert f'`pip install ".[{extra}]"` adds {package}' in README
