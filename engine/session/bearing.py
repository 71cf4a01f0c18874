"""Which settings bear on what a load leaves: where one of them changes, a session loads anew."""

from __future__ import annotations

from typing import Any

from slipcast.registry.settings import Settings
from slipcast.registry.settings_model import sections

WITHOUT_BEARING = frozenset(
    {
        # decided by the time that all layers have been laid over one another
        "schema_version",
        "preset",
        "models",
        # what is recognised in the file, and what its parts are, stands in the plan
        "unexpected",
        "families",
        "header_limit_mib",
        # how the bytes come, not which
        "reader",
        "chunk_mib",
        "threads",
        "ahead_mib",
        # what is left alone of a device
        "device_reserve_mib",
        # how a pipeline's VAE runs, which is set on a pipeline that is there
        "vae.tiling",
        "vae.slicing",
        "vae.tile_size",
    }
)
"""Settings that leave the same pipeline; any other one bears on it."""


def bearing_settings(settings: Settings) -> tuple[tuple[str, Any], ...]:
    """The settings that bear on what a load leaves, by their dotted names."""
    groups = sections()
    values = settings.model_dump()
    flat = {
        dotted: value
        for name, own in values.items()
        for dotted, value in (
            {f"{name}.{inner}": own[inner] for inner in own} if name in groups else {name: own}
        ).items()
    }
    return tuple((name, value) for name, value in flat.items() if name not in WITHOUT_BEARING)
