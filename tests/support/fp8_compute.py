"""fp8 compute in models that are too narrow for it to pay, and which of their layers it came about in."""

from __future__ import annotations

from typing import Any

from slipcast.engine.plan import Plan


def fp8_of(mode: str, **others: str) -> dict[str, Any]:
    """The setting fp8 in this mode, for layers of any width."""
    return {"mode": mode, "least_features": 0, **others}


def multiplying(plan: Plan) -> set[str]:
    """Paths of the layers that multiply in float8."""
    return {module.path for module in plan.modules if module.products == "fp8"}
