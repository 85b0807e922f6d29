"""Whole runs in virtual time: the trainer's bits, where the time goes, faults, recorded runs, and the command."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.figures import figures_in, key_of, traces_of

import diloco
from diloco.cli import main
from diloco.config import RunConfig, dump_config
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.event_log import EventLog, read_events
from diloco.events import Evicted, Finished, Initialised, Joined, Left, Merged, Published, RunStarted, Stepped, Waited
from diloco.exchange.base import Exchange
from diloco.exchange.virtual.delivery import Fault
from diloco.planning.network import Network, Route
from diloco.planning.recorded_run import read_recorded_run
from diloco.protocol.steering import Pool
from diloco.simulation.result import NO_LOSS, SimulationResult, pictures
from diloco.simulation.virtual_run import Scenario, scenario_of_recorded_run, simulate
from diloco.training.loop import Trainer
from diloco.training.spec import LearnerSpec

Tiny = Callable[..., RunConfig]
DILOCO = "method={preset='DiLoCo', sync_every=6}"
DECOUPLED = "method={preset='DecoupledDiLoCo', sync_every=6, overlap=2, fragments={type='ByLayer', layers=1}}"
LINK_BIT_PER_S = 1e6
TWENTY_STEPS = ("run.steps=20", "run.tokens=1_000_000", "schedule.steps=20")
"""Exactly: a budget of tokens ends when the news of it come."""


def lines(learners: int = 2, bit_per_s: float = LINK_BIT_PER_S) -> Network:
    """A line of its own for every learner."""
    names = {f"{way}-{i}": bit_per_s for i in range(learners) for way in ("up", "down")}
    return Network(names, [Route((f"up-{i}",), (f"down-{i}",), 0.05) for i in range(learners)])


def play(directory: Path, scene: Scenario, *configs: RunConfig) -> SimulationResult:
    return simulate({f"part-{index}": config for index, config in enumerate(configs)}, scene, directory)


def digests(directory: Path) -> list[tuple[int, int, str]]:
    events = read_events(directory / "syncer" / "events.jsonl")
    return sorted((e.fragment, e.version, e.digest) for e in events if isinstance(e, Published))


def test_a_synchronous_run_has_the_bits_of_the_same_run_at_once(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(
        "run.steps=20", "run.tokens=1_000_000", "schedule.steps=20"
    )  # budgets of tokens end when their news come

    def life(index: int, exchange: Exchange) -> torch.Tensor:
        def attach(model: Any, optimizer: Any, steps: int, tokens: int, _: Any) -> diloco.Learner:
            return diloco.Learner(model, optimizer, method=method_from_table(config.method), exchange=exchange)

        trainer = Trainer(config, LearnerSpec(f"part-{index}", shard=index), attach=attach)
        trainer.train()
        return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])

    at_once = diloco.run_local(life, learners=2)
    done = play(tmp_path / "a", Scenario(lambda index, _: 0.1 + 0.05 * index, lines()), config, config)
    again = play(tmp_path / "b", Scenario(), config, config)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) > 6
    assert done.loss == again.loss
    losses = [
        [e.loss for e in read_events(tmp_path / place / "part-0" / "events.jsonl") if isinstance(e, Stepped)]
        for place in ("a", "b", "run")
    ]
    assert losses[0] == losses[1] == losses[2]
    assert len(at_once) == 2


def test_learners_that_share_sequences_read_them_in_orders_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    def losses(place: str, *overrides: str) -> list[list[float]]:
        config = tiny(DILOCO, *TWENTY_STEPS, *overrides)
        play(tmp_path / place, Scenario(), config, config)
        logs = [read_events(tmp_path / place / f"part-{index}" / "events.jsonl") for index in range(2)]
        return [[e.loss for e in log if isinstance(e, Stepped)] for log in logs]

    apart, shared, again = losses("a"), *(losses(place, "data.shared_fraction=0.3") for place in "bc")
    assert shared == again
    assert shared[0] != shared[1]
    assert all(one != other for one, other in zip(apart, shared, strict=True))


def test_time_goes_into_steps_and_waiting(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(DILOCO, *TWENTY_STEPS)
    done = play(tmp_path / "run", Scenario(lambda index, _: [0.5, 0.25][index], lines()), config, config)
    slow, fast = done.times().values()
    assert slow.compute_s == 20 * 0.5
    assert fast.compute_s == 20 * 0.25
    assert fast.waiting_s > slow.waiting_s > 0  # the fast one waits for the slow one, both for the network
    [given] = [e for e in read_events(tmp_path / "run" / "syncer" / "events.jsonl") if isinstance(e, Initialised)]
    num_bytes = 4 * given.num_parameters
    transfer_s = 8 * num_bytes / LINK_BIT_PER_S + 0.05
    # Three rounds: up, a notice, a request, and down. At the start the slow one, which is the first, asks, uploads its
    # model, joins, fetches the model and the frozen tensors, and listens: ten latencies and two transfers.
    round_s, begin_s = 2 * transfer_s + 2 * 0.05, 2 * transfer_s + 10 * 0.05
    # At the end the slow one says that it has finished, after the answer to its heartbeat under way, and hears that the
    # run has ended: four latencies.
    settle_s = 4 * 0.05
    assert slow.waiting_s == pytest.approx(3 * round_s + settle_s, rel=1e-9)
    assert done.duration_s == pytest.approx(10 + 3 * round_s + begin_s + settle_s, rel=1e-9)
    steps = [e for e in read_events(tmp_path / "run" / "part-0" / "events.jsonl") if isinstance(e, Stepped)]
    assert steps[0].t == pytest.approx(begin_s + 0.5, abs=1e-6)
    assert steps[1].tokens_per_s == pytest.approx(128 / 0.5)


def test_the_warm_start_takes_its_time_and_the_others_wait_for_it(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(DILOCO, "warm_start.steps=4", "run.steps=16", "run.tokens=1_000_000", "schedule.steps=16")
    done = play(tmp_path / "run", Scenario(lambda *_: 0.5), config, config)
    told = read_events(tmp_path / "run" / "syncer" / "events.jsonl")
    [given] = [e for e in told if isinstance(e, Initialised)]
    assert isinstance(told[-1], Finished)
    assert (told[-1].tokens, told[-1].seconds) == (4_096, done.duration_s)
    assert (given.t, given.step, given.tokens) == (4 * 2 * 0.5, 4, 4 * 256)  # a step at the full batch is two of a half
    assert [each.compute_s for each in done.times().values()] == [4 * 1.0 + 12 * 0.5, 12 * 0.5]
    assert [each.waiting_s for each in done.times().values()] == [0.0, 0.0]


@pytest.mark.slow
def test_a_killed_learner_is_given_up_and_comes_back(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(DECOUPLED, "checkpoint.every_steps=2", "run.tokens=20_480", "schedule.steps=80")
    scene = Scenario(lambda *_: 1.0, lines(), [Fault(1, 10.5, 50.0)])
    done = play(tmp_path / "run", scene, config, config)
    events = read_events(tmp_path / "run" / "syncer" / "events.jsonl")
    [evicted] = [e for e in events if isinstance(e, Evicted)]
    assert evicted.t == 10.5 + 5.0  # of its own steps
    assert done.times()["part-1"].stopped_s == 39.5
    back = done.summaries["part-1"]
    assert back is not None
    assert back.metrics["incarnation"] == 2
    assert any(e.t > 50.0 and "part-1" in e.contributors for e in events if isinstance(e, Merged))
    assert isinstance(read_events(tmp_path / "run" / "part-1" / "events.jsonl")[-1], Finished)


def test_nobody_waits_for_ever_for_a_learner_that_was_killed_before_it_had_the_model(
    tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny(DILOCO, *TWENTY_STEPS)
    done = play(tmp_path / "run", Scenario(network=lines(), faults=[Fault(1, 0.01)]), config, config)
    assert done.summaries["part-1"] is None
    alone = done.summaries["part-0"]
    assert alone is not None
    assert alone.steps == 20


@pytest.mark.slow
def test_a_recorded_run_is_a_scene(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(DECOUPLED, "run.tokens=20_480", "schedule.steps=80")
    first = Scenario(lambda index, step: 1.0 + index + 0.5 * (step >= 10), None, [Fault(1, 20.0, 60.0)], [0.0, 3.0])
    played = play(tmp_path / "first", first, config, config)
    recorded = read_recorded_run(tmp_path / "first")
    assert [each.name for each in recorded] == ["part-0", "part-1"]
    assert [each.start_s for each in recorded] == [0.0, 3.0]
    [(gone_s, back_s)] = recorded[1].absences
    assert 17.0 <= gone_s <= 20.0  # its last sign of life
    assert back_s == 60.0
    assert (recorded[0].step_s(0), recorded[0].step_s(30), recorded[0].step_s(10**6)) == (1.0, 1.5, 1.5)
    replayed = play(tmp_path / "second", scenario_of_recorded_run(recorded, None), config, config)
    assert replayed.duration_s == pytest.approx(played.duration_s, abs=5.0)
    play(tmp_path / "third", scenario_of_recorded_run(recorded, lines(bit_per_s=2e4)), config, config)
    firsts = []
    for name in ("second", "third"):
        events = read_events(tmp_path / name / "syncer" / "events.jsonl")
        firsts.append(next(e.t for e in events if isinstance(e, Merged)))
    assert firsts[1] > firsts[0]


def test_a_recorded_warm_start_takes_as_long_again(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(DILOCO, "warm_start.steps=6", "run.tokens=6_144")
    first = Scenario(lambda *_: 0.5, warm_step_s=lambda step: 0.25 + step)
    played = play(tmp_path / "first", first, config, config)
    recorded = read_recorded_run(tmp_path / "first")
    # The first event comes after the first step, so that the first time is that of the second step.
    assert recorded[0].warm_step_times == tuple((1, 0.25 + step) for step in range(1, 6))
    assert recorded[1].warm_step_s(0) is None
    replayed = play(tmp_path / "second", scenario_of_recorded_run(recorded, None), config, config)
    assert replayed.duration_s == pytest.approx(
        played.duration_s + 5
    )  # 1 + 2 + 3 + 4 + 5 + 5 seconds more, not 0 + 1 + … + 5


def test_what_comes_between_the_warm_start_and_the_run_is_no_step(tmp_path: Path) -> None:
    def step(at_s: float, number: int) -> Stepped:
        return Stepped(t=at_s, step=number, loss=1.0, lr=0.1, tokens=number, tokens_per_s=1.0, gradient_norm=1.0)

    begun = RunStarted(
        t=1.0, run="r", learners=1, num_parameters=1, step=0, tokens=0, role="learner", shard=0, method={}
    )
    given = Initialised(t=9.0, learner="a", source="seed", layout_digest="d", num_parameters=1, step=20)
    told = {
        "a": [
            begun,
            step(2.0, 10),
            step(4.0, 20),
            step(15.0, 30),
            step(20.0, 40),
            Waited(t=20.0, step=40, seconds=2.0, times=1),
        ],
        "syncer": [given, Joined(t=10.0, learner="a", incarnation=1, step=20)],
    }
    for who, log in told.items():
        with EventLog(tmp_path / who / "events.jsonl", who) as file:
            for event in log:
                file.append(event)
    [recorded] = read_recorded_run(tmp_path)
    assert recorded.warm_step_times == ((10, 0.2),)
    assert recorded.step_times == ((10, 0.5), (10, 0.3))


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no events.jsonl of a learner"):
        read_recorded_run(tmp_path)


def test_what_cannot_be_simulated_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.learners = 2 and there are 1 learners to simulate"):
        play(tmp_path / "run", Scenario(), tiny())
    warm = tiny("warm_start.steps=4")
    with pytest.raises(
        ConfigError, match="part-0, which initialises the run, is killed before that and never restarted"
    ):
        play(tmp_path / "killed", Scenario(faults=[Fault(0, 1.0)]), warm, warm)
    parallel = tiny("method={preset='DataParallel'}")
    with pytest.raises(ConfigError, match="nothing to simulate"):
        play(tmp_path / "run", Scenario(), parallel, parallel)


SITE = """
[[site]]
name = "near"
step_time = "100 ms"
up = "1 Mbit/s"
down = "1 Mbit/s"
latency = "10 ms"

