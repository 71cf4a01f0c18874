"""The collection of cycles is held off while a load runs, and is afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from slipcast.engine.without_collection import without_collection


def test_it_is_off_until_the_last_of_several_is_done() -> None:
    assert gc.isenabled()
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_puts_it_back_too() -> None:
    with pytest.raises(ValueError, match="no"), without_collection():
        raise ValueError("no")
    assert gc.isenabled()


def test_who_had_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
