"""Writes a checkpoint in another naming or another format: in a stream, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slipcast.engine.build import model_class
from slipcast.engine.conversion import convert_header
from slipcast.engine.converted import Conversion
from slipcast.engine.destination import CONFIG, destination
from slipcast.engine.precision import family_dtype
from slipcast.engine.quantised_model import description
from slipcast.engine.safetensors_writer import Progress, write_tensors
from slipcast.engine.wanted import Wanted
from slipcast.engine.written_proof import prove_written
from slipcast.registry.claims import ARCHITECTURE, Layout
from slipcast.registry.identify import Match
from slipcast.registry.new_files import new_file, new_folder
from slipcast.registry.quantisation import count_formats


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote.

    Attributes:
        path: the file or folder that was named.
        files: the files that were written.
        family: id of the model's family.
        source_layout: whose names the input bears; None where the two namings are one.
        source_formats: number of the input's weights in each format.
        conversion: names, dtypes and shapes of the output, and what it lacks.
    """

    path: Path
    files: tuple[Path, ...]
    family: str
    source_layout: Layout | None
    source_formats: Mapping[str, int]
    conversion: Conversion

    def to_dict(self) -> dict[str, Any]:
        """The contract of ``slipcast convert --json``."""
        conversion = self.conversion
        return {
            "path": str(self.path),
            "files": [str(file) for file in self.files],
            "family": self.family,
            "layout": {"from": self.source_layout, "to": conversion.layout},
            "prefix": conversion.prefix,
            "formats": {"from": dict(self.source_formats), "to": dict(conversion.formats)},
            "tensors": len(conversion.tensors),
            "bytes": conversion.nbytes,
            "folded": dict(conversion.folded),
            "stayed": dict(conversion.stayed),
            "left_out": dict(conversion.left_out),
            "altered": list(conversion.altered),
        }


def convert(
    match: Match,
    out: Path,
    layout: Layout | None = None,
    *,
    wanted: Wanted | None = None,
    prefix: str | None = None,
    overwrite: bool = False,
    others: Sequence[Match] = (),
    unexpected: Sequence[str] = (),
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Converted:
    """Write a model in another naming or another format.

    Args:
        match: the identified model.
        out: a file whose name ends in ``.safetensors``; in the model's own names also a folder, which gets the
            weights and a ``config.json``.
        layout: ``native`` or ``diffusers``, as the model class names its tensors; the input's own where left out.
        wanted: what its weights shall be in; they stay as they are where left out.
        prefix: what to put before each name; see ``convert_header``.
        overwrite: whether to replace what lies at ``out``.
        others: the other models found in the same file; one by which the family is recognised stays as it is, others
            are left out.
        unexpected: globs of plain tensors that may be left over.
        progress: called with the bytes written so far and in all.
        cancelled: asked after each piece; once it says True nothing is left of the output.

    Raises:
        SlipcastError: as ``convert_header`` does; ``UnsupportedFileError`` where ``out`` is the input itself, is there
            already, or can't hold the layout; ``QuantisationError`` for values that can't be quantised or cast;
            ``Cancelled``.
    """
    place = destination(match, out, layout, prefix=prefix, overwrite=overwrite)
    layout, weights = place.layout, place.weights
    conversion = convert_header(match, layout, wanted=wanted, prefix=prefix, others=others, unexpected=unexpected)
    metadata = dict(conversion.metadata)
    if layout == "diffusers":
        metadata.setdefault("format", "pt")  # transformers refuses files without it
    elif layout in match.family.namings:
        metadata.update((ARCHITECTURE, name) for name in match.family.namings[layout].architectures[:1])
    with ExitStack() as stack:
        files = [weights]
        settings = _config(match, conversion) if place.folder else None
        if settings is not None:
            stack.enter_context(new_folder(out))
            files.append(out / CONFIG)
            config = stack.enter_context(new_file(files[1], overwrite=overwrite))
            config.write((json.dumps(settings, indent=2, sort_keys=False) + "\n").encode())
        file = stack.enter_context(new_file(weights, overwrite=overwrite))
        write_tensors(
            file,
            match.header,
            conversion.tensors,
            metadata,
            weights=match.everything.weights,
            progress=progress,
            cancelled=cancelled,
        )
        file.flush()
        prove_written(Path(file.name), match, conversion, settings)
    formats = count_formats(match.bundles.values())
    return Converted(out, tuple(files), match.family.id, match.layout, formats, conversion)


def _config(match: Match, conversion: Conversion) -> dict[str, Any]:
    """A folder's config.json: the class, the constructor's arguments, and what quantised layers are in.

    With the last diffusers refuses the folder, rather than take codes for weights.
    """
    library, _, name = match.model.partition(".")
    if library == "diffusers":
        head: dict[str, Any] = {"_class_name": name, "_diffusers_version": version("diffusers")}
    else:
        kind: Any = model_class(match.model)
        head = {"architectures": [name], "model_type": kind.config_class.model_type}
    matrices = {tensor.name for tensor in conversion.tensors if len(tensor.shape) > 1}
    layers = {
        name.removesuffix(".weight"): codec
        for name, codec in conversion.codecs.items()
        if name.endswith(".weight") and name in matrices
    }
    if not layers:
        return {**head, **match.config}
    precise = [name.removesuffix(".weight") for name in conversion.full_precision]
    dtype, _ = family_dtype(match.family.precision, match.bundles.values())
    described = description(dtype, layers, (layer for layer in precise if layer in layers))
    return {**head, **match.config, "quantization_config": described}
