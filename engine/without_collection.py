"""Keeps Python from looking for unreachable cycles while a load runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_running = 0
_was_on = False


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold off the collection of cycles.

    Planning and building make some hundred thousand objects that stay, after which Python looks through all objects of
    the process: with torch and diffusers imported that takes longer than the plan. Loads that run at the same time
    switch it off once, and on again after the last.
    """
    global _running, _was_on
    with _lock:
        if not _running:
            _was_on = gc.isenabled()
            gc.disable()
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running and _was_on:
                gc.enable()
