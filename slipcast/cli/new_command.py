"""``slipcast new``: drafts the family file of an unknown checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from shlex import quote

import click

from slipcast import api
from slipcast.cli.options import call_settings, common_options, path_argument, settings_options
from slipcast.cli.output import write, write_facts, write_heading, write_json
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.registry.catalogue import Catalogue, load_catalogue
from slipcast.registry.checkpoint import read_checkpoint
from slipcast.registry.claims import ask
from slipcast.registry.draft import PLACEHOLDER, Draft, draft_family
from slipcast.registry.errors import FamilyFileError, IdentificationError, SettingsError
from slipcast.registry.family_file import FOLDERS
from slipcast.registry.header import Checkpoint, Header
from slipcast.registry.new_files import new_file, new_folder
from slipcast.registry.quantisation import assemble
from slipcast.registry.validation import nearest


@click.command("new")
@path_argument
@click.option("--id", "id_", required=True, metavar="ID", help="The new family's id.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write it, ID.yaml; left out, into the working folder, of other kinds than denoisers into the "
    "subfolder where they belong.",
)
@click.option("--model", metavar="CLASS", help="The model class, diffusers.Name or transformers.Name.")
@click.option("--kind", type=click.Choice(list(FOLDERS)), help="What part of a pipeline it is; guessed if left out.")
@click.option(
    "--headers",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the recorded headers, from which the family is told as well; see 'slipcast check'.",
)
@settings_options
@common_options
def command(
    path: Path,
    id_: str,
    out: Path | None,
    model: str | None,
    kind: str | None,
    headers: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Draft the family file of the checkpoint PATH, which no family claims.

    The file parses, and recognises PATH by the fewest names that nothing known has all of. Everything else in it is
    guessed, as comments, or marked TODO. An existing file is never replaced.

    \b
    Examples:
      slipcast new model.safetensors --id my-model
      slipcast inspect model.safetensors --set families=[.]
    """
    settings = api.resolve(path, call_settings(assignments))
    catalogue = load_catalogue(settings.families)
    checkpoint = read_checkpoint(path, limit_mib=settings.header_limit_mib)
    header = _header(checkpoint, settings.component, catalogue)
    known = _known_names(recorded_headers(headers))
    draft = draft_family(header, id_, catalogue, known=known, model=model, kind=kind)
    if model is not None:
        _refuse_unknown_class(model)
    file = _write_file(draft, id_, out)
    if as_json:
        write_json(_summary(draft, file))
    else:
        _write(draft, file, path, guessed=kind is None)


def _header(checkpoint: Checkpoint, component: str | None, catalogue: Catalogue) -> Header:
    """The one header to draft for: that of the component that is named, or of the only one that no family claims."""
    headers = dict(checkpoint.headers)
    if component is not None and component in headers:
        return headers[component]
    if len(headers) > 1:
        claimed = [
            name
            for name, header in headers.items()
            if any(answer.evidence.complete for answer in ask(assemble(header).weights, catalogue))
        ]
        headers = {name: header for name, header in headers.items() if name not in claimed}
    if len(headers) != 1:
        raise IdentificationError(
            f"a pipeline with {len(headers)} components that no family claims",
            expected="one model to draft a family file for",
            hint="name one with --set component=NAME",
            path=checkpoint.path,
            items=headers,
        )
    return next(iter(headers.values()))


def _refuse_unknown_class(model: str) -> None:
    """Refuse a class that the installed libraries don't have, with the nearest of those that they have."""
    from slipcast.engine.build import model_class, model_classes  # torch, for those who name a class alone

    try:
        model_class(model)
    except FamilyFileError as problem:
        library, _, name = model.partition(".")
        near = nearest(name, model_classes(library))
        raise SettingsError(
            f"the model class {model!r}, which the installed {library} does not have",
            expected=f"a model class of {library}, diffusers.Name or transformers.Name",
            hint=(f"did you mean {library}.{near}? Else " if near else "")
            + f"correct --model, install the version of {library} that has it, or leave it out to fill it in later",
            field="model",
        ) from problem


def _known_names(folder: Path | None) -> dict[str, list[str]]:
    if folder is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="slipcast-new-") as scratch:
        records = Records(folder, Path(scratch))
        return {name: list(records.header(name).tensors) for name in records.names}


def _write_file(draft: Draft, id_: str, out: Path | None) -> Path:
    file = Path(draft.file) if out is None else out
    if file.name != f"{id_}.yaml":
        raise SettingsError(
            f"the file {file}",
            expected=f"a file that is called {id_}.yaml, as the id is",
            hint=f"write --out {file.with_name(f'{id_}.yaml')}",
            field="out",
        )
    if out is None and file.parent.name:
        with new_folder(file.parent), new_file(file) as written:
            written.write(draft.text.encode())
    else:
        with new_file(file) as written:
            written.write(draft.text.encode())
    return file


def _summary(draft: Draft, file: Path) -> dict[str, object]:
    return {
        "id": draft.family.id,
        "file": str(file),
        "kind": draft.family.kind,
        "model": draft.family.model,
        "prefixes": list(draft.family.prefixes),
        "evidence": list(draft.family.identify.has),
        "inseparable": list(draft.inseparable),
    }


def _write(draft: Draft, file: Path, path: Path, *, guessed: bool) -> None:
    family = draft.family
    unknown = family.model == PLACEHOLDER
    write_heading(str(file))
    write_facts(
        [
            ("kind", f"{family.kind}, guessed" if guessed else family.kind),
            ("class", "to be filled in" if unknown else family.model),
            ("prefix", family.prefixes[0] or "none"),
            ("evidence", list(family.identify.has)),
            ("alike", list(draft.inseparable)),
        ]
    )
    folder = file.parent if family.kind == "denoiser" else file.parent.parent
    write("Decide what the file marks TODO, then see what it makes of the checkpoint:")
    write(f"  slipcast inspect {quote(str(path))} --set {quote(f'families=[{folder}]')}")
    write(f"  slipcast check {quote(str(file))}")
