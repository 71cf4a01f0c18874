"""The parameter of a quantised layer: codes that can be kept, moved and copied, but not taken for a weight's values.

What reads ``layer.weight`` in order to compute with it, as adapters do to merge into it and attention does to fuse its
projections, would take the codes for numbers, with an obscure error of torch or with nonsense for a result. So
operations that combine the codes with other tensors are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from slipcast.registry.errors import QuantisationError

_COMPARISONS = frozenset(
    {"__eq__", "eq", "ne", "equal", "is_set_to", "is_same_size", "result_type", "_has_compatible_shallow_copy_type"}
)
_CHOICES = frozenset({"__getitem__", "index_select"})
_REPLACEMENTS = frozenset({"__set__", "__setitem__", "copy_", "module_load"})
"""Allowed between codes of one dtype. Values would be cast without a scale."""

_OWN = "slipcast"
"""Namespace of the operators that read codes together with their scales."""


class GuardedTensor(Tensor):
    """A tensor of codes that refuses to be combined with others."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what would compute with the codes; let everything else pass.

        What comes of it is guarded too, but what is detached from the parameter itself, as state dicts and forwards do.
        """
        name = func.__name__
        if getattr(func, "namespace", None) == _OWN:  # compiled code hands them the parameter itself
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name not in _COMPARISONS and name not in _CHOICES:
            _refuse_combination(name, [*args, *(kwargs or {}).values()])
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is not Tensor or name in _COMPARISONS or (name == "detach" and isinstance(args[0], Codes)):
            return result
        return result.as_subclass(GuardedTensor)


class Codes(GuardedTensor, nn.Parameter):
    """A parameter that holds codes. Shares the memory of the tensor that it is made of, and takes no gradient."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Self:  # noqa: ARG004 - the call of nn.Parameter
        """Make a parameter of a tensor of codes."""
        return Tensor._make_subclass(cls, data.detach(), False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.detach().clone())
        return memo[id(self)]


def _refuse_combination(name: str, arguments: list[Any]) -> None:
    tensors: list[Tensor] = []
    for argument in arguments:
        members = argument if isinstance(argument, list | tuple) else (argument,)
        tensors += [member for member in members if isinstance(member, Tensor)]
    if len(tensors) < 2 or (name in _REPLACEMENTS and tensors[0].dtype == tensors[1].dtype):
        return
    raise QuantisationError(
        f"the operation {name.strip('_')} on the codes of a quantised weight, as if they were its values",
        expected="codes that stay as they are: adapters of quantised layers work beside them, never merged into them, "
        "and the projections of quantised layers are not fused",
        hint="leave out merging and fusing; or load the model with fp8=off, which gives weights to merge into; what "
        "needs the values of one weight takes the layer's dequantised_weight()",
    )
