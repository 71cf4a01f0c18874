"""Headers in the model's names, read back into native names and shapes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slipcast.registry.keymap.key_map import KeyMap

Shapes = dict[str, tuple[int, ...]]


def _view(keys: dict[str, Any], shapes: Shapes) -> Shapes:
    return KeyMap.parse(keys, {}, {}).native_view(shapes)


@pytest.mark.parametrize(
    ("value", "shape", "native"),
    [
        ("m", (4, 6), (4, 6)),
        ("swap_halves(m)", (4, 6), (4, 6)),
        ("transpose(m)", (4, 6), (6, 4)),
        ("transpose(m)", (4,), (4,)),
        ("flat(m)", (4, 6), (24,)),
        ("flat(m)", (), (1,)),
        ("conv1x1(m)", (4, 6), (4, 6, 1, 1)),
        ("conv1x1(m)", (4,), (4,)),
        ("one_frame(m)", (4, 6, 3, 3), (4, 6, 1, 3, 3)),
        ("one_frame(m)", (4,), (4,)),
        ("reshape(m)", (1, 6), (1, 6)),
    ],
)
def test_shapes_of_operations(value: str, shape: tuple[int, ...], native: tuple[int, ...]) -> None:
    assert _view({"f": value}, {"m.w": shape}) == {"f.w": native}


def test_rows_of_a_sum_are_added() -> None:
    assert _view({"f": "q + k"}, {"q": (4, 6), "k": (2, 6)}) == {"f": (6, 6)}
    assert _view({"f": "transpose(q) + flat(k)"}, {"q": (4,), "k": (2, 3)}) == {"f": (10,)}


def test_files_of_a_sum_share_the_rows_equally() -> None:
    assert _view({"a + b": "m"}, {"m.w": (6, 5), "m.b": (6,)}) == {
        "a.w": (3, 5), "b.w": (3, 5), "a.b": (3,), "b.b": (3,)
    }  # fmt: skip


def test_other_names_are_kept() -> None:
    assert _view({"f": "m"}, {"x.w": (2,), "m.w": (3,)}) == {"x.w": (2,), "f.w": (3,)}
    assert _view({"f": "m"}, {"x.w": (2,)}) == {"x.w": (2,)}


@pytest.mark.parametrize(
    ("keys", "shapes"),
    [
        ({"f": "q + k"}, {"q": (4, 6)}),
        ({"f": "q + k"}, {"q": (4, 6), "k": (4, 5)}),
        ({"f": "q + k"}, {"q": (), "k": ()}),
        ({"f": "swap_halves(m)"}, {"m": (3, 2)}),
        ({"f": "swap_halves(m)"}, {"m": ()}),
        ({"f": "transpose(m)"}, {"m": (3, 2, 1)}),
        ({"f": "conv1x1(m)"}, {"m": (3, 2, 1)}),
        ({"f": "one_frame(m)"}, {"m": (3, 2, 1)}),
        ({"a + b": "m"}, {"m": (3, 2)}),
        ({"a + b": "m"}, {"m": ()}),
        ({"f": "m"}, {"m": (3,), "f": (3,)}),
        ({"a": "m", "b": "m"}, {"m": (3,)}),
        ({"f.{2*i}": "m.{i}", "f.{i}": "n.{i}"}, {"m.1": (3,), "n.2": (3,)}),
    ],
)
def test_what_does_not_fit_is_left_out(keys: dict[str, Any], shapes: Shapes) -> None:
    assert _view(keys, {**shapes, "other.w": (1,)}) == {"other.w": (1,)}


STRANGE = ["", ".", "..", "m", "m.", ".m", "m..0", "m.0.", "m.-1", "m." + "9" * 5000, "m.²", "m\n.0", "é.0", "{i}",
           "m.{last}", "m." * 5000, "m.0" + ".x" * 3000]  # fmt: skip


def test_strange_names_are_no_error() -> None:
    keys = {"f.{last-i}": "m.{i}", "g": "m", "h.{2*n}": "{n}", "k": "q + {last}.r"}
    view = _view(keys, dict.fromkeys(STRANGE, (2,)))
    assert len(view) == len(STRANGE)
    assert view["g." + "9" * 5000] == (2,)


def test_many_indices_of_a_stranger_take_no_time() -> None:
    shapes: Shapes = {f"m.{number}.w": (1,) for number in range(20_000)}
    start = time.process_time()
    assert len(_view({"f.{last-i}": "m.{i}"}, shapes)) == len(shapes)
    assert time.process_time() - start < 4
