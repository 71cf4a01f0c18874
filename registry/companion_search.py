"""Looks for the parts of a pipeline: in settings, in a pipeline's folder, in the same file, and beside the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from slipcast.registry.catalogue import load_catalogue
from slipcast.registry.companion_places import beside, named_folder, weights_in
from slipcast.registry.companions import Companion, is_class, kind_of_role
from slipcast.registry.errors import CompanionError, IdentificationError, SlipcastError
from slipcast.registry.experts import expert_of, is_twin
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.identify import Match, are_apart
from slipcast.registry.inspection import Identified, identify_path
from slipcast.registry.pipeline_index import PipelineIndex, read_index
from slipcast.registry.runtime import Sampling
from slipcast.registry.settings import Settings
from slipcast.registry.tokenizer_class import TOKENIZER_CONFIG, named_tokenizer_class, refuse_other_tokenizer
from slipcast.registry.untrusted_files import status_of

_TOKENIZER_FILES = frozenset({TOKENIZER_CONFIG, "tokenizer.json"})


@dataclass(frozen=True)
class CompanionSearch:
    """Where the parts of one denoiser's pipeline can lie.

    Attributes:
        path: the denoiser's file or folder, or the pipeline's folder.
        identified: what the path holds.
        index: of the pipeline's folder that the path is or lies in; None elsewhere.
        sampling: the pipeline's facts.
        settings: families, companions and header_limit_mib matter.
    """

    path: Path
    identified: Identified
    index: PipelineIndex | None
    sampling: Sampling
    settings: Settings

    def find_all(self, needed: Mapping[str, str]) -> tuple[list[Companion], dict[str, str]]:
        """Find every part, or say which are missing.

        Args:
            needed: role -> a family's id, ``ID/VARIANT``, or a class, as a family file's ``companions:`` has them.

        Returns:
            The parts, models first; and the roles that stay empty, with the reason.

        Raises:
            CompanionError: parts are missing, or not what is needed.
        """
        self._refuse_unknown(needed)
        self._refuse_idle_settings(needed)
        found: dict[str, Companion] = {}
        absent: dict[str, str] = {}
        missing: dict[str, str] = {}
        for role in sorted(needed, key=lambda role: kind_of_role(role) != "model"):
            part = self._find(role, needed[role], found)
            if part is not None:
                found[role] = part
            elif self.index is not None and role in self.index.absent:
                absent[role] = "the pipeline's folder lists none"
            elif role in self.sampling.optional:
                absent[role] = "none was found, and the pipeline does without"
            else:
                missing[role] = needed[role]
        if missing:
            raise self._missing(missing)
        return list(found.values()), absent

    def _find(self, role: str, needed: str, found: Mapping[str, Companion]) -> Companion | None:
        kind = kind_of_role(role)
        if kind == "model":
            ways: tuple[Callable[[], Companion | None], ...] = (
                lambda: self._model_of_setting(role, needed),
                lambda: self._model_of_index(role, needed),
                lambda: self._model_in_same_file(role, needed),
                lambda: self._model_of_folder_setting(role, needed),
                lambda: self._model_beside(role, needed, beside(self.path), "beside the file"),
            )
        else:
            ways = (
                lambda: self._processor(role, needed),
                lambda: self._tokenizer_of_encoder(role, needed, found),
                lambda: self._made_scheduler(role, needed),
            )
        return next((part for way in ways if (part := way()) is not None), None)

    # models

    def _model_of_setting(self, role: str, needed: str) -> Companion | None:
        named = self._setting(role)
        return None if named is None else self._named_model(role, needed, named, f"setting companions.{role}")

    def _model_of_index(self, role: str, needed: str) -> Companion | None:
        folder = None if self.index is None else named_folder(self.index.folder, role)
        return None if folder is None else self._model_of_pipeline(role, needed, folder, "in the pipeline's folder")

    def _model_in_same_file(self, role: str, needed: str) -> Companion | None:
        for match in self._in_file:
            if _fits(match, needed, of_any_variant=True):
                others = tuple(other for other in (self.identified.main, *self._in_file) if other is not match)
                return self._model(role, needed, match, self.path, "in the same file", others)
        return None

    def _model_of_folder_setting(self, role: str, needed: str) -> Companion | None:
        folder = self._setting("folder")
        if folder is None:
            return None
        inside = named_folder(folder, role)
        if inside is not None:
            return self._model_of_pipeline(role, needed, inside, "setting companions.folder")
        return self._model_beside(role, needed, iter([weights_in(folder)]), "setting companions.folder")

    def _model_beside(self, role: str, needed: str, places: Iterator[tuple[Path, ...]], found: str) -> Companion | None:
        """The one file that is what is needed, in the first place that has any.

        Of a class alone nothing tells which of its models it is; such a part has to be named, or lie in a folder.
        """
        if is_class(needed):
            return None
        for files in places:
            fitting = [
                (file, identified, match)
                for file in files
                if file.resolve() != self.path.resolve() and (identified := self._known(file, needed)) is not None
                for match in identified.matches
                if _fits(match, needed)
            ]
            if role in self.sampling.experts:
                fitting = [each for each in fitting if expert_of(each[0], self.sampling) == role]
                twins = [each for each in fitting if is_twin(each[0], self.path, self.sampling)]
                fitting = twins or fitting
            if len(fitting) > 1:
                raise CompanionError(
                    f"{len(fitting)} files that could be the {role}, {self._title(needed)}",
                    expected="one",
                    hint=f"name the one that you mean by the setting companions.{role}",
                    path=self.path,
                    items=[str(file) for file, _, _ in fitting],
                    roles=(role,),
                )
            for file, identified, match in fitting:
                return self._model(role, needed, match, file, found, _others(match, identified))
        return None

    def _named_model(self, role: str, needed: str, path: Path, found: str) -> Companion:
        """The model that a setting names: what is needed, or an error."""
        inside = named_folder(path, role)
        if inside is not None:
            return self._model_of_pipeline(role, needed, inside, found)
        try:
            identified = identify_path(path, self._companion_settings, needed=needed)
        except IdentificationError:
            if is_class(needed) and path.is_dir() and not self._has_family(needed):
                return Companion(role, "model", needed, found, path)
            raise
        for match in identified.matches:
            if _fits(match, needed):
                return self._model(role, needed, match, identified.checkpoint.path, found, _others(match, identified))
        held = ", ".join(_named(match) for match in identified.matches)
        raise CompanionError(
            f"as the {role}: {held}",
            expected=self._title(needed),
            hint=f"correct the setting companions.{role}",
            path=path,
            roles=(role,),
        )

    def _model_of_pipeline(self, role: str, needed: str, folder: Path, found: str) -> Companion:
        """A component's folder, whose own files say what it is; of a class without a family its library reads it."""
        try:
            identified = identify_path(folder, self._companion_settings, needed=needed)
        except IdentificationError:
            if is_class(needed) and not self._has_family(needed):
                return Companion(role, "model", needed, found, folder)
            raise
        match = identified.main
        if not _fits(match, needed):
            raise CompanionError(
                f"as the {role}: {_named(match)}",
                expected=self._title(needed),
                hint="the folder is of another pipeline, or its parts were exchanged: download it again",
                path=folder,
                roles=(role,),
            )
        return self._model(role, needed, match, folder, found, identified.beside)

    def _model(
        self, role: str, needed: str, match: Match, path: Path, found: str, others: tuple[Match, ...]
    ) -> Companion:
        serves = match.family.serves.get(needed.partition("/")[0])
        class_name = match.model if serves is None else self._class_of(needed)
        return Companion(role, "model", class_name, found, path, match, others, serves=serves)

    # tokenizers, processors and schedulers

    def _processor(self, role: str, needed: str) -> Companion | None:
        """A folder of configuration files, from wherever models are taken from."""
        kind, named, given = kind_of_role(role), self._setting(role), self._setting("folder")
        if named is not None:
            folder = named_folder(named, role) or named
            if not folder.exists():
                raise CompanionError(
                    f"the setting companions.{role}, and there is no such file or folder",
                    expected=f"a folder with the files of {needed}",
                    hint=f"correct the setting companions.{role}",
                    path=folder,
                    roles=(role,),
                )
            return Companion(role, kind, self._listed_class(folder, role, needed), f"setting companions.{role}", folder)
        places = [
            (None if self.index is None else self.index.folder, "in the pipeline's folder"),
            (given, "setting companions.folder"),
            (None if self.index is not None else self.path.parent, "beside the file"),
        ]
        for place, found in places:
            inside = None if place is None else named_folder(place, role)
            if inside is not None:
                return Companion(role, kind, self._listed_class(inside, role, needed), found, inside)
        return None

    def _tokenizer_of_encoder(self, role: str, needed: str, found: Mapping[str, Companion]) -> Companion | None:
        """The tokenizer in its text encoder's folder, or in the folder beside that."""
        encoder = found.get(role.replace("tokenizer", "text_encoder").replace("processor", "text_encoder"))
        if kind_of_role(role) != "tokenizer" or encoder is None or encoder.path is None:
            return None
        folder = encoder.path if encoder.path.is_dir() else encoder.path.parent
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            listed = self._listed_class(folder, role, needed)
            return Companion(role, "tokenizer", listed, "with its text encoder", folder)
        near = named_folder(folder.parent, role)
        if near is None:
            return None
        return Companion(role, "tokenizer", self._listed_class(near, role, needed), "beside its text encoder", near)

    def _made_scheduler(self, role: str, needed: str) -> Companion | None:
        if kind_of_role(role) != "scheduler" or self.sampling.scheduler is None:
            return None
        made = Companion(role, "scheduler", needed, "made from what the family file says")
        return replace(made, arguments=FrozenMapping(self.sampling.scheduler))

    # what is needed

    def _setting(self, role: str) -> Path | None:
        """What the setting of a role names, which has to be there."""
        value = getattr(self.settings.companions, role, None)
        if value is None:
            return None
        status_of(Path(value))
        return Path(value)

    @cached_property
    def _companion_settings(self) -> Settings:
        return self.settings.model_copy(update={"family": None, "component": None})

    @cached_property
    def _in_file(self) -> tuple[Match, ...]:
        """The models in the denoiser's file that are others."""
        main = self.identified.main
        known = {match.name: match for match in (*self.identified.matches, *self.identified.beside)}
        return tuple(match for match in known.values() if match is not main and match.component == main.component)

    @cached_property
    def _seen(self) -> dict[tuple[Path, str], Identified | None]:
        return {}

    def _known(self, file: Path, needed: str) -> Identified | None:
        """What a file beside holds; None where that can't be said."""
        if (file, needed) not in self._seen:
            try:
                self._seen[file, needed] = identify_path(file, self._companion_settings, needed=needed)
            except SlipcastError:
                self._seen[file, needed] = None
        return self._seen[file, needed]

    def _listed_class(self, folder: Path, role: str, needed: str) -> str:
        """The class that the index around a component's folder names, or its own files; else the family's.

        Raises:
            CompanionError: it is the folder of another tokenizer. Of the pipeline's own folder the index says what is
                right.
        """
        own = self.index is not None and folder.absolute().parent == self.index.folder.absolute()
        if kind_of_role(role) == "tokenizer" and not own:
            refuse_other_tokenizer(folder, role, needed)
        index = read_index(folder.absolute().parent)
        listed = None if index is None or folder.name != role else index.classes.get(role)
        if listed is not None:
            return ".".join(listed)
        return (named_tokenizer_class(folder) if kind_of_role(role) == "tokenizer" else None) or needed

    def _class_of(self, needed: str) -> str:
        if is_class(needed):
            return needed
        id_, _, variant = needed.partition("/")
        return load_catalogue(self.settings.families)[id_].model_of(variant or None)

    def _has_family(self, class_name: str) -> bool:
        """Whether a family makes this class; its tensors are then known, and others are none of it."""
        known = load_catalogue(self.settings.families)
        return any(class_name in {known[id_].model_of(name) for name in (None, *known[id_].variants)} for id_ in known)

    def _refuse_unknown(self, needed: Mapping[str, str]) -> None:
        """Refuse a family file that names others which are not known here."""
        known = load_catalogue(self.settings.families)
        for role, companion in needed.items():
            if not is_class(companion) and companion.partition("/")[0] not in known:
                raise CompanionError(
                    f"the family {companion!r} as the {role}, which is not known here",
                    expected="a family that 'slipcast families' lists",
                    hint="add the folder of its file to the setting families",
                    path=self.path,
                    roles=(role,),
                )

    def _refuse_idle_settings(self, needed: Mapping[str, str]) -> None:
        """Refuse settings for parts that the pipeline has not: whoever gives one expects it to be used."""
        given = [role for role, value in self.settings.companions if value is not None and role != "folder"]
        idle = tuple(role for role in given if role not in needed)
        if idle:
            raise CompanionError(
                f"{', '.join(f'companions.{role}' for role in idle)}, and the pipeline has no such part",
                expected=f"parts that it has: {', '.join(needed)}",
                hint="leave the setting out, or correct its name",
                path=self.path,
                roles=idle,
            )

    def _title(self, needed: str) -> str:
        if is_class(needed):
            return f"a folder of the class {needed}"
        id_, _, variant = needed.partition("/")
        family = load_catalogue(self.settings.families)[id_]
        return f"{family.title}{f' {variant}' if variant else ''} (family {id_}, {self._class_of(needed)})"

    def _missing(self, missing: Mapping[str, str]) -> CompanionError:
        wanted = {
            "model": "{title}: setting companions.{role}",
            "tokenizer": "a folder with the files of {class_name}: setting companions.{role}",
            "scheduler": "a folder with the configuration of {class_name}: setting companions.{role}",
        }
        items = [
            f"{role}: "
            + wanted[kind_of_role(role)].format(
                role=role, class_name=needed, title=self._title(needed) if kind_of_role(role) == "model" else ""
            )
            for role, needed in missing.items()
        ]
        return CompanionError(
            f"{self.identified.main.family.title} without {len(missing)} of the parts of its pipeline: "
            + ", ".join(missing),
            expected="each of them in the same file, in the pipeline's folder, beside the file, or named by a setting",
            hint="give a diffusers folder of the family that has them all by companions=FOLDER, or name each",
            path=self.path,
            items=items,
            roles=tuple(missing),
        )


def _fits(match: Match, needed: str, *, of_any_variant: bool = False) -> bool:
    """Whether a model is what is needed, or serves in its place; that no variant shows does not speak against it."""
    if is_class(needed):
        return match.model == needed
    id_, _, variant = needed.partition("/")
    if id_ in match.family.serves:
        return True
    return match.family.id == id_ and (of_any_variant or not variant or match.variant in (None, variant))


def _others(match: Match, identified: Identified) -> tuple[Match, ...]:
    """The other models in the file of one."""
    known = {other.name: other for other in (*identified.matches, *identified.beside)}
    return tuple(
        other
        for other in known.values()
        if other is not match and other.component == match.component and are_apart(other, match)
    )


def _named(match: Match) -> str:
    return match.family.title + (f" {match.variant}" if match.variant else "")
