"""Made-up devices and pipelines for the policies."""

from __future__ import annotations

from hypothesis import strategies as st

from slipcast.engine.devices import Device
from slipcast.engine.policy.memory import Part
from slipcast.engine.policy.snapshot import Snapshot, reserve_of
from slipcast.engine.policy.vae import VaeWay

GIB = 2**30
CARDS = (4, 6, 8, 12, 16, 24, 32, 48, 80, 141, 192)
"""Memory of cards in GiB."""


def snapshot(gib: float, *, free: float = 1.0, unified: bool = False, reserve_mib: int = 512) -> Snapshot:
    """A card of so many GiB, of which a share is free."""
    total = int(gib * GIB)
    card = Device("cuda:0", "cuda", total, (9, 0), True, True, f"a card of {gib} GiB", "cuda")
    return Snapshot(card, total, int(total * free), reserve_of(total, reserve_mib), unified)


def part_of(kind: str, role: str | None = None) -> st.SearchStrategy[Part]:
    """Any model of a kind: its blocks and tables are a part of its weights."""

    def made(rest: int, blocks: list[int], activations: int, tables: list[int]) -> Part:
        weights = rest + sum(blocks) + sum(tables)
        more = {"table_bytes": tuple(tables), "lookup_bytes": activations // 9}
        return Part(role or kind, kind, weights, tuple(blocks), activations, **more)  # type: ignore[arg-type]

    block = st.integers(1, GIB // 2)
    tables = st.lists(block, max_size=2) if kind == "text_encoder" else st.just([])
    return st.builds(made, st.integers(0, GIB), st.lists(block, max_size=40), st.integers(0, 4 * GIB), tables)


PARTS = st.tuples(
    part_of("denoiser"), part_of("text_encoder"), part_of("text_encoder", "text_encoder_2"), part_of("vae")
)
WAYS = st.lists(
    st.builds(VaeWay, tiling=st.booleans(), slicing=st.booleans(), activation_bytes=st.integers(0, 8 * GIB)), max_size=4
).map(lambda ways: tuple(sorted(ways, key=lambda way: -way.activation_bytes)))
SNAPSHOTS = st.builds(
    snapshot, st.sampled_from(CARDS), free=st.floats(0, 1), unified=st.booleans(), reserve_mib=st.sampled_from([0, 512])
)
