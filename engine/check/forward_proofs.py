"""Proofs on a small model that runs: in float32 as the class does, and in fp8 within the bound that the file states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from slipcast.engine.check.proof import Outcome, proved, skipped
from slipcast.engine.check.small_model import (
    SmallFiles,
    output_dtypes,
    random_values,
    reference_model,
    run,
    write_files,
)
from slipcast.engine.check.subject import Subject
from slipcast.engine.check.value_proofs import differing, no_small_model, refuted_by
from slipcast.engine.compute_dtype import compute_dtype
from slipcast.engine.fp8_compute import Float8ComputeLinear
from slipcast.engine.loader import execute
from slipcast.engine.planner import make_plan
from slipcast.registry.errors import SlipcastError
from slipcast.registry.frozen import FrozenMapping
from slipcast.registry.precision import Fp8, Support
from slipcast.registry.settings import resolve_settings

Mode = Literal["storage", "compute"]

_EQUAL = 1e-5
"""Relative L2 within which two runs of the same values agree; threads may add in another order."""


def prove_forward(subject: Subject) -> Outcome:
    """A small model runs as the class does, and in fp8 within the bound that the file states."""
    tiny = subject.family.tiny
    if subject.tiny is None or tiny is None:
        return no_small_model(subject)
    if tiny.not_alone:
        return skipped(f"the class does not run by itself: {tiny.not_alone}")
    values = random_values(subject.tiny)
    try:
        files = write_files(subject.family, values, subject.scratch / "forward")
        plain = _load(subject, files, "off")
        expected = run(reference_model(files.match, values), tiny.inputs)
    except SlipcastError as problem:
        raise refuted_by(subject, "the small model", problem, ("tiny",)) from problem
    error = relative_error(run(plain, tiny.inputs), expected)
    if differing(dict(plain.state_dict()), {**plain.state_dict(), **values}) or error > _EQUAL:
        raise subject.refuted(
            f"the loaded small model is not the one that was written: its outputs differ by {error:.2g}",
            expected="the same model",
            hint="see the proof 'values'; a tensor that no file holds may be made otherwise",
            where=("tiny",),
        )
    fp8 = subject.family.precision.fp8
    if not fp8.storage.supported:
        return proved(f"runs as the class does; fp8 is not tried: {fp8.storage.reason}")
    modes: list[Mode] = ["storage", "compute"] if fp8.compute.supported else ["storage"]
    errors = [f"{mode} {_fp8_error(subject, files, expected, mode):.3f}" for mode in modes]
    _prove_dtypes(subject, files)
    return proved(f"fp8 differs from float32 by {', '.join(errors)}, within {tiny.fp8_error:g}")


def _fp8_error(subject: Subject, files: SmallFiles, expected: torch.Tensor, mode: Mode) -> float:
    """How far the outputs in fp8 are from those in float32, if they are within the bound; on a CPU fp8 is emulated."""
    tiny = subject.family.tiny
    assert tiny is not None
    where = ("precision", "fp8", mode)
    try:
        model = _load(subject, files, mode)
        error = relative_error(run(model, tiny.inputs), expected)
    except SlipcastError as problem:
        raise subject.refuted(
            f"the small model in fp8 {mode}: {problem.found}",
            expected="a forward that runs as in float32",
            hint="keep the modules that it fails in (precision.keep); some forwards look at a weight's dtype",
            where=where,
            items=problem.items,
        ) from problem
    if not any(tensor.dtype == torch.float8_e4m3fn for tensor in model.parameters()):
        raise subject.refuted(
            "no weight of the small model is stored in fp8",
            expected=f"fp8 {mode}, which the file says is supported",
            hint="correct precision.keep, or say why it is not_applicable",
            where=where,
        )
    if mode == "compute" and not any(isinstance(layer, Float8ComputeLinear) for layer in model.modules()):
        raise subject.refuted(
            "no layer of the small model multiplies in float8",
            expected="fp8 compute, which the file says is supported",
            hint="give tiny sizes that are multiples of 16, or say why compute is not_applicable",
            where=where,
        )
    if error > tiny.fp8_error:
        raise subject.refuted(
            f"outputs in fp8 {mode} differ by {error:.3f} from float32, the file states {tiny.fp8_error:g}",
            expected="a relative L2 distance within the bound",
            hint="keep the modules that can't bear it (precision.keep), or correct the bound if it is too strict",
            where=("tiny", "fp8_error"),
        )
    return error


def float8_error(subject: Subject, mode: Mode) -> float | None:
    """How far the small model's outputs in fp8 are from those in float32; None where it does not run in it."""
    tiny, folder = subject.family.tiny, subject.scratch / f"float8-{mode}"
    assert tiny is not None
    assert subject.tiny is not None
    supported = Support.model_validate("supported")
    precision = subject.family.precision.model_copy(update={"fp8": Fp8(storage=supported, compute=supported)})
    family = subject.family.model_copy(update={"precision": precision})
    try:
        files = write_files(family, random_values(subject.tiny), folder)
        expected = run(_load(subject, files, "off"), tiny.inputs)
        return relative_error(run(_load(subject, files, mode), tiny.inputs), expected)
    except SlipcastError:
        return None


