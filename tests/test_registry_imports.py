"""The registry answers before torch, diffusers, transformers or numpy could even be imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import slipcast.registry
names = [module.name for module in pkgutil.walk_packages(slipcast.registry.__path__, "slipcast.registry.")]
for name in names:
    importlib.import_module(name)
print(len(names))
print(*sorted({"torch", "diffusers", "transformers", "numpy", "safetensors"} & sys.modules.keys()))
"""


def test_no_module_of_the_registry_imports_heavy_libraries():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    count, heavy = result.stdout.split("\n")[:2]
    assert int(count) >= 10
    assert heavy == ""
