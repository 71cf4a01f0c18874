"""Chat templates that are broken or made with intent: each is refused as the pipeline loads, before its models are."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slipcast
from slipcast.engine.pipeline import assemble
from slipcast.engine.pipeline.chat_templates import check_chat_template
from slipcast.registry.errors import CompanionError
from support.tiny_pipelines import CHAT, byte_tokenizer, write_pipeline


def fault(template: Any) -> str:
    with pytest.raises(CompanionError) as caught:
        check_chat_template(byte_tokenizer(chat_template=template), "tokenizer", Path("tokenizer"))
    assert (caught.value.path, caught.value.roles) == ("tokenizer", ("tokenizer",))
    return caught.value.found.removeprefix("as the tokenizer: a chat template that ")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for message in messages %}", "fails: TemplateSyntaxError"),
        ("{{ messages[0].content | nothing }}", "fails: TemplateAssertionError"),
        ("{{ nothing.at.all }}", "fails: UndefinedError"),
        ("{{ nothing }}", "gives a text without the prompt: ''"),
        ("", "gives a text without the prompt: ''"),
        ("{{ raise_exception('no') }}", "fails: TemplateError: no"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "fails: OverflowError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "fails: RecursionError"),
        ("{{ messages[0].content * 100000 }}", "gives 1,700,000 characters"),
    ],
)
def test_a_broken_template_is_refused(template: str, why: str) -> None:
    assert fault(template).startswith(why)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}",
        "{% set n = 10 ** (10 ** 10) %}{{ messages[0].content }}",
        "{% set n = 'x' * 10 ** 11 %}{{ messages[0].content }}",
    ],
)
def test_a_template_without_bound_is_refused_in_time(template: str) -> None:
    began = time.monotonic()
    found = fault(template)
    assert "is not rendered in 5 seconds and 4 GiB" in found or "MemoryError" in found
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "template",
    [
        CHAT,
        {"default": CHAT, "tool_use": "{% for"},
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{{ bos_token }}{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[1].content }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endfor %}",
    ],
)
def test_templates_that_some_pipeline_can_use_are_taken(template: Any) -> None:
    check_chat_template(byte_tokenizer(chat_template=template), "tokenizer", None)


def test_several_templates_without_a_default_are_refused() -> None:
    several = SimpleNamespace(chat_template={"tool_use": CHAT})
    with pytest.raises(CompanionError, match="is no text"):
        check_chat_template(several, "tokenizer", None)


def test_a_pipeline_is_refused_before_its_models_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_pipeline("z-image", tmp_path / "z-image")
    (folder / "tokenizer" / "chat_template.jinja").write_text("{% for message in messages %}")
    monkeypatch.setattr(assemble, "load_planned", None)
    with pytest.raises(CompanionError, match="TemplateSyntaxError"):
        slipcast.pipeline(folder, device="cpu")


def test_a_pipeline_without_chat_does_not_mind(tmp_path: Path) -> None:
    folder = write_pipeline("sd-1", tmp_path / "sd-1")
    (folder / "tokenizer" / "chat_template.jinja").write_text("{% for message in messages %}")
    slipcast.pipeline(folder, device="cpu")
