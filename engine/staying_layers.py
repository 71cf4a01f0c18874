"""Why layers of a checkpoint that is written in a format of codes are not in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from slipcast.engine.conversion_choice import WEIGHT_SUFFIX, Chooser
from slipcast.engine.new_weights import NewWeight
from slipcast.engine.written_format import codec_for


@dataclass(frozen=True, slots=True)
class StayingLayers:
    """What the reasons rest on.

    Attributes:
        chooser: what decided about the weights.
        model: the model, on the meta device.
        tied: names of its weights that are one with another.
        obstacle: why the family's weights are not brought into codes at all, or "".
    """

    chooser: Chooser
    model: nn.Module
    tied: Collection[str]
    obstacle: str

    def reasons(self, weights: Iterable[NewWeight], formats: Mapping[str, str]) -> dict[str, str]:
        """The layers' matrices that are not in the format of codes that was asked for, each with the reason.

        Args:
            weights: the output's weights.
            formats: the format that each is in.
        """
        wanted = self.chooser.wanted
        alike = {wanted.format, "fp8_raw"} if wanted.format == "fp8_scaled" else {wanted.format}
        if not wanted.quantises:
            return {}
        return {
            weight.name: self._reason(weight)
            for weight in weights
            if weight.terms
            and len(weight.shape) > 1
            and weight.name.endswith(WEIGHT_SUFFIX)
            and formats[weight.name] not in alike
        }

    def _reason(self, weight: NewWeight) -> str:
        if self.obstacle:
            return self.obstacle
        for term in weight.terms:
            if term.model not in self.chooser.linears:
                return self._ineligible(term.model)
        is_plain = any(piece.source not in self.chooser.codecs for piece in weight.pieces)
        if is_plain and self.chooser.codecs and self.chooser.wanted.remainder == "keep":
            return "the file is quantised already, and the setting fp8.remainder is keep"
        operation = next((term.operation for term in weight.terms if term.operation is not None), None)
        if operation is not None and operation != "swap_halves":
            return f"the key map's {operation} would break its scale"
        obstacle = codec_for(self.chooser.wanted, weight.shape[1]).obstacle(weight.shape)
        return obstacle or "its codes would be padded, and the file then be taken for one of a model of other sizes"

    def _ineligible(self, name: str) -> str:
        """Why a weight of the model may not be quantised."""
        path = name.removesuffix(WEIGHT_SUFFIX)
        if kept := self.chooser.rules.stays_plain(path, self.tied):
            return kept
        kind = type(self.model.get_submodule(path)).__name__ if name.endswith(WEIGHT_SUFFIX) else "parameter"
        return f"only Linear layers are written in codes, and its class is {kind}"