def _prove_dtypes(subject: Subject, files: SmallFiles) -> None:
    """Stored in fp8 and computed in bfloat16 a model says so, and gives what the plain model gives."""
    tiny = subject.family.tiny
    assert tiny is not None
    stored = _load(subject, files, "storage", dtype="bfloat16")
    said = {"model.dtype": getattr(stored, "dtype", None), "compute_dtype": compute_dtype(stored)}
    given = output_dtypes(stored, tiny.inputs)
    wanted = output_dtypes(_load(subject, files, "off", dtype="bfloat16"), tiny.inputs)
    wrong = [f"{name} is {dtype}" for name, dtype in said.items() if dtype != torch.bfloat16]
    wrong += [f"the outputs are {given}, without fp8 {wanted}"] * (given != wanted)
    if wrong:
        raise subject.refuted(
            f"the small model stored in fp8 and computed in bfloat16: {wrong[0]}",
            expected="the dtypes of the model that is stored in bfloat16",
            hint="keep the modules whose weight's dtype the forward looks at (precision.keep)",
            where=("precision", "keep"),
            items=wrong[1:],
        )


def prove_keep(subject: Subject) -> Outcome:
    """The forward runs without what keep holds back for precision, and fails without each of what it needs."""
    tiny, precision = subject.family.tiny, subject.family.precision
    if subject.tiny is None or tiny is None:
        return no_small_model(subject)
    if tiny.not_alone:
        return skipped(f"the class does not run by itself: {tiny.not_alone}")
    if not precision.fp8.storage.supported:
        return proved(f"fp8 is not tried: {precision.fp8.storage.reason}")
    kept = [place for places in precision.keep.values() for place in places]
    needed = precision.forward_needs
    files = write_files(subject.family, random_values(subject.tiny), subject.scratch / "keep")
    failure = _failure(subject, files, needed)
    if failure is not None:
        without = {place: _failure(subject, files, [other for other in kept if other != place]) for place in kept}
        found = [place for place, problem in without.items() if problem is not None]
        raise subject.refuted(
            f"the small model in fp8 storage, with nothing kept but forward_needs: {failure}",
            expected="modules of keep without which the forward fails, in precision.forward_needs",
            hint=f"name the modules whose weight's dtype it reads; it fails without {', '.join(found) or 'none'}",
            where=("precision", "forward_needs"),
            items=[f"without {place}: {without[place]}" for place in found],
        )
    for place in needed:
        if _failure(subject, files, [other for other in needed if other != place]) is None:
            raise subject.refuted(
                f"the forward runs in fp8 storage without {place!r}",
                expected="in precision.forward_needs modules without which it fails",
                hint="remove it there; in precision.keep it may stay",
                where=("precision", "forward_needs", needed.index(place)),
            )
    return proved(f"the forward runs with {', '.join(needed)} kept alone" if needed else "the forward needs none of it")


def _failure(subject: Subject, files: SmallFiles, kept: Sequence[str]) -> str | None:
    """What goes wrong in fp8 storage where only these modules are kept; None where nothing does."""
    family, tiny = subject.family, subject.family.tiny
    assert tiny is not None
    precision = family.precision.model_copy(update={"keep": FrozenMapping({"other": tuple(kept)} if kept else {})})
    bare = replace(files, match=replace(files.match, family=family.model_copy(update={"precision": precision})))
    try:
        run(_load(subject, bare, "storage"), tiny.inputs)
    except SlipcastError as problem:
        return problem.found
    return None


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance, in float64; infinite where the numbers of elements differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _load(subject: Subject, files: SmallFiles, fp8: str, *, dtype: str = "float32") -> nn.Module:
    """Load the native file through a plan, whatever the user's settings are."""
    call = {"device": "cpu", "dtype": dtype, "fp8": {"mode": fp8, "least_features": 0}}
    nowhere = subject.scratch
    settings = resolve_settings(call, environ={}, cwd=nowhere, user_folder=nowhere).values
    return execute(make_plan(files.match, settings), files.match.header)[0]
