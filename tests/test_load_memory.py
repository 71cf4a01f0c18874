"""Memory that a load takes, measured in a process of its own against what its plan predicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from safetensors.torch import save_file

from support.tiny_z_image import natively

MIB = 2**20
CONFIG = {
    "dim": 1024,
    "n_heads": 8,
    "n_kv_heads": 8,
    "n_layers": 4,
    "n_refiner_layers": 1,
    "cap_feat_dim": 2560,
    "in_channels": 16,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}
SCRIPT = """
import gc, json, sys, threading
import torch, diffusers
from diffusers import ZImageTransformer2DModel
import slipcast, slipcast.engine.loader, slipcast.engine.report

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def measured(path, settings):
    gc.collect()
    base, most, done = anonymous(), [0], threading.Event()
    def watch():
        while not done.wait(0.001):
            most[0] = max(most[0], anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    loaded = slipcast.load(path, device="cpu", **settings)
    done.set()
    thread.join()
    report = loaded.report
    assert report.differences == ()
    peak = max(most[0], anonymous()) - base
    return {"measured": peak, "reported": report.host_peak_anonymous, **report.plan.bytes.model_dump()}

path, small, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
slipcast.load(small, device="cpu", dtype="bfloat16", fp8="storage")
print(json.dumps([measured(path, each) for each in settings]))
"""
SETTINGS: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "fp8": "off"},
    {"dtype": "bfloat16", "fp8": "storage"},
    {"dtype": "bfloat16", "fp8": "storage", "threads": 3},
    {"dtype": "float32", "fp8": "off", "mmap": False},
]


def _measured(path: Path, settings: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Load in a process of its own, once for each of the settings."""
    demo = Path(__import__("slipcast").__path__[0]) / "demo" / "digits.safetensors"
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(demo), json.dumps(settings)],
        capture_output=True,
        text=True,
        check=True,
        cwd=path.parent,
        timeout=300,
    ).stdout
    measured: list[dict[str, int]] = json.loads(output.splitlines()[-1])
    return measured


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")
def test_a_load_takes_what_was_predicted(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = ZImageTransformer2DModel(**CONFIG)
    generator = torch.Generator().manual_seed(0)
    native = natively(
        {
            name: torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
            for name, tensor in model.state_dict().items()
        }
    )
    save_file(native, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size > 140 * MIB
    del native
    path = tmp_path / "m.safetensors"
    adopted, storage, copied = _measured(path, [SETTINGS[0], SETTINGS[1], SETTINGS[3]])
    (side_by_side,) = _measured(path, [SETTINGS[2]])  # by itself: it would take what an earlier load has let go
    for each in (adopted, storage, side_by_side, copied):
        assert each["measured"] <= each["host_peak_anonymous"] + 64 * MIB, each
        assert abs(each["reported"] - each["measured"]) <= 32 * MIB, each  # each sampled by a thread that may wait
    assert adopted["host_peak_anonymous"] == 0
    assert adopted["measured"] < 8 * MIB
    for each in (storage, side_by_side, copied):
        assert each["measured"] > 0.7 * each["host_peak_anonymous"], each
        assert each["host_peak_anonymous"] < each["resident"] + 48 * MIB, each
