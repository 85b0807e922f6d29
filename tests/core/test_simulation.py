"""Whole runs in virtual time, from calm to terrible: everybody always gets to the end, and the books always balance."""

from dataclasses import replace

import pytest
from tests.core.virtual_world import Weather, World

from diloco.core.adopt import KeepDisplacement
from diloco.core.method import Method
from diloco.core.outer import Nesterov
from diloco.core.presets import AsyncDiLoCo, DecoupledDiLoCo, StreamingDiLoCo
from diloco.core.rounds import AllLive, Called, Pushed

WEATHERS = {
    "kills": Weather(kills=0.02),
    "links": Weather(blips=0.03, download_s=(0.2, 4.0)),
    "crashes": Weather(syncer_crashes=0.03),
    "terrible": Weather(kills=0.02, blips=0.03, syncer_crashes=0.02, download_s=(0.2, 4.0), outliers=0.1),
}

# H, P, τ: DiLoCo, streaming, several fragments in flight (τ > H/P), the answer a whole interval late (τ = H), every step
SHAPES = [
    (10, 1, 0), (12, 3, 1), (12, 4, 5), (12, 4, 11), (10, 1, 10), (12, 3, 12), (1, 1, 0), (1, 1, 1), (5, 5, 0), (3, 5, 1),
]  # fmt: skip


def method(sync_every: int, overlap: int, mix: float = 0.0, *, at_least: int = 1, wait: bool = True) -> Method:
    streaming = StreamingDiLoCo(
        sync_every=sync_every, overlap=overlap, mix=mix, codec="fp32", quorum=AllLive(at_least=at_least)
    )
    return replace(streaming, wait=wait)


@pytest.mark.parametrize("mix", [0.0, 0.5])
@pytest.mark.parametrize(("sync_every", "num_fragments", "overlap"), SHAPES)
def test_in_calm_weather_everybody_is_in_every_merge(
    sync_every: int, num_fragments: int, overlap: int, mix: float
) -> None:
    """Learners of unequal speed that wait for each other from the start: each round has all of them, nothing is refused,
    and every learner's books are those that the syncer keeps for it."""
    world = World(method(sync_every, overlap, mix, at_least=4), num_fragments=num_fragments, learners=4, steps=61)
    world.run()
    assert all(len(merge.contributions) == 4 for merge in world.merges)
    assert len(world.merges) >= num_fragments * (61 // sync_every - 1)
    assert not world.rejected
    assert not world.evictions
    world.check_agreement()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("sync_every", "num_fragments", "overlap"), SHAPES)
@pytest.mark.parametrize("weather", WEATHERS)
def test_everybody_arrives(weather: str, sync_every: int, num_fragments: int, overlap: int, seed: int) -> None:
    steps = 80 if sync_every < 10 else 160
    world = World(
        method(sync_every, overlap, mix=0.5 * seed), num_fragments=num_fragments, learners=4, steps=steps, seed=seed,
        weather=WEATHERS[weather], starts_s=(0.0, 0.0, 3.0, 11.0),
    )  # fmt: skip
    world.run()
    assert world.merges


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sync_every", "num_fragments"), [(10, 1), (12, 4)])
@pytest.mark.parametrize("weather", WEATHERS)
def test_everybody_arrives_where_contributions_are_dropped(
    weather: str, sync_every: int, num_fragments: int, seed: int
) -> None:
    dropping = replace(method(sync_every, 0), quorum=AllLive(drop=(0.2, 0.5, 0.8)[seed], drop_seed=seed))
    world = World(dropping, num_fragments=num_fragments, learners=4, steps=160, seed=seed, weather=WEATHERS[weather])
    world.run()
    assert world.merges
    assert world.rejected["dropped"] > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("sync_every", "num_fragments", "overlap"), [(10, 1, 0), (12, 4, 5), (12, 3, 12)])
def test_learners_that_never_wait_arrive_as_fast_as_they_can(
    sync_every: int, num_fragments: int, overlap: int, seed: int
) -> None:
    """With `wait=False` nobody's links, kills or speed slow anybody else down."""
    world = World(
        method(sync_every, overlap, mix=0.5 * seed, wait=False), num_fragments=num_fragments, learners=3, steps=200,
        seed=seed, weather=Weather(blips=0.03, syncer_crashes=0.02, download_s=(0.5, 8.0)),
    )  # fmt: skip
    world.run()
    slowest = max(node.speed_s for node in world.nodes.values())
    rejoining_s = 10.0 * world.evictions + 20.0
    assert world.now < 200 * 1.3 * slowest + rejoining_s
    assert world.merges


OPEN = {
    "grace": DecoupledDiLoCo(sync_every=12, overlap=5),
    "grace, kept": replace(DecoupledDiLoCo(sync_every=12, overlap=5), adopt=KeepDisplacement()),
    "K = 1": DecoupledDiLoCo(sync_every=12, quorum=Called(grace=0.0)),
    "K = M": DecoupledDiLoCo(sync_every=12, quorum=Called(at_least=4, grace=0.0), weight="uniform"),
    "late is dropped": DecoupledDiLoCo(sync_every=12, quorum=Called(grace=0.0, late="drop")),
    "pushed": AsyncDiLoCo(learners=4, sync_every=12),
    "pushed, two": AsyncDiLoCo(sync_every=12, dynamic_steps=False, quorum=Pushed(at_least=2), outer=Nesterov()),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_fragments", [1, 4])
@pytest.mark.parametrize("weather", ["calm", *WEATHERS])
@pytest.mark.parametrize("name", OPEN)
def test_where_nobody_blocks_everybody_arrives_as_fast_as_they_can(
    name: str, weather: str, num_fragments: int, seed: int
) -> None:
    """Called and pushed rounds in any weather: no learner waits for anything, merges go on, and the books balance."""
    world = World(
        OPEN[name], num_fragments=num_fragments, learners=4, steps=160, seed=seed, weather=WEATHERS.get(weather, Weather()),
        starts_s=(0.0, 0.0, 3.0, 11.0),
    )  # fmt: skip
    world.run()
    assert world.merges
    assert not any(node.waiting for node in world.nodes.values())
    if weather == "calm":
        assert set(world.rejected) <= {"late"}
        slowest = max(node.speed_s for node in world.nodes.values())
        assert world.now < 11.0 + Weather().model_s[1] + 160 * 1.3 * slowest + 5.0
        if "late" not in name:
            world.check_agreement()


def test_survivors_wait_for_the_dead_only_until_their_deadline() -> None:
    """A calm run in which one of three learners is killed for good costs the others its deadline, once."""
    whole = World(method(10, 0), num_fragments=1, learners=3, steps=100)
    whole.run()
    mourning = World(method(10, 0), num_fragments=1, learners=3, steps=100)
    victim = mourning.nodes["learner-2"]

    def die() -> None:
        mourning.hang_up(victim)
        victim.life, victim.done = victim.life + 1, True

    mourning.at(5.0, die)
    mourning.run()
    assert mourning.evictions == 1
    assert mourning.now < whole.now + 2 * 6.0
    last = mourning.merges[-1]
    assert [c.learner for c in last.contributions] == ["learner-0", "learner-1"]


def test_a_run_is_reproducible() -> None:
    def ended() -> tuple[float, int, dict[str, int]]:
        world = World(method(12, 5), num_fragments=4, learners=4, steps=60, seed=3, weather=WEATHERS["terrible"])
        world.run()
        return world.now, len(world.merges), world.rejected

    assert ended() == ended()
