"""The text of a drafted family file: what is known as entries, what is guessed as comments, TODO where nobody knows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipcast.registry.names import Names
from slipcast.registry.templates import Template, block_lists, templates

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "Null", "True", "False", "NULL", "TRUE", "FALSE"})
_HEAD_NORMS = frozenset({"q_norm", "norm_q", "query_norm"})
_COLUMN = 56
_MOST_TEMPLATES = 400
_MOST_INSEPARABLE = 12
_LONGEST_COMMENT = 150


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What is known of a checkpoint, and guessed.

    Attributes:
        id: the family's id.
        kind: what part of a pipeline it is.
        model: the model class, or a placeholder.
        prefix: what stands before its names.
        names: its native names and logical shapes.
        evidence: names that tell it from everything known.
        inseparable: known things that have all of its names.
        config: the config.json of the folder that it came from, or None.
        outside: beginnings of the file's names that lie outside the prefix.
    """

    id: str
    kind: str
    model: str
    prefix: str
    names: Names
    evidence: Sequence[str]
    inseparable: Sequence[str]
    config: Mapping[str, Any] | None
    outside: Sequence[str]


def draft_text(facts: DraftFacts) -> str:
    """The text of the family file."""
    sections = (_head, _identify, _config, _keys, _precision, _rest)
    return "\n".join("\n".join(section(facts)) for section in sections) + "\n"


def _head(facts: DraftFacts) -> Iterator[str]:
    yield "# Drafted from one checkpoint. 'slipcast check FILE' lists what is left to decide."
    yield "schema: 1"
    yield f"id: {_quoted(facts.id)}"
    yield _remark(f"title: {_quoted(facts.id)}", "TODO: the name as people write it")
    yield _remark(f"kind: {facts.kind}", "TODO: guessed; denoiser, text_encoder, vae or controlnet")
    yield _remark(f"model: {facts.model}", "TODO: the class to build, diffusers.Name or transformers.Name")
    yield ""
    prefixes = [facts.prefix, ""] if facts.prefix else [""]
    yield _remark(f"prefixes: [{', '.join(map(_quoted, prefixes))}]", "TODO: what else stands before the names?")
    if facts.outside:
        yield _comment(f"Names outside the prefix begin with: {', '.join(facts.outside)}. TODO: another family's?")


def _identify(facts: DraftFacts) -> Iterator[str]:
    yield "identify:"
    yield "  # The fewest names that no family or header known here has all of. TODO: add the name of an output layer,"
    yield "  # which control nets lack, and one that the model class has under another name, to tell the two namings."
    yield f"  has: [{', '.join(map(_quoted, facts.evidence))}]"
    if facts.inseparable:
        yield "  # TODO: these have all of these names too. If they are another family's, say hasnt: [a name of theirs]"
        yield from (_comment(f"  {name}", 2) for name in facts.inseparable[:_MOST_INSEPARABLE])
    yield ""


def _config(facts: DraftFacts) -> Iterator[str]:
    yield "# Constructor arguments. TODO: an expression for each that the header shows, and the constants that differ"
    yield "# from the class's defaults. Guesses, with what they come to here:"
    yield "config: {}"
    for expression, value in guesses(facts.names):
        yield _remark(f"#  ARGUMENT: {expression}", str(value), _COLUMN)
    if facts.config:
        yield "# The config.json beside the weights says:"
        for name, value in facts.config.items():
            if not name.startswith("_"):
                yield _comment(f"  {name}: {json.dumps(value)}")
    yield ""


def guesses(names: Names) -> Iterator[tuple[str, int]]:
    """Expressions that constructor arguments are often made of, with their values."""
    for place, count in block_lists(names).items():
        if _PLAIN.fullmatch(place):
            yield f"count({place})", count
    matrices = {name: shape for name, shape in names.items() if len(shape) == 2 and _PLAIN.fullmatch(name)}
    sizes = Counter(size for shape in matrices.values() for size in shape)
    width = sizes.most_common(1)[0][0] if sizes else 0
    outer = {name: shape for name, shape in matrices.items() if not any(part.isdigit() for part in name.split("."))}
    wide = [name for name, shape in {**outer, **matrices}.items() if shape[0] == width]
    yield from ((f"size({name}, 0)", width) for name in wide[:1])
    yield from ((f"size({name}, 1)", shape[1]) for name, shape in outer.items() if shape[0] == width != shape[1])
    heads = [name for name in names if _HEAD_NORMS & set(name.split(".")) and _PLAIN.fullmatch(name)]
    yield from ((f"size({name}, 0)", names[name][0]) for name in heads[:1] if len(names[name]) == 1)


