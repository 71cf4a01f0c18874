"""``slipcast families``: every known family, or one in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import yaml

from slipcast.cli.options import call_settings, common_options, settings_options
from slipcast.cli.output import write, write_heading, write_json, write_table
from slipcast.engine.check.records import recorded_headers, source_of
from slipcast.registry.catalogue import Catalogue, load_catalogue
from slipcast.registry.family import Family
from slipcast.registry.settings import resolve_settings


@click.command("families")
@click.argument("family", metavar="[ID]", required=False)
@settings_options
@common_options
def command(family: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """List the known families, or show the one called ID in full, as a family file would say it.

    Families of your own are read from the folders that the setting families names. Of the headers that a family is
    tested with it says where they come from, where slipcast runs from its repository.

    \b
    Examples:
      slipcast families
      slipcast families ID
      slipcast families --set families=[~/families] --json
    """
    catalogue = load_catalogue(resolve_settings(call_settings(assignments)).values.families)
    if family is None:
        _list(catalogue, as_json)
    else:
        catalogue.refuse_unknown(family)
        _show(catalogue[family], as_json)


def _list(catalogue: Catalogue, as_json: bool) -> None:
    if as_json:
        write_json({"families": [family_summary(family) for family in catalogue.values()]})
        return
    rows = (
        (family.id, family.title, family.kind, family.model, ", ".join(family.variants), str(len(family.examples)))
        for family in catalogue.values()
    )
    write_table(("id", "title", "kind", "class", "variants", "examples"), rows, right=("examples",))


def family_summary(family: Family) -> dict[str, Any]:
    """A family's line of the list, as plain data."""
    return {
        "id": family.id,
        "title": family.title,
        "kind": family.kind,
        "class": family.model,
        "variants": list(family.variants),
        "examples": [example.header for example in family.examples],
        "source": family.source,
    }


def _show(family: Family, as_json: bool) -> None:
    sources = _sources(family)
    if as_json:
        said = as_written(family.model_dump(mode="json", by_alias=True))
        write_json({**said, "source": family.source, "header_sources": sources})
        return
    said = as_written(family.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"extends"}))
    write_heading(f"# {family.source}")
    write(yaml.dump(said, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True, width=120).rstrip())
    if sources:
        write("# Where the examples' headers come from:")
        for name, source in sources.items():
            write(f"#   {name}: {source}")


def _sources(family: Family) -> dict[str, str]:
    """Where each example's header comes from, as far as the recorded headers are here."""
    folder = recorded_headers()
    if folder is None:
        return {}
    found = {example.header: source_of(folder, example.header) for example in family.examples}
    return {name: source for name, source in found.items() if source is not None}


def as_written(value: Any) -> Any:
    """What a family's model holds, as a family file writes it: a statement about fp8 is a word, or a word and why."""
    if isinstance(value, Mapping) and "status" in value and value.keys() <= {"status", "reason"}:
        return {value["status"]: value["reason"]} if value.get("reason") else value["status"]
    if isinstance(value, Mapping):
        return {key: as_written(entry) for key, entry in value.items()}
    return [as_written(entry) for entry in value] if isinstance(value, list) else value
