"""Cards that are described and not there. Imports no torch, so that a load to one is refused at once."""

from __future__ import annotations

import re

from slipcast.registry.errors import DeviceError

_DESCRIBED = re.compile(r"cuda:(?P<major>\d{1,2})\.(?P<minor>\d),\s*(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>GiB|GB|MiB)")


def described(request: str) -> re.Match[str] | None:
    """The ``major`` and ``minor`` capability, ``size`` and ``unit`` of memory that a request describes, if it does."""
    return _DESCRIBED.fullmatch(request.strip())


def label_of(card: re.Match[str]) -> str:
    """A described card, for people."""
    return f"a card of {card['size']} {card['unit']}, capability {card['major']}.{card['minor']}"


def refuse_described(request: str) -> None:
    """Refuse to load to a card that is not there.

    Raises:
        DeviceError: the device is only described.
    """
    card = described(request)
    if card is not None:
        raise DeviceError(
            f"a load to {label_of(card)}, which is not there",
            expected="a device of this machine",
            hint="plans can be made for described devices, loads can't; give device=cpu or device=cuda:0",
        )