def _keys(facts: DraftFacts) -> Iterator[str]:
    found = [template for template in templates(facts.names) if _PLAIN.fullmatch(_unholed(template.place))]
    yield "# Names in the file, and what they are in the model's. What has no entry keeps its name. TODO: an entry for"
    yield "# each of these places that the model class has under another name:"
    yield "keys: {}"
    for template in found[:_MOST_TEMPLATES]:
        yield _comment(_described(template))
    if len(found) > _MOST_TEMPLATES:
        yield f"# ... and {len(found) - _MOST_TEMPLATES} more"
    yield ""


def _described(template: Template) -> str:
    shapes = ", ".join(f"{leaf} {list(shape)}".strip() for leaf, shape in template.leaves.items())
    times = f" x {template.count}" if template.count > 1 else ""
    return f"  {template.place}: {shapes}{times}{_fused(template)}"


def _fused(template: Template) -> str:
    """A guess where rows of several matrices seem to be one."""
    shape = template.leaves.get("weight", ())
    last = template.place.rpartition(".")[2]
    if "qkv" in last and len(shape) == 2 and shape[0] > shape[1]:
        return f"   TODO: {last}: to_q + to_k + to_v?"
    return ""


def _precision(facts: DraftFacts) -> Iterator[str]:
    yield "precision:"
    yield _remark("  fp16: unsafe", "TODO: unsafe makes float32 of float16; say safe once it is tried")
    yield _remark("  keep: {}", "TODO: modules that float8 harms, by role, in the model's names")
    for place in _modules_with(facts, ("time", "t_embed")):
        yield _comment(f"  time_embedding: [{place}]", 2)
    yield "  fp8:"
    yield '    storage: {unsupported: "TODO: not tried"}'
    yield '    compute: {unsupported: "TODO: not tried"}'
    yield ""


def _modules_with(facts: DraftFacts, words: Sequence[str]) -> list[str]:
    """First segments of names that hold one of the words."""
    firsts = {name.partition(".")[0] for name in facts.names if any(word in name.partition(".")[0] for word in words)}
    return sorted(first for first in firsts if _PLAIN.fullmatch(first))


def _rest(facts: DraftFacts) -> Iterator[str]:
    blocks = [place for place in block_lists(facts.names) if "." not in place and _PLAIN.fullmatch(place)]
    yield "# TODO: how it is run, what belongs to it, a small model for 'slipcast check', and recorded headers."
    yield "# runtime:"
    yield "#   compile: {blocks: [CLASS]}"
    yield f"#   offload: {{blocks: [{', '.join(blocks)}]}}"
    yield "# companions: {text_encoder: ID, vae: ID}"
    yield "# tiny:"
    yield "#   config: {}"
    yield "#   inputs: {ARGUMENT: normal 1x4x8x8}"
    yield "#   fp8_error: 0.1"
    yield "# examples:"
    yield "#   - {header: NAME, expect: {layout: native, format: plain}}"


def _quoted(text: str) -> str:
    """A text as YAML reads it back, whatever it holds."""
    return text if _PLAIN.fullmatch(text) and text not in _WORDS else json.dumps(text)


def _unholed(place: str) -> str:
    return place.replace("{", "").replace("}", "")


def _remark(entry: str, remark: str, column: int = _COLUMN) -> str:
    return f"{entry:<{column}}  # {remark}"


def _comment(text: str, indent: int = 0) -> str:
    """A line of comment; nothing that a file says can end it."""
    line = json.dumps(text)[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return f"{'':<{indent}}# {line if len(line) <= _LONGEST_COMMENT else line[: _LONGEST_COMMENT - 3] + '...'}"
