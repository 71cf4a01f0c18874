"""The tables of families hold: every recorded header is somebody's, and predicted sizes are what others measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from slipcast.cli.docs_families import identified, predicted_without_scales
from slipcast.engine.check.records import Records, recorded_headers
from slipcast.registry.errors import IdentificationError
from slipcast.registry.strangers import kind_of_stranger
from support.recorded import recorded_names

MEASURED = json.loads((Path(__file__).parent / "data" / "measured_sizes.json").read_text())["sizes"]
REFUSED = {"wan2.1-fun-v1.1-14b-control--native": "Wan Fun Control"}
"""Of a known family, but of a kind that no class of diffusers builds."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = recorded_headers()
    assert folder is not None
    return Records(folder, tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("name", recorded_names())
def test_every_recorded_header_is_somebodys(records: Records, name: str) -> None:
    if "lora" not in name and "ip-adapter" not in name and name not in REFUSED:
        assert identified(records, name)
        return
    with pytest.raises(IdentificationError) as caught:
        identified(records, name)
    if name in REFUSED:
        assert f"it looks like {REFUSED[name]}, which the class of" in caught.value.found
    else:
        assert "adapter" in kind_of_stranger(records.bundles(name).weights)
        assert "adapter" in caught.value.found


@pytest.mark.parametrize("size", MEASURED, ids=[size["header"] for size in MEASURED])
def test_with_the_same_layers_kept_as_much_is_predicted_as_others_measured(
    records: Records, size: dict[str, Any]
) -> None:
    predicted = predicted_without_scales(records, size["header"], size["keep"]) / 2**20
    assert abs(predicted / size["mib"] - 1) < 0.01


def test_a_denoisers_family_file_is_short() -> None:
    """Whoever adds a family reads one first, and then writes one."""
    files = list((Path(__file__).parents[1] / "families").glob("*.yaml"))
    assert len(files) > 30
    assert median(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 90
