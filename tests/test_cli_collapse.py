"""Names that differ in indices collapse into patterns that stand for exactly them."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipcast.cli.collapse import collapse


def collapsed(*names):
    return [(block.pattern, block.count) for block in collapse((name, "") for name in names)]


def expand(pattern):
    """The names that a pattern stands for, read without the code under test."""
    choices = []
    for text in re.split(r"(\{[^}]*\})", pattern):
        if not text.startswith("{"):
            choices.append([text])
            continue
        choices.append([])
        for part in text[1:-1].split(","):
            first, _, last = part.partition("…")
            choices[-1] += [str(index) for index in range(int(first), int(last or first) + 1)]
    return ["".join(parts) for parts in itertools.product(*choices)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.weight"], [("a.weight", 1)]),
        (["layers.3.q"], [("layers.3.q", 1)]),
        ([f"layers.{i}.q" for i in range(30)], [("layers.{0…29}.q", 30)]),
        (["mlp.0", "mlp.2"], [("mlp.{0,2}", 2)]),
        (["l.0", "l.1"], [("l.{0,1}", 2)]),
        ([f"l.{i}.q" for i in (0, 1, 2, 3, 6, 8, 9)], [("l.{0…3,6,8,9}.q", 7)]),
        ([f"l.{i}.q" for i in (9, 2, 10, 11)], [("l.{2,9…11}.q", 4)]),
        ([f"down.{i}.res.{j}.conv" for i in range(3) for j in range(2)], [("down.{0…2}.res.{0,1}.conv", 6)]),
        (["d.0.r.0", "d.0.r.1", "d.1.r.0", "d.1.r.1", "d.2.r.0"], [("d.{0,1}.r.{0,1}", 4), ("d.2.r.0", 1)]),
        (["w1", "w2"], [("w1", 1), ("w2", 1)]),
        (["a.2-1.b", "a.07.b", "a.²"], [("a.2-1.b", 1), ("a.07.b", 1), ("a.²", 1)]),
    ],
)
def test_blocks(names, expected):
    assert collapsed(*names) == expected


def test_labels_keep_names_apart():
    blocks = collapse([("l.0.q", "fp8"), ("l.1.q", "bfloat16"), ("l.2.q", "fp8"), ("l.3.q", "fp8")])
    assert [(block.pattern, block.count, block.label) for block in blocks] == [
        ("l.{0,2,3}.q", 3, "fp8"),
        ("l.1.q", 1, "bfloat16"),
    ]


def test_the_order_is_that_of_the_first_name_of_each_shape():
    assert collapsed("b.1.x", "a", "b.0.x", "b.0.y") == [("b.{0,1}.x", 2), ("a", 1), ("b.0.y", 1)]


@pytest.mark.parametrize("name", [".".join("0" * 3000), "a." + "9" * 5000, "", ".", "0"])
def test_names_that_no_model_has(name):
    assert collapsed(name) == [(name, 1)]


SEGMENT = st.sampled_from(["a", "b", "0", "1", "2", "3", "4", "10"])


@given(st.sets(st.lists(SEGMENT, min_size=1, max_size=5).map(".".join), max_size=40))
def test_patterns_stand_for_exactly_the_names(names):
    blocks = collapse((name, "") for name in sorted(names))
    expanded = [name for block in blocks for name in expand(block.pattern)]
    assert sorted(expanded) == sorted(names)
    assert all(len(expand(block.pattern)) == block.count for block in blocks)
