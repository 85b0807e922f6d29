"""Whole runs in virtual time, from calm to terrible: everybody always gets to the end, and the books always balance."""

from dataclasses import replace

import pytest

from diloco.core.method import DiLoCo, Method, StreamingDiLoCo
from diloco.core.quorum import AllLive
from tests.core.virtual_world import Weather, World

CALM = Weather()
KILLS = Weather(kills=0.02)
LINKS = Weather(blips=0.03)
CRASHES = Weather(syncer_crashes=0.03)
TERRIBLE = Weather(kills=0.02, blips=0.03, syncer_crashes=0.02)

# H, P, τ: DiLoCo, streaming, several fragments in flight (τ > H/P), the answer a whole interval late (τ = H), every step
SHAPES = [(10, 1, 0), (12, 3, 1), (12, 4, 5), (12, 4, 11), (10, 1, 10), (12, 3, 12), (1, 1, 0), (1, 1, 1), (5, 5, 0)]


def method(sync_every: int, overlap: int, mix: float = 0.0, **changes: object) -> Method:
    return replace(StreamingDiLoCo(sync_every=sync_every, overlap=overlap, mix=mix, codec="fp32"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sync_every", "num_fragments", "overlap"), SHAPES)
@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_in_calm_weather_everybody_is_in_every_merge(
    sync_every: int, num_fragments: int, overlap: int, mix: float
) -> None:
    """Learners of unequal speed that wait for each other from the start: each round has all of them, nothing is refused."""
    world = World(
        method(sync_every, overlap, mix, quorum=AllLive(at_least=4)), num_fragments=num_fragments, learners=4, steps=61,
    )  # fmt: skip
    world.run()
    assert all(len(merge.contributions) == 4 for merge in world.merges)
    assert len(world.merges) >= num_fragments * (61 // sync_every - 1)
    assert not world.rejected
    assert not world.evictions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("sync_every", "num_fragments", "overlap"), SHAPES)
@pytest.mark.parametrize("weather", [KILLS, LINKS, CRASHES, TERRIBLE], ids=["kills", "links", "crashes", "terrible"])
def test_everybody_arrives(weather: Weather, sync_every: int, num_fragments: int, overlap: int, seed: int) -> None:
    mix = 0.5 if seed % 2 else 0.0
    world = World(
        method(sync_every, overlap, mix), num_fragments=num_fragments, learners=4, steps=300, seed=seed, weather=weather,
        starts_s=(0.0, 0.0, 3.0, 11.0),
    )  # fmt: skip
    world.run()
