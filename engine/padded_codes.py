"""Whether codes that are padded to whole blocks would make a checkpoint look like one of a model of other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipcast.engine.codecs.base import Codec
from slipcast.engine.conversion_choice import pads, stored_shape
from slipcast.engine.new_weights import NewWeight
from slipcast.registry.claims import Layout
from slipcast.registry.config import infer_config
from slipcast.registry.errors import SlipcastError
from slipcast.registry.evidence import weigh
from slipcast.registry.family import Family
from slipcast.registry.header import Header, Shape
from slipcast.registry.names import Names


@dataclass(frozen=True)
class PaddedCodes:
    """What is read off the shapes of a checkpoint.

    Attributes:
        family: whose checkpoint it is.
        layout: whose names it bears.
        shapes: the logical shape of each of its weights, by name without a prefix.
    """

    family: Family
    layout: Layout
    shapes: Mapping[str, Shape]

    def hides_sizes(self, weight: NewWeight, codec: Codec) -> bool:
        """Whether a weight in a codec has a padded shape that the family reads a size off."""
        if not pads(codec, weight.shape):
            return False
        padded = {
            name: stored_shape(codec, self.shapes[name]) for name in self._siblings.get(weight.name, (weight.name,))
        }
        return self._read({**self.shapes, **padded}) != self._unpadded

    @cached_property
    def _siblings(self) -> dict[str, list[str]]:
        """For a checkpoint in the model's names: the weights that are one in the family's names, which pad alike."""
        if self.layout != "diffusers":
            return {}
        groups = ([term.model for term in link.terms] for link in self.family.key_map.links(self.shapes))
        return {
            name: group for group in groups for name in group if len(group) > 1 and all(n in self.shapes for n in group)
        }

    @cached_property
    def _unpadded(self) -> Any:
        return self._read(self.shapes)

    def _read(self, shapes: Mapping[str, Shape]) -> Any:
        """The arguments of the model class that shapes show; None where the family does not claim them."""
        native = self.family.key_map.native_view(shapes) if self.layout == "diffusers" else shapes
        names = Names(native)
        header = Header(Path(), "safetensors", (), MappingProxyType({}))
        try:
            return infer_config(self.family, names, header) if weigh(self.family.identify, names).complete else None
        except SlipcastError:
            return None
