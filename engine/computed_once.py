"""Lets a compiler compute once what a graph asks for several times, as where three layers quantise the same input.

torch's compiler joins such computations into one kernel, which then writes the same codes once for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


class ComputedOnce(CustomGraphPass):
    """A pass over a graph of operators without side effects, for ``post_grad_custom_pre_pass`` of torch's compiler."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace each operator that has been called before with the same arguments, in place."""
        called: dict[tuple[Any, str, str], torch.fx.Node] = {}
        returned = _returned(graph)
        for node in list(graph.nodes):
            if node in returned or not _is_pure(node):  # of two results a caller may write to one
                continue
            first = called.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """What tells this pass from an older one in the compiler's cache."""
        return get_hash_for_files((__file__,))


def _returned(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The results of a graph, and what they may be views of."""
    found: set[torch.fx.Node] = set()
    rest = list(graph.output_node().all_input_nodes)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += node.all_input_nodes if _may_be_view(node) else ()
    return found


def _may_be_view(node: torch.fx.Node) -> bool:
    """Whether a result may share memory with an argument: an operator's schema says so, of anything else nothing."""
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or any(
        value.alias_info is not None for value in target._schema.returns
    )


def _is_pure(node: torch.fx.Node) -> bool:
    """Whether equal arguments give an equal result and nothing else happens."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target.name().startswith("aten::empty")
    )
