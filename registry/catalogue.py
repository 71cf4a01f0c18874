"""Every known family: the built-in files and the user's folders, under the same checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from slipcast.registry.catalogue_index import INDEX, digest_of, index_text, read_index
from slipcast.registry.errors import FamilyFileError, SettingsError
from slipcast.registry.family import Family
from slipcast.registry.family_file import FOLDERS, FamilyFile, build_family, read_family_file
from slipcast.registry.settings_model import PROJECT_FILE
from slipcast.registry.signature import Signature, signature_of
from slipcast.registry.validation import did_you_mean

_PACKAGE = "slipcast.families"


class Catalogue(Mapping[str, Family]):
    """Families by id, in the order of their ids; a built-in one is read when it is asked for.

    Args:
        families: the families, or what reads them.
        signatures: by what they are told apart; those that are left out are made of the families.
    """

    def __init__(
        self, families: Mapping[str, Family | Callable[[], Family]], signatures: Mapping[str, Signature] | None = None
    ) -> None:
        self._families = {id_: families[id_] for id_ in sorted(families)}
        self._signatures = dict(signatures or {})

    def __getitem__(self, id_: str) -> Family:
        family = self._families[id_]
        if not isinstance(family, Family):
            family = self._families[id_] = family()
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._families

    def signature(self, id_: str) -> Signature:
        """What a header must hold at the least for a family to be worth asking."""
        if id_ not in self._signatures:
            self._signatures[id_] = signature_of(self[id_])
        return self._signatures[id_]

    def refuse_unknown(self, id_: str, expected: str = "an id that 'slipcast families' lists") -> None:
        """Refuse an id that somebody asks for and no family has.

        Raises:
            SettingsError: with the nearest id.
        """
        if id_ not in self:
            raise SettingsError(
                f"no family is called {id_!r}",
                expected=expected,
                hint=did_you_mean(id_, self, "add the folder of its file to the setting families"),
                field="family",
            )

    def without(self, ids: Collection[str]) -> Catalogue:
        """A catalogue that lacks some families."""
        return Catalogue({id_: family for id_, family in self._families.items() if id_ not in ids}, self._signatures)

    def with_family(self, family: Family) -> Catalogue:
        """A catalogue with a family, in place of the one of its id where there is one."""
        others = {id_: signature for id_, signature in self._signatures.items() if id_ != family.id}
        return Catalogue({**self._families, family.id: family}, others)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a family file lies.

    Attributes:
        path: the file.
        source: how it is named to users, where that is not its path.
        folder: the folder for its kind that it lies in, "" for the top, or None for a file that lies anywhere.
    """

    path: Path
    source: str | None = None
    folder: str | None = None

    @property
    def id(self) -> str:
        """The id of the family, which is the file's name."""
        return self.path.stem

    @property
    def name(self) -> str:
        """How it is named to users."""
        return self.source or str(self.path)

    def read(self) -> FamilyFile:
        """Read the file as far as YAML goes."""
        return read_family_file(self.path, source=self.source, folder=self.folder)


def load_family_file(path: str | Path) -> Family:
    """Read one family file, wherever it lies.

    A family that it extends is looked for beside it, then among the built-in ones.

    Raises:
        FamilyFileError: with the file, line and field of what is wrong.
    """
    path = Path(path)
    file = read_family_file(path)
    return build_family(file, _base(file, {**_builtin_places(), **_beside(path, file.extends)}))


def _beside(path: Path, extends: str | None) -> dict[str, _Place]:
    return {other.stem: _Place(other) for other in path.parent.glob("*.yaml") if other.stem == extends}


def load_catalogue(folders: Iterable[str | Path] = ()) -> Catalogue:
    """The built-in families, and those of the user's folders, which are read at once.

    A folder holds denoisers at its top and the other kinds in ``text_encoders``, ``vaes`` and ``controlnets``.

    Args:
        folders: folders of more family files.

    Raises:
        FamilyFileError: a file is wrong, two have one id, or one names a family that isn't there.
    """
    own = [place for folder in folders for place in _places_in(Path(folder))]
    if not own:
        return _builtin()
    known = _by_id([*_builtin_places().values(), *own])
    catalogue = _builtin()
    for place in own:
        file = place.read()
        catalogue = catalogue.with_family(build_family(file, _base(file, known)))
    for place in own:
        _check_names(place, catalogue)
    return catalogue


@cache
def _builtin() -> Catalogue:
    """The built-in families. Their files are held against each other, and linted, by the tests, not on every start."""
    places = _builtin_places()

    def reader(place: _Place) -> Callable[[], Family]:
        def read() -> Family:
            file = place.read()
            return build_family(file, _base(file, places), linted=True)

        return read

    with resources.as_file(resources.files(_PACKAGE)) as root:
        signatures = read_index(root, [place.path for place in places.values()])
    return Catalogue({id_: reader(place) for id_, place in places.items()}, signatures)


@cache
def _builtin_places() -> Mapping[str, _Place]:
    with resources.as_file(resources.files(_PACKAGE)) as root:
        return _by_id(_places_in(root, package=_PACKAGE))


def builtin_index() -> tuple[Path, str]:
    """The file of the built-in families' signatures, and what belongs into it."""
    places = _builtin_places()
    with resources.as_file(resources.files(_PACKAGE)) as root:
        catalogue = Catalogue(dict(_builtin().items()))
        digest = digest_of([place.path for place in places.values()], root)
        return root / INDEX, index_text({id_: catalogue.signature(id_) for id_ in catalogue}, digest)


def _check_names(place: _Place, catalogue: Catalogue) -> None:
    """Refuse a file that names a family, or a variant of one, that isn't there."""
    family = catalogue[place.id]
    for prefix, contained in family.contains.items():
        if contained not in catalogue:
            raise place.read().error(
                ("contains", prefix),
                f"no family is called {contained!r}",
                "the id of a family",
                did_you_mean(contained, catalogue, "add its file"),
            )
    for role, companion in family.companions.items():
        id_, _, variant = companion.partition("/")
        if variant and id_ in catalogue and variant not in catalogue[id_].variants:
            raise place.read().error(
                ("companions", role),
                f"{id_} has no variant {variant!r}",
                f"one of {', '.join(catalogue[id_].variants) or 'none'}",
                did_you_mean(variant, catalogue[id_].variants, "correct it, or leave it out"),
            )


def _base(file: FamilyFile, known: Mapping[str, _Place]) -> FamilyFile | None:
    if file.extends is None:
        return None
    if file.extends not in known:
        raise file.error(
            ("extends",),
            f"no family is called {file.extends!r}",
            "the id of a family",
            did_you_mean(file.extends, known, "add its file, or write the entries out"),
        )
    return known[file.extends].read()


def _by_id(places: Iterable[_Place]) -> dict[str, _Place]:
    known: dict[str, _Place] = {}
    for place in places:
        if place.id in known:
            raise place.read().error(
                ("id",),
                f"the id {place.id!r} is taken by {known[place.id].name}",
                "an id of its own",
                f"rename the file and its id, and write 'extends: {place.id}' to start from that family",
            )
        known[place.id] = place
    return known


def _places_in(root: Path, package: str | None = None) -> Iterator[_Place]:
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
        yield _Place(path, f"{package}/{name}" if package else str(path), subfolder)
