"""A plan that was saved is executed only on the file, and under the family file, that it was made for."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from slipcast.engine.devices import Device
from slipcast.engine.plan import Plan, Request
from slipcast.registry.errors import DeviceError, PlanMismatchError
from slipcast.registry.settings import Settings


def settings_of(plan: Plan, settings: Settings) -> Settings:
    """The settings with those that the plan was made with."""
    request = plan.request
    try:
        return _with_request(request, settings)
    except ValidationError as error:
        raise PlanMismatchError(
            f"a plan whose request has {error.error_count()} impossible values",
            expected="a plan as 'slipcast plan PATH --json' prints it",
            hint="make the plan again: slipcast plan PATH --json > plan.json",
            items=[".".join(map(str, problem["loc"])) + ": " + problem["msg"] for problem in error.errors()],
        ) from error


def _with_request(request: Request, settings: Settings) -> Settings:
    return Settings.model_validate(
        {
            **settings.model_dump(),
            "device": request.device,
            "dtype": request.dtype,
            "fp8": {"mode": request.fp8_mode, "remainder": request.fp8_remainder, "hints": request.fp8_hints},
            "mmap": request.mmap,
            "unexpected": request.unexpected,
            "chunk_mib": request.chunk_mib,
            "threads": request.threads,
            "device_reserve_mib": request.device_reserve_mib,
        }
    )


def check_saved_plan(plan: Plan, again: Plan, given: Collection[str]) -> None:
    """Hold a saved plan against the one that its own request makes now.

    Args:
        plan: the saved plan.
        again: the plan that the same settings make for the file as it is now.
        given: names of settings that the caller gave beside the plan.

    Raises:
        PlanMismatchError: it says what differs.
    """
    problems = [
        f"the setting {name} is given beside a plan, which has decided it" for name in sorted(given) if name in _DECIDED
    ]
    if plan.origin.header_digest != again.origin.header_digest:
        problems.append("the file's names, dtypes, shapes or byte ranges are not those that the plan was made for")
    if (plan.origin.family, plan.origin.family_digest) != (again.origin.family, again.origin.family_digest):
        problems.append(f"the family file {plan.origin.family} is not the one that the plan was made with")
    if not problems and plan != again:
        fields = [name for name in Plan.model_fields if getattr(plan, name) != getattr(again, name)]
        problems.append(f"the same settings decide otherwise here and now: {', '.join(fields)} differ")
    if problems:
        raise PlanMismatchError(
            "a plan that does not fit this load",
            expected="a plan made by this version, on such a machine, for this very file and family file",
            hint="make the plan again: slipcast plan PATH --json > plan.json",
            items=problems,
        )


_DECIDED = frozenset({"device", "dtype", "fp8", "mmap", "unexpected", "chunk_mib", "threads", "device_reserve_mib"})


def refuse_absent_device(device: Device) -> None:
    """Refuse to load to a card that is not there.

    Raises:
        DeviceError: the device was only described.
    """
    if not device.present:
        raise DeviceError(
            f"a load to {device.label}, which is not there",
            expected="a device of this machine",
            hint="plans can be made for described devices, loads can't; give device=cpu or device=cuda:0",
        )
