"""A plan that was saved is executed only on the file, and under the family file, that it was made for.

Imports no torch, so that a plan that can't be executed is refused at once where its request shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pydantic import ValidationError

from slipcast.engine.idle_settings import without_idle_notes
from slipcast.engine.plan import Plan, Request
from slipcast.registry.errors import PlanMismatchError
from slipcast.registry.settings import Settings

_DECIDED = frozenset(
    {
        "family",
        "component",
        "device",
        "dtype",
        "fp8",
        "compile",
        "mmap",
        "reader",
        "unexpected",
        "chunk_mib",
        "threads",
        "ahead_mib",
        "device_reserve_mib",
    }
)
_AGAIN = "make the plan again: slipcast plan PATH --json > plan.json"


def settings_of(plan: Plan, settings: Settings, given: Iterable[str] = ()) -> Settings:
    """The settings with those that the plan was made with.

    Args:
        plan: a saved plan.
        settings: those of the load.
        given: names of settings that the caller gave beside the plan.

    Raises:
        PlanMismatchError: the plan's own are impossible, or it has decided one that is given beside it.
    """
    decided = sorted({name.partition(".")[0] for name in given} & _DECIDED)
    if decided:
        raise _misfit(f"the setting {name} is given beside a plan, which has decided it" for name in decided)
    request = plan.request
    try:
        return _with_request(request, settings)
    except ValidationError as error:
        raise PlanMismatchError(
            f"a plan whose request has {error.error_count()} impossible values",
            expected="a plan as 'slipcast plan PATH --json' prints it",
            hint=_AGAIN,
            items=[".".join(map(str, problem["loc"])) + ": " + problem["msg"] for problem in error.errors()],
        ) from error


def _with_request(request: Request, settings: Settings) -> Settings:
    return Settings.model_validate(
        {
            **settings.model_dump(),
            "family": request.family,
            "component": request.component,
            "device": request.device,
            "dtype": request.dtype,
            "fp8": {
                "mode": request.fp8_mode,
                "weights": request.fp8_weights,
                "remainder": request.fp8_remainder,
                "hints": request.fp8_hints,
                "least_features": request.fp8_least_features,
            },
            "compile": request.compile,
            "mmap": request.mmap,
            "reader": request.reader,
            "unexpected": request.unexpected,
            "chunk_mib": request.chunk_mib,
            "threads": request.threads,
            "ahead_mib": request.ahead_mib,
            "device_reserve_mib": request.device_reserve_mib,
        }
    )


def refuse_unknown_family(plan: Plan, known: Collection[str]) -> None:
    """Refuse a plan for a family whose file is not there: folders are named by the settings alone, not by a plan.

    Raises:
        PlanMismatchError: no family of that id is known.
    """
    if plan.origin.family not in known:
        raise PlanMismatchError(
            f"a plan for the family {plan.origin.family}, which is not known here",
            expected="the family file that the plan was made with",
            hint="add the folder of its file to the setting families",
        )


def check_saved_plan(plan: Plan, again: Plan) -> None:
    """Hold a saved plan against the one that its own request makes now.

    Args:
        plan: the saved plan.
        again: the plan that the same settings make for the file as it is now.

    Raises:
        PlanMismatchError: it says what differs.
    """
    plan = plan.model_copy(update={"notes": without_idle_notes(plan.notes)})
    problems: list[str] = []
    if plan.origin.header_digest != again.origin.header_digest:
        problems.append("the file's names, dtypes, shapes or byte ranges are not those that the plan was made for")
    if (plan.origin.family, plan.origin.family_digest) != (again.origin.family, again.origin.family_digest):
        problems.append(f"the family file {plan.origin.family} is not the one that the plan was made with")
    if not problems and plan != again:
        fields = [name for name in Plan.model_fields if getattr(plan, name) != getattr(again, name)]
        problems.append(f"the same settings decide otherwise here and now: {', '.join(fields)} differ")
    if problems:
        raise _misfit(problems)


def _misfit(problems: Iterable[str]) -> PlanMismatchError:
    return PlanMismatchError(
        "a plan that does not fit this load",
        expected="a plan made by this version, on such a machine, for this very file and family file",
        hint=_AGAIN,
        items=problems,
    )
