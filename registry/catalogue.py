"""Every known family: the built-in files and the user's folders, under the same checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from slipcast.registry.errors import FamilyFileError
from slipcast.registry.family import Family
from slipcast.registry.family_file import FOLDERS, FamilyFile, build_family, read_family_file
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.settings_model import PROJECT_FILE
from slipcast.registry.validation import did_you_mean

_PACKAGE = "slipcast.families"


Catalogue: TypeAlias = Mapping[str, Family]
"""Families by id, in the order of their ids."""


def load_family_file(path: str | Path) -> Family:
    """Read one family file, wherever it lies.

    A family that it extends is looked for beside it, then among the built-in ones.

    Raises:
        FamilyFileError: with the file, line and field of what is wrong.
    """
    path = Path(path)
    file = read_family_file(path)
    known = _by_id(_builtin_files())
    if file.extends is not None:
        beside = [other for other in path.parent.glob("*.yaml") if other.stem == file.extends]
        known |= {other.stem: read_family_file(other) for other in beside}
    return build_family(file, _base(file, known))


def load_catalogue(folders: Iterable[str | Path] = ()) -> Catalogue:
    """Read the built-in family files and those of the user's folders.

    A folder holds denoisers at its top and the other kinds in ``text_encoders``, ``vaes`` and ``controlnets``.

    Args:
        folders: folders of more family files.

    Raises:
        FamilyFileError: a file is wrong, two have one id, or one names a family that isn't there.
    """
    own = [file for folder in folders for file in _files_in(Path(folder))]
    if not own:
        return _builtin()
    known = _by_id([*_builtin_files(), *own])
    families = {**_builtin(), **{file.stem: build_family(file, _base(file, known)) for file in own}}
    return _checked(families, known)


@cache
def _builtin() -> Catalogue:
    """The built-in families. Their key maps are linted by the tests, not on every start."""
    known = _by_id(_builtin_files())
    families = {file.stem: build_family(file, _base(file, known), linted=True) for file in known.values()}
    return _checked(families, known)


@cache
def _builtin_files() -> tuple[FamilyFile, ...]:
    with resources.as_file(resources.files(_PACKAGE)) as root:
        return tuple(_files_in(root, package=_PACKAGE))


def _checked(families: Mapping[str, Family], known: Mapping[str, FamilyFile]) -> Catalogue:
    for family in families.values():
        for prefix, contained in family.contains.items():
            if contained not in families:
                raise known[family.id].error(
                    ("contains", prefix),
                    f"no family is called {contained!r}",
                    "the id of a family",
                    did_you_mean(contained, families, "add its file"),
                )
        for role, companion in family.companions.items():
            id_, _, variant = companion.partition("/")
            if variant and id_ in families and variant not in families[id_].variants:
                raise known[family.id].error(
                    ("companions", role),
                    f"{id_} has no variant {variant!r}",
                    f"one of {', '.join(families[id_].variants) or 'none'}",
                    did_you_mean(variant, families[id_].variants, "correct it, or leave it out"),
                )
    catalogue: Catalogue = FrozenMapping({id_: families[id_] for id_ in sorted(families)})
    return catalogue


def _base(file: FamilyFile, known: Mapping[str, FamilyFile]) -> FamilyFile | None:
    if file.extends is None:
        return None
    if file.extends not in known:
        raise file.error(
            ("extends",),
            f"no family is called {file.extends!r}",
            "the id of a family",
            did_you_mean(file.extends, known, "add its file, or write the entries out"),
        )
    return known[file.extends]


def _by_id(files: Iterable[FamilyFile]) -> dict[str, FamilyFile]:
    known: dict[str, FamilyFile] = {}
    for file in files:
        if file.stem in known:
            raise file.error(
                ("id",),
                f"the id {file.stem!r} is taken by {known[file.stem].source}",
                "an id of its own",
                f"rename the file and its id, and write 'extends: {file.stem}' to start from that family",
            )
        known[file.stem] = file
    return known


def _files_in(root: Path, package: str | None = None) -> Iterator[FamilyFile]:
    try:
        entries = sorted(root.iterdir())
    except OSError as problem:
        raise FamilyFileError(
            f"the folder can't be read: {problem.strerror or problem}",
            expected="a folder of family files",
            hint="check the setting families",
            path=root,
        ) from None
    subfolders = [path for path in entries if path.is_dir() and not path.name.startswith((".", "__"))]
    for path in [*entries, *(inner for folder in subfolders for inner in sorted(folder.iterdir()))]:
        subfolder = path.relative_to(root).parent.name
        if path.suffix not in (".yaml", ".yml") or path.name == PROJECT_FILE or not path.is_file():
            continue
        if path.suffix == ".yml" or subfolder not in FOLDERS.values():
            raise FamilyFileError(
                "a family file would be passed over here",
                expected=f"NAME.yaml at the top of the folder or in {', '.join(filter(None, FOLDERS.values()))}",
                hint="rename or move the file",
                path=path,
            )
        name = path.relative_to(root).as_posix()
        yield read_family_file(path, source=f"{package}/{name}" if package else str(path), folder=subfolder)
