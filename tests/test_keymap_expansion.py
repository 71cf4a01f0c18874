"""Rules applied to names: exact links, and the errors of what does not fit."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from slipcast.registry.errors import KeyMapError
from slipcast.registry.keymap.key_map import KeyMap
from slipcast.registry.keymap.link import Link, Term


def _links(keys: dict[str, Any], names: list[str], files: set[str] | None = None) -> dict[str, str]:
    """Files to terms, as text."""
    links = KeyMap.parse(keys, {}, {}).links(names, files)
    return {
        " + ".join(link.files): " + ".join(
            f"{term.operation}({term.model})" if term.operation else term.model for term in link.terms
        )
        for link in links
    }  # fmt: skip


def test_name_without_a_rule_keeps_its_name() -> None:
    assert KeyMap.parse({"a": "b"}, {}, {}).links(["x.weight"]) == (Link(("x.weight",), (Term("x.weight"),)),)


def test_what_follows_a_place_is_carried_over() -> None:
    assert _links({"a.b": "c"}, ["c.weight", "c.d.bias", "c"]) == {
        "a.b.weight": "c.weight",
        "a.b.d.bias": "c.d.bias",
        "a.b": "c",
    }


def test_places_match_at_dots_only() -> None:
    assert _links({"a": "b"}, ["bb.weight", "b2", "x.b"]) == {"bb.weight": "bb.weight", "b2": "b2", "x.b": "x.b"}


def test_index_holes_take_digits_only() -> None:
    assert _links({"a.{i}": "b.{i}"}, ["b.0", "b.10.w", "b.x", "b.01"]) == {
        "a.0": "b.0",
        "a.10.w": "b.10.w",
        "b.x": "b.x",
        "b.01": "b.01",
    }


def test_words_take_their_words_only() -> None:
    assert _links({"{s=p|q}.new": "{s}.old"}, ["p.old", "q.old", "r.old"]) == {
        "p.new": "p.old",
        "q.new": "q.old",
        "r.old": "r.old",
    }


def test_names_can_be_exchanged() -> None:
    assert _links({"a": "b", "b": "a"}, ["a.w", "b.w"]) == {"b.w": "a.w", "a.w": "b.w"}


def test_more_special_rule_wins_whatever_its_length() -> None:
    keys = {"t -> text": {"{s=one|two}.{i}": "{s}.{i}"}, "p": "text.projector", "q": "text.one.3.norm"}
    names = ["text.projector.weight", "text.one.3.norm.weight", "text.one.3.w", "text.three.w"]
    assert _links(keys, names) == {
        "p.weight": "text.projector.weight",
        "q.weight": "text.one.3.norm.weight",
        "t.one.3.w": "text.one.3.w",
        "t.three.w": "text.three.w",
    }


def test_deeper_rule_that_does_not_apply_leaves_the_wider_one() -> None:
    assert _links({"a -> b": {"c.d.e": "x.y.z"}}, ["b.x.y.w", "b.x.y.z"]) == {
        "a.x.y.w": "b.x.y.w",
        "a.c.d.e": "b.x.y.z",
    }


def test_last_is_the_greatest_index_of_its_place() -> None:
    keys = {"f.{i}": "m.{i}", "f.{last}": "flat(m.{last})", "g.{last-i}": "n.{i}"}
    names = ["m.0", "m.2", "m.10", "n.0", "n.1", "n.2"]
    assert _links(keys, names) == {
        "f.0": "m.0",
        "f.2": "m.2",
        "f.10": "flat(m.10)",
        "g.2": "n.0",
        "g.1": "n.1",
        "g.0": "n.2",
    }


def test_last_is_that_of_each_parent() -> None:
    keys = {"f.{b}.{last-i}": "m.{b}.{i}"}
    assert _links(keys, ["m.0.0", "m.0.1", "m.1.0"]) == {"f.0.1": "m.0.0", "f.0.0": "m.0.1", "f.1.0": "m.1.0"}


def test_last_looks_at_the_place_of_its_hole() -> None:
    keys = {"f.{last-i}.y.{j}": "m.{i}.x.{j}", "g.{last}.{j}": "n.{last}.{j}"}
    assert _links(keys, ["m.0.x.7", "m.1.x.8", "m.2.z.9", "n.3.5"]) == {
        "f.2.y.7": "m.0.x.7",
        "f.1.y.8": "m.1.x.8",
        "m.2.z.9": "m.2.z.9",
        "g.3.5": "n.3.5",
    }


def test_arithmetic_is_computed() -> None:
    names = [f"m.{b}.{n}.w" for b in range(2) for n in range(2)]
    assert list(_links({"f.{3*b+1+n}": "m.{b}.{n}"}, names)) == ["f.1.w", "f.2.w", "f.4.w", "f.5.w"]


def test_file_decides_between_spellings() -> None:
    keys = {"f.{a|b}.{c|d}": "m"}
    assert _links(keys, ["m.w"], {"f.b.c.w", "z"}) == {"f.b.c.w": "m.w"}
    assert _links(keys, ["m.w"], {"z"}) == {"f.a.c.w": "m.w"}
    assert _links(keys, ["m.w"]) == {"f.a.c.w": "m.w"}


def test_sum_gathers_its_terms_tensor_by_tensor() -> None:
    names = ["m.0.k.bias", "m.0.q.weight", "m.0.q.bias", "m.0.k.weight", "m.1.q.weight", "m.1.k.weight"]
    assert _links({"f.{i}": "m.{i}.q + swap_halves(m.{i}.k)"}, names) == {
        "f.0.bias": "m.0.q.bias + swap_halves(m.0.k.bias)",
        "f.0.weight": "m.0.q.weight + swap_halves(m.0.k.weight)",
        "f.1.weight": "m.1.q.weight + swap_halves(m.1.k.weight)",
    }


def test_sum_in_the_key_names_several_files() -> None:
    assert _links({"{s=x|y}": {"gate + up": "gate_up"}}, ["x.gate_up.weight"]) == {
        "x.gate.weight + x.up.weight": "x.gate_up.weight"
    }


def test_sum_without_any_of_its_terms_makes_no_link() -> None:
    assert _links({"qkv": "q + k + v"}, ["other"]) == {"other": "other"}


def test_sum_with_some_of_its_terms_is_an_error() -> None:
    with pytest.raises(KeyMapError) as caught:
        _links({"m -> n": {"qkv.{i}": "q.{i} + k.{i} + v.{i}"}}, ["n.q.0.bias", "n.v.0.bias"])
    assert "a sum needs are missing" in str(caught.value)
    assert caught.value.items == ("n.k.0.bias",)
    assert caught.value.where == ("keys", "m -> n", "qkv.{i}")


def test_all_names_of_one_fault_are_listed() -> None:
    with pytest.raises(KeyMapError) as caught:
        _links({"qkv": "q + k"}, ["q.weight", "q.bias"])
    assert caught.value.items == ("k.weight", "k.bias")


def test_two_tensors_for_one_name_in_the_file_are_an_error() -> None:
    with pytest.raises(KeyMapError, match="have the same name in the file") as caught:
        _links({"f.{3*b+n}": "m.{b}.{n}"}, ["m.0.3", "m.1.0", "m.0.0"])
    assert caught.value.items == ("m.0.3", "m.1.0", "in the file: f.3")
    assert caught.value.where == ("keys", "f.{3*b+n}")


def test_rule_may_not_land_on_a_name_that_is_kept() -> None:
    with pytest.raises(KeyMapError, match="have the same name in the file"):
        _links({"a": "b"}, ["a.w", "b.w"])


def test_part_of_a_sum_may_not_land_on_another_rules_name() -> None:
    with pytest.raises(KeyMapError, match="have the same name in the file"):
        _links({"a + c": "b", "d -> e": {}, "c -> g": {}}, ["b.w", "g.w"])


def test_two_spellings_of_one_tensor_are_an_error() -> None:
    with pytest.raises(KeyMapError, match="under two of its spellings") as caught:
        _links({"f.{a|b}": "m"}, ["m.w"], {"f.a.w", "f.b.w"})
    assert caught.value.items == ("f.a.w", "f.b.w")


def test_rules_without_an_order_are_an_error_where_both_match() -> None:
    keys = {"{s=a|b}.x": "{s}.y", "f.{t}": "a.{t=y|z}"}
    assert _links(keys, ["b.y", "a.z"]) == {"b.x": "b.y", "f.z": "a.z"}
    with pytest.raises(KeyMapError, match="none is more special") as caught:
        _links(keys, ["a.y.weight", "a.y.bias", "b.y"])
    assert caught.value.items == ("a.y.weight", "a.y.bias")


def test_third_rule_can_decide_between_two() -> None:
    keys = {"{s=a|b}.x": "{s}.y", "f.{t}": "a.{t=y|z}", "g": "a.y"}
    assert _links(keys, ["a.y.w"]) == {"g.w": "a.y.w"}


def test_scopes_may_share_a_prefix_if_every_child_has_an_entry() -> None:
    keys = {"img -> block": {"mod": "norm1"}, "txt -> block": {"mod": "norm2"}}
    assert _links(keys, ["block.norm1.w", "block.norm2.w"]) == {
        "img.mod.w": "block.norm1.w",
        "txt.mod.w": "block.norm2.w",
    }
    with pytest.raises(KeyMapError, match="none is more special"):
        _links(keys, ["block.norm3.w"])


def test_equal_places_are_an_error() -> None:
    with pytest.raises(KeyMapError, match="none is more special"):
        _links({"a": "x", "b": "x"}, ["x.w"])


def test_repeated_names_count_once() -> None:
    assert len(KeyMap.parse({}, {}, {}).links(["a", "a"])) == 1


def test_links_follow_the_order_of_the_names() -> None:
    links = KeyMap.parse({"q": "b + d"}, {}, {}).links(["a", "b", "c", "d", "e"])
    assert [link.files[0] for link in links] == ["a", "q", "c", "e"]


def test_key_map_can_be_pickled_after_use() -> None:
    key_map = KeyMap.parse({"a.{i}": "b.{i}", "c": "b"}, {"d": "unused"}, {"e.": "other"})
    links = key_map.links(["b.0", "b.x"])
    again = pickle.loads(pickle.dumps(key_map))
    assert again == key_map
    assert again.links(["b.0", "b.x"]) == links


def test_many_names_expand_quickly() -> None:
    keys = {
        f"s{s}.{{i}} -> stack{s}.{{i}}": {"qkv": "q + k + v", **{f"f{n}": f"m{n}" for n in range(10)}} for s in range(5)
    }
    names = [
        f"stack{s}.{i}.{leaf}.{kind}"
        for s in range(5)
        for i in range(20)
        for leaf in ["q", "k", "v", *(f"m{n}" for n in range(7))]
        for kind in ("weight", "bias")
    ]
    key_map = KeyMap.parse(keys, {}, {})
    assert len(names) == 2000
    assert len(key_map.rules) == 60
    times = []
    for _ in range(5):
        start = time.process_time()
        key_map.links(names)
        times.append(time.process_time() - start)
    assert min(times) < 0.1