[[site]]
name = "far"
step_time = "120 ms"
jitter_percent = 10
up = "0.2 Mbit/s"
down = "1 Mbit/s"
latency = "150 ms"
"""


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


def test_the_command(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, site = tmp_path / "run.toml", tmp_path / "site.toml"
    run.write_text(dump_config(tiny("evaluate.every_steps=10")), encoding="utf-8")
    site.write_text(SITE, encoding="utf-8")
    assert call("simulate", str(run), "--site", str(site), "--json") == 0
    said = json.loads(capfd.readouterr().out)
    assert list(said["learners"]) == ["near", "far"]
    assert 0 < said["learners"]["near"]["utilisation"] < 1
    directory = tmp_path / "run-simulated"
    assert json.loads((directory / "simulation.json").read_text()) == said
    assert len(figures_in(directory / "simulation.html")) == 2
    assert call("report", str(directory), "--json") == 0
    reported = json.loads(capfd.readouterr().out)
    assert (reported["tokens"], list(reported["learners"])) == (said["tokens"], ["far", "near"])
    assert reported["duration_s"] > said["duration_s"]  # until the last goodbye has come to the syncer

    assert call("simulate", str(run), "--site", str(site)) == 2
    assert "give --replace" in capfd.readouterr().err
    assert call("simulate", str(run), "--recorded-run", str(directory), "--dir", str(tmp_path / "again")) == 0
    shown = capfd.readouterr().out
    assert "virtual time" in shown
    assert f"see {tmp_path / 'again' / 'simulation.html'}" in shown
    for occupied in (tmp_path, run):  # a real run, and a file
        (tmp_path / "syncer").mkdir(exist_ok=True)
        (tmp_path / "syncer" / "events.jsonl").write_text("", encoding="utf-8")
        assert call("simulate", str(run), "--dir", str(occupied), "--replace") == 2
        assert "is not a simulation" in capfd.readouterr().err
    assert run.exists()
    own = [f"--set=learner.{name}.train.threads=1" for name in ("east", "learner-0", "west")]
    assert call("simulate", str(run), *own, "--json", "--replace") == 0
    out, err = capfd.readouterr()
    assert list(json.loads(out)["learners"]) == ["learner-0", "east"]
    assert "without the settings of [learner.west], since the learners are learner-0, east" in err
    site.write_text(SITE + SITE.replace('"near"', '"nearer"').replace('"far"', '"farther"'), encoding="utf-8")
    assert call("simulate", str(run), "--site", str(site), "--replace") == 2
    assert "there are 4 learners to simulate" in capfd.readouterr().err
    assert (directory / "simulation.json").exists()  # what is refused removes nothing


# --- pictures


def test_the_loss_is_drawn_where_one_was_measured(tiny: Tiny, tmp_path: Path) -> None:
    at_its_end = play(tmp_path / "a", Scenario(), *[tiny(DILOCO, *TWENTY_STEPS)] * 2)
    assert [at_s for at_s, _ in at_its_end.losses] == [at_its_end.duration_s]
    assert len(at_its_end.training_losses) == 20
    [_, loss] = pictures(at_its_end)
    assert "evaluated once; evaluate.every_steps" in loss.text
    drawn = traces_of(loss.figure)
    assert sorted(key_of(loss.figure)) == ["global model, held-out data", "training, mean of learners"]
    for name, losses in (
        ("training, mean of learners", at_its_end.training_losses), ("global model, held-out data", at_its_end.losses)
    ):  # fmt: skip
        for index, way in enumerate("xy"):
            assert drawn[name][way] == pytest.approx([point[index] for point in losses], rel=1e-5)


def test_the_loss_goes_on_where_the_first_learner_does_not(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(DECOUPLED, "run.tokens=5_120", "evaluate.every_steps=4")
    done = play(tmp_path / "run", Scenario(lambda *_: 1.0, faults=[Fault(0, 6.5)]), config, config)
    assert [at_s for at_s, _ in done.losses if at_s > 6.5]
    assert done.losses == sorted(done.losses)
    assert done.losses[-1] == (done.duration_s, done.loss)
    [timeline, loss] = pictures(done)
    assert "evaluated" in loss.text
    assert {"killed", "gone"} <= set(key_of(timeline.figure))


def test_where_no_loss_was_measured_the_page_says_so(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, site = tmp_path / "run.toml", tmp_path / "site.toml"
    run.write_text(dump_config(tiny("train.log_every_steps=100")), encoding="utf-8")
    killed = "".join(f'\n[[fault]]\nlearner = "{name}"\nat = "5 s"\n' for name in ("near", "far"))
    site.write_text(SITE + killed, encoding="utf-8")
    assert call("simulate", str(run), "--site", str(site), "--json") == 0
    assert json.loads(capfd.readouterr().out)["duration_s"] == 5.0
    directory = tmp_path / "run-simulated"
    [timeline] = figures_in(directory / "simulation.html")
    assert "killed" in key_of(timeline)
    assert NO_LOSS in (directory / "simulation.html").read_text()


# --- pools


def num_live(directory: Path, at_s: float) -> int:
    """Learners that take part at this time."""
    said = [e for e in read_events(directory / "syncer" / "events.jsonl") if e.t <= at_s]
    return sum(isinstance(e, Joined) - isinstance(e, Left) for e in said)


@pytest.mark.parametrize(
    "schedule",
    ["ramp up", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ramp down", "doubling", "halving"))],
)
def test_learners_come_and_go_by_the_schedule_of_the_pool(schedule: str, tiny: Tiny, tmp_path: Path) -> None:
    steps = ("run.steps=48", "run.tokens=1_000_000", "schedule.steps=48")
    config = tiny(DILOCO, "run.learners=4", *steps, f"pool.schedule='{schedule}'")
    done = play(tmp_path / "played", Scenario(), *[config] * 4)
    pool = Pool.of(config.pool_values)
    assert pool is not None
    between_rounds = range(3, 48, 6)  # one that waits has asked again by then
    live = [num_live(tmp_path / "played", at_s) for at_s in between_rounds]
    assert live == [pool.size(step) for step in between_rounds]
    reasons = Counter(each.reason for each in done.summaries.values() if each is not None)
    num_drained = 4 - pool.size(48)
    assert reasons == Counter({"steps": 4 - num_drained, "drained": num_drained})
    ledgers = [each.metrics["ledger"][0] for each in done.summaries.values() if each is not None]
    for index, ledger in enumerate(ledgers):
        # who joins while a version is being stored begins from the one before, and has taken a step when it comes
        may_lose = config.learner_batch * config.data.sequence_length if index >= pool.size(0) else 0
        assert ledger["trained"] - ledger["merged"] == ledger["discarded"].get("overlap", 0) <= may_lose


def test_a_learner_that_comes_back_to_a_pool_that_has_shrunk_takes_no_part(tiny: Tiny, tmp_path: Path) -> None:
    steps = ("run.steps=48", "run.tokens=1_000_000", "schedule.steps=48")
    config = tiny(DILOCO, "run.learners=2", *steps, "pool.schedule='halving'")
    done = play(tmp_path / "played", Scenario(lambda *_: 1.0, faults=[Fault(1, 10.5, 40.0)]), config, config)
    first, second = done.summaries.values()
    assert first is not None
    assert (first.reason, first.steps, second) == ("steps", 48, None)


def test_a_pool_that_is_too_small_for_a_round_is_not_simulated(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(
        "method={preset='DiLoCo', sync_every=6, quorum={type='AllLive', at_least=2}}", "pool.schedule='ramp up'"
    )
    with pytest.raises(ConfigError, match="1 of 2 learners at times, and a round needs 2"):
        play(tmp_path / "played", Scenario(), config, config)
