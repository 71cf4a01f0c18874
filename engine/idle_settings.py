"""The note of a single model's plan on settings that were given, and that bear on whole pipelines alone."""

from __future__ import annotations

from slipcast.registry.settings import ResolvedSettings

_SECTIONS = frozenset({"memory", "text_encoder", "vae", "speed", "companions"})
_BEGINNING = "no bearing on the plan of a single model: "


def idle_notes(settings: ResolvedSettings) -> tuple[str, ...]:
    """One note that names the settings which some layer above the defaults gives and the plan passes over; else none.

    Args:
        settings: those that apply, with the layer that each comes from.
    """
    given = [
        name
        for name, origin in settings.origins.items()
        if name.partition(".")[0] in _SECTIONS and origin.layer != "default"
    ]
    if not given:
        return ()
    how = "'slipcast generate PATH --dry-run' plans the whole pipeline, and slipcast.pipeline makes it"
    return (f"{_BEGINNING}{', '.join(given)}; {how}",)


def without_idle_notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Notes without that one: a load, which makes the plan again, does not make it."""
    return tuple(note for note in notes if not note.startswith(_BEGINNING))
