"""A mixture of eight experts over four islands that train, or hold, all of its experts, half of them, or a quarter each.
Writes the tables of studies/experts.md.

python -m studies.experts                      train what is missing in results/experts.json, then write the table
python -m studies.experts --data DIR           on the files *.txt of a directory, not the source of Python's library
python -m studies.experts --jobs 16            sixteen runs at a time, one thread each
python -m studies.experts --show               write the table of the finished runs, and train nothing
python -m studies.experts --pilot              outer settings, on another seed and the other half of the held-out text

A Mixtral of 0.44 million parameters on bytes, 85 % of them in experts, two of which a token uses. All runs begin with the
same warm start, on one model at the full batch, and take equally many tokens. The islands' batches of a step are those
of data parallel. Experts are in four groups; group g is trained or held by island g (a quarter), by g and the one before
(half), or by all. An island that holds a part routes among the experts that it holds; its "part" is what the assembled
model loses when it does so too. Dense models have the active parameters of a token, or all of the mixture's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import diloco
from diloco.config import DataTable, ModelTable
from diloco.core.fragments import Experts, Whole
from diloco.core.method import Method
from diloco.core.outer import SGD, Nesterov, Outer
from diloco.evaluation.exports import held_out_loss
from diloco.evaluation.scores import Score
from diloco.exchange.base import Exchange
from diloco.planning.exchange_plan import exchange_of
from diloco.planning.settings import ExpertSetting, setting_for
from diloco.planning.units import SIZE
from diloco.planning.workload import PRESETS, Workload
from diloco.protocol.units import numbers_of
from diloco.tables import number_ranges
from diloco.training.data.corpus import Corpus, load_corpus
from diloco.training.data.streams import Stream, held_out_batches
from diloco.training.expert_part import part_of, part_state
from diloco.training.model import build_model
from studies.pages import filled

PAGE = Path(__file__).parent / "experts.md"
RESULTS = Path(__file__).parent / "results" / "experts.json"
SEEDS, PILOT_SEED = (0, 1, 2, 3, 4), 100
ISLANDS, BATCH, SEQUENCE = 4, 8, 64  # BATCH: sequences in an inner step of one island
HELD_OUT_SEQUENCES = 768  # of each half
LR, FINAL_FRACTION, AUXILIARY = 4e-3, 0.05, 0.01
SYNC_EVERY, EXPERTS, GROUPS = 20, 8, 4
OUTER = Nesterov(lr=1.0, momentum=0.8)  # the best of the pilot where all experts are trained
MODEL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Length:
    """Of a run, in inner steps.

    Attributes:
        warm: of the warm start; the learning rate rises during the first quarter of it.
        steps: of all, warm start included.
    """

    warm: int = 320
    steps: int = 1600  # after the warm start a multiple of four times H


@dataclass(frozen=True)
class Arm:
    """One row.

    Attributes:
        trained: groups of experts that each island trains; None: data parallel, or experts that are not apart.
        every: k, the experts' H as a multiple of the trunk's.
        holds: whether an island holds only the experts that it trains.
        dealt: rounds after which each island's groups are the next ones, in turn; 0: they stay.
        dense: the width of the feed-forward layers of a model without experts; None: it has experts.
        seeds: that it is run with.
    """

    label: str
    method: Method | None = None
    trained: int | None = None
    every: int = 1
    holds: bool = False
    dealt: int = 0
    dense: int | None = None
    seeds: tuple[int, ...] = SEEDS

    def own_experts(self, island: int, turn: int = 0) -> str | None:
        """The experts that an island trains or holds, as `Learner` takes them; None: all."""
        if self.trained in (None, GROUPS):
            return None
        size = EXPERTS // GROUPS
        groups = sorted((island + turn + step) % GROUPS for step in range(self.trained or 0))
        return ",".join(f"{size * group}-{size * group + size - 1}" for group in groups)

    def part(self, island: int, turn: int = 0) -> tuple[int, ...] | None:
        """The experts of an island's model; None: all."""
        text = self.own_experts(island, turn) if self.holds else None
        return None if text is None else tuple(numbers_of(number_ranges("held", text)))

    def num_turns(self, length: Length) -> int:
        """How often an island's groups are dealt."""
        return (length.steps - length.warm) // (SYNC_EVERY * self.dealt) if self.dealt else 1

    def steps_of(self, turn: int, length: Length) -> range:
        """The inner steps of a deal."""
        num_steps = (length.steps - length.warm) // self.num_turns(length)
        return range(length.warm + turn * num_steps + 1, length.warm + (turn + 1) * num_steps + 1)


def _apart(words: str, trained: int, every: int, outer: Outer | None = None) -> Arm:
    fragments = Experts(groups=GROUPS, trunk=Whole(), every=every, outer=outer)
    label = f"{words}, experts' H {'as' if every == 1 else f'{every} times'} the trunk's"
    label += "" if outer is None else ", no outer momentum on experts"
    return Arm(label, diloco.DiLoCo(sync_every=SYNC_EVERY, outer=OUTER, fragments=fragments), trained, every)


ARMS = (
    Arm("data parallel"),
    Arm("all trained, one fragment", diloco.DiLoCo(sync_every=SYNC_EVERY, outer=OUTER)),
    *(
        _apart(words, trained, every)
        for words, trained in (("all trained", GROUPS), ("half trained", 2), ("a quarter trained", 1))
        for every in (1, 4)
    ),
    # A lone owner's outer gradient is no mean: outer momentum takes it further than it went.
    replace(_apart("a quarter trained", 1, 1, SGD(lr=1.0)), seeds=(0, 1, 2)),
)
BASE = next(arm for arm in ARMS if arm.trained == GROUPS)
"""What the others are compared with."""
HELD = (
    replace(_apart("half held", 2, 1), label="half held", holds=True),
    replace(_apart("a quarter held", 1, 1), label="a quarter held", holds=True, seeds=(0, 1)),
    replace(
        _apart("a quarter held", 1, 1),
        label="a quarter held, the next one every 8 rounds",
        holds=True,
        dealt=8,
        seeds=(0, 1),
    ),
    *(
        Arm(f"dense, {words}", diloco.DiLoCo(sync_every=SYNC_EVERY, outer=OUTER), dense=width, seeds=(0, 1))
        for words, width in (("the active parameters", 2 * 80), ("all parameters", EXPERTS * 80))
    ),
)
"""Rows of the table of islands that hold a part, beside some of the others."""


# --- one run ----------------------------------------------------------------------------------------------------------


@cache
def corpus(data: str | None) -> Corpus:
    """The bytes of a directory's text files, or of the source of Python's standard library."""
    if data is None:
        return load_corpus(DataTable(kind="stdlib", sequence_length=SEQUENCE))
    return load_corpus(DataTable(kind="text", paths=(Path(data) / "*.txt",), sequence_length=SEQUENCE))


def new_model(seed: int, dense: int | None = None) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """`dense`: as of `Arm`."""
    of_experts = ("num_local_experts", "num_experts_per_tok")
    settings = MODEL if dense is None else {key: value for key, value in MODEL.items() if key not in of_experts}
    kind = "mixtral" if dense is None else "llama"
    own = {} if dense is None else {"intermediate_size": dense}
    model = build_model(ModelTable(type=kind, **{**settings, **own}), 256, SEQUENCE, seed)
    return model, new_optimizer(model)


def new_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def inner_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: Tensor, step: int, length: Length
) -> None:
    """One inner step; denormals are flushed in here, they slow a model of this size down by half."""
    rise = max(1, length.warm // 4)
    decayed = (1 + math.cos(math.pi * (step - rise) / (length.steps - rise))) / 2
    factor = step / rise if step <= rise else FINAL_FRACTION + (1 - FINAL_FRACTION) * decayed
    optimizer.param_groups[0]["lr"] = LR * factor
    torch.set_flush_denormal(True)
    is_mixture = hasattr(model.config, "num_local_experts")
    output = model(tokens[:, :-1], **({"output_router_logits": True} if is_mixture else {}))
    loss = F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss + AUXILIARY * output.aux_loss if is_mixture else loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.set_flush_denormal(False)


def batches(seed: int, data: str | None, islands: Sequence[int], position: int = 0) -> Stream:
    """The batches of some islands; all islands together have those of data parallel."""
    stream = Stream(corpus(data), SEQUENCE, ISLANDS, islands, BATCH, seed)
    stream.position = position * BATCH
    return stream


def train(arm: Arm, seed: int, length: Length, data: str | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The global model at the end, and what each island sent, received and held (bytes, mean over islands)."""
    model, optimizer = new_model(seed, arm.dense)
    everything = batches(seed, data, range(ISLANDS))
    last = length.steps if arm.method is None else length.warm
    for step in range(1, last + 1):
        inner_step(model, optimizer, everything.next(), step, length)
    if arm.method is None:
        return model.state_dict(), {"optimizer": _bytes_of(optimizer), "device": _device_bytes(model)}
    start = model.state_dict(), optimizer.state_dict()

    def life(island: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, float]]:
        whole, _ = new_model(seed, arm.dense)
        whole.load_state_dict(start[0])
        stream, state, found = batches(seed, data, [island], length.warm), start[1], Counter[str]()
        model, optimizer, parts = whole, new_optimizer(whole), dict[str, Any]()
        last = arm.num_turns(length) - 1
        for turn in range(last + 1):
            if (experts := arm.part(island, turn)) is not None:
                parts = {
                    "holds_experts": f"{arm.own_experts(island, turn)} of {EXPERTS}",
                    "rewarm_steps": 0 if turn else None,
                }
                parts["whole"] = whole if island == turn == 0 else None
                before, model = optimizer, part_of(whole, experts)
                optimizer = new_optimizer(model)
                state = part_state(state, optimizer, experts) if turn == 0 else without_experts(before, model)
            elif (trained := arm.own_experts(island)) is not None:
                parts = {"trains_experts": trained}
            optimizer.load_state_dict(state)
            own = exchange if turn == 0 else exchange.again()  # type: ignore[attr-defined]  # of a run in one process
            own.is_dealt = arm.dealt > 0  # an expert may lack a holder while islands change places
            with diloco.Learner(model, optimizer, method=arm.method, exchange=own, **parts) as learner:
                for step in arm.steps_of(turn, length):
                    inner_step(model, optimizer, stream.next(), step, length)
                    learner.step(tokens=BATCH * SEQUENCE)
                    if step > length.steps - 4 * SYNC_EVERY:
                        found["host"] = max(found["host"], int(_host_bytes(learner, model)))
                if turn == last:
                    own.stepped()  # type: ignore[attr-defined]  # leaves only when the step after the last one would be over
                counted, merges = learner.metrics()["num_bytes"], learner.metrics()["merges"]
                found.update(up=counted.get("contributions", 0), down=counted.get("updates", 0), merges=merges)
                found["joins"] += counted.get("joins", 0) if turn else 0
                end = learner.global_state_dict()
        return end, {**found, "optimizer": _bytes_of(optimizer), "device": _device_bytes(model)}

    turn = arm.num_turns(length) - 1
    ended = diloco.run_local(life, learners=ISLANDS)
    means = {key: statistics.fmean(found[key] for _, found in ended) for key in ended[0][1]}
    return assembled(arm, turn, start[0], [part for part, _ in ended]), means


def without_experts(before: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state of an inner optimizer for a part with other experts, whose moments begin at 0."""
    state = copy.deepcopy(before.state_dict())
    for index, (name, _) in enumerate(model.named_parameters()):
        if is_of_experts(name):
            for key in ("exp_avg", "exp_avg_sq"):
                state["state"][index][key].zero_()
    return state


def assembled(
    arm: Arm, turn: int, like: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The whole model, from the global parts of all islands, which have the same bits of what they share."""
    found = {name: parts[0][name] for name in like}
    for name in like if arm.holds else ():
        if like[name].shape == parts[0][name].shape:
            continue
        found[name] = torch.empty_like(like[name])
        for island, part in enumerate(parts):
            found[name][list(arm.part(island, turn) or ())] = part[name]
    return found


def _device_bytes(model: nn.Module) -> float:
    """Bytes of a model's parameters and their gradients."""
    return 2.0 * sum(each.nbytes for each in model.parameters())


def _bytes_of(optimizer: torch.optim.Optimizer) -> float:
    values = (value for state in optimizer.state.values() for value in state.values())
    return float(sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor)))


def _host_bytes(learner: diloco.Learner, model: nn.Module) -> float:
    """Bytes of the tensors that a learner holds besides model and inner optimizer: anchors, snapshots, updates."""
    seen, found, todo = set[int](), dict[int, int](), list[Any]([learner])
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, NOT_THE_LEARNERS):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        else:
            todo += gc.get_referents(thing)
    return float(sum(size for place, size in found.items() if place not in own))


NOT_THE_LEARNERS = (Exchange, nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, FrameType)


def planned(arm: Arm, length: Length) -> dict[str, float]:
    """The bytes up and down of each island, by the planner."""
    assert arm.method is not None
    workload = workload_of(new_model(0, arm.dense)[0])
    experts = None if arm.trained is None else ExpertSetting(GROUPS, arm.every, arm.trained)
    if arm.holds:
        experts = ExpertSetting(GROUPS, arm.every, held=(arm.trained or 0) / GROUPS)
    setting = setting_for(workload, "diloco", sync_every=SYNC_EVERY, up="fp32", experts=experts)
    exchange, intervals = exchange_of(workload, setting), (length.steps - length.warm) / SYNC_EVERY
    return {
        "up": intervals * exchange.per_interval(exchange.up_bytes),
        "down": intervals * exchange.per_interval(exchange.down_bytes),
    }


def is_of_experts(name: str) -> bool:
    return ".experts." in name or name.endswith(".gate.weight")


def workload_of(model: PreTrainedModel) -> Workload:
    """The model, as the planner takes it."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if is_of_experts(name))
    return Workload("mixture", sum(sizes.values()), MODEL["num_hidden_layers"], 1.0, experts)


def run(arm: Arm, seed: int, length: Length, data: str | None, half: str = "report") -> dict[str, Any]:
    """Train with one arm and seed, and evaluate on a half of the held-out text."""
    torch.set_num_threads(1)
    started = time.process_time()
    state, held = train(arm, seed, length, data)
    model, _ = new_model(seed, arm.dense)
    model.load_state_dict(state)
    text = held_out_batches(corpus(data), SEQUENCE, 2 * HELD_OUT_SEQUENCES, 64)
    text = text[: len(text) // 2] if half == "report" else text[len(text) // 2 :]
    found: dict[str, Any] = {"loss": held_out_loss(model.eval(), text).score.value, **held}
    if arm.holds:
        islands = [part_of(model, arm.part(island) or ()) for island in range(ISLANDS)]
        found["part"] = statistics.fmean(held_out_loss(each, text).score.value for each in islands)
    found["seconds"] = round(time.process_time() - started, 1)
    if arm.method is not None:
        found["planned"] = planned(arm, length)
    return found


# --- the table --------------------------------------------------------------------------------------------------------


def table(values: Mapping[str, Any]) -> str:
    """`values`: of the results file."""
    runs = values["runs"]
    seconds = sum(each["seconds"] for found in runs.values() for each in found.values())
    exact = all(each[way] == each["planned"][way] for found in runs.values() for each in found.values()
                for way in each.get("planned", ()))  # fmt: skip
    below = (
        f"Nats per byte, mean of {max(map(len, runs.values()))} seeds with 95 % intervals, differences in pairs; bytes of one island, "
        f"{values['steps']:,} inner steps of which {values['warm']} are the warm start, {values['tokens']:,} tokens, "
        f"text `{values['text']}`. Bytes are {'those' if exact else 'not those'} of the planner in every run. "
        f"{seconds:,.0f} s of processor time in all, {values['machine']}."
    )
    return "\n".join([*_rows(runs, ARMS, SAVED), "", below])


def held_table(values: Mapping[str, Any]) -> str:
    """Islands that hold a part, beside those that train as much of a whole model."""
    trained = (arm for arm in ARMS if arm.method is None or (arm.trained is not None and arm.every == 1))
    rows = (*(arm for arm in trained if arm.trained != 1 or arm.seeds == SEEDS), *HELD)
    return "\n".join(_rows(values["runs"], rows, {"part": "an island's own part", **SAVED, "device": "device memory"}))


SAVED = {"up": "sent", "down": "received", "host": "learner's host memory", "optimizer": "optimizer memory"}


def _rows(runs: Mapping[str, Any], arms: Sequence[Arm], more: Mapping[str, str]) -> list[str]:
    """A table of the arms that were run. `more`: further columns, by the key of a run."""
    heads = "held-out loss", f"above “{BASE.label}”", *more.values()
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for arm in arms:
        if arm.label in runs:
            cells = _cells(arm, runs[arm.label], runs[BASE.label], more)
            lines.append(f"| {arm.label}{_seeds(runs, arm)} | {' | '.join(cells)} |")
    return lines


def _seeds(runs: Mapping[str, Any], arm: Arm) -> str:
    """The number of seeds of an arm that has fewer than others."""
    number = len(runs[arm.label])
    return "" if number == max(map(len, runs.values())) else f" ({number} seeds)"


def byte_table() -> str:
    """Mean bytes of an island in an inner step, of DeepSeek-V3 in bf16 at H = 100."""
    workload = PRESETS["deepseek-v3"]
    lines = ["| | sent | received |", "|---|---:|---:|"]
    cases = {
        "one fragment": None, "experts in four groups, k = 4": ExpertSetting(GROUPS, 4),
        "half of the experts trained": ExpertSetting(GROUPS, 1, 2), "half, k = 4": ExpertSetting(GROUPS, 4, 2),
        "a quarter trained": ExpertSetting(GROUPS, 1, 1), "a quarter, k = 4": ExpertSetting(GROUPS, 4, 1),
        "a quarter, k = 4, experts in e3m0": ExpertSetting(GROUPS, 4, 1, "e3m0"),
    }  # fmt: skip
    for words, experts in cases.items():
        exchange = exchange_of(workload, setting_for(workload, "diloco", sync_every=100, experts=experts))
        sizes = (exchange.per_interval(each) / 100 for each in (exchange.up_bytes, exchange.down_bytes))
        lines.append(f"| {words} | {' | '.join(map(SIZE.show, sizes))} |")
    return "\n".join(lines)


def _cells(arm: Arm, found: Mapping[str, Any], base: Mapping[str, Any], more: Iterable[str]) -> list[str]:
    gap = Score.of([found[seed]["loss"] - base[seed]["loss"] for seed in found if seed in base])
    cells = [_score(each["loss"] for each in found.values()), "" if arm == BASE else f"{gap.value:+.4f}{_half(gap)}"]
    for key in more:
        rejoined = "joins" if key == "down" else ""  # a dealt part is received with it
        measured = [each[key] + each.get(rejoined, 0) for each in found.values() if key in each]
        if key == "device":  # known of any model
            measured = measured or [_device_bytes(new_model(0, arm.dense)[0])]
        shown = "–" if not measured else _score(measured) if key == "part" else SIZE.show(statistics.fmean(measured))
        cells.append(shown)
    return cells


def _score(losses: Iterable[float]) -> str:
    score = Score.of(list(losses))
    return f"{score.value:.4f}{_half(score)}"


def _half(score: Score) -> str:
    return "" if score.high is None else f" ± {score.high - score.value:.4f}"


# --- the command ------------------------------------------------------------------------------------------------------


def pilot(length: Length, data: str | None) -> None:
    """Outer settings for all experts trained and for a quarter, on another seed and the other half of the held-out
    text."""
    for base in (each for each in ARMS if each.trained in (GROUPS, 1) and each.every == 1):
        for lr, momentum in ((0.7, 0.9), (0.7, 0.8), (1.0, 0.8), (0.7, 0.5)):
            assert base.method is not None
            arm = replace(base, method=replace(base.method, outer=Nesterov(lr=lr, momentum=momentum)))
            found = run(arm, PILOT_SEED, length, data, half="select")
            print(f"{arm.label}, outer {lr} / {momentum}: {found['loss']:.4f} in {found['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a directory of text files")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file with the results")
    parser.add_argument("--steps", type=int, help="inner steps in all, of which a fifth are the warm start")
    parser.add_argument("--show", action="store_true", help="write the table of the finished runs, and train nothing")
    parser.add_argument("--pilot", action="store_true", help="compare outer settings, and write nothing")
    given = parser.parse_args()
    length = Length() if given.steps is None else Length(given.steps // 5, given.steps)
    if given.pilot:
        pilot(length, given.data)
        return
    values = json.loads(given.results.read_text()) if given.results.exists() else {"runs": {}}
    runs: dict[str, dict[str, Any]] = values["runs"]
    missing = [
        (arm, seed)
        for seed in SEEDS
        for arm in (*HELD, *reversed(ARMS))
        if seed in arm.seeds and str(seed) not in runs.get(arm.label, {})
    ]
    if missing and not given.show:
        files = [] if given.data is None else sorted(each.name for each in Path(given.data).glob("*.txt"))
        values |= {
            "steps": length.steps, "warm": length.warm, "tokens": length.steps * ISLANDS * BATCH * SEQUENCE,
            "text": ", ".join(files) or "stdlib", "fingerprint": corpus(given.data).fingerprint()[:12],
            "machine": f"{os.cpu_count()} cores, torch {torch.__version__}, one thread a run",
        }  # fmt: skip
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(run, arm, seed, length, given.data): (arm, seed) for arm, seed in missing}
            for future in as_completed(futures):
                arm, seed = futures[future]
                runs.setdefault(arm.label, {})[str(seed)] = future.result()
                print(f"{time.strftime('%H:%M:%S')} {arm.label}, seed {seed}: {future.result()}", flush=True)
                given.results.write_text(json.dumps(values, indent=1) + "\n")
    if given.results == RESULTS:
        tables = {"experts": table(values), "experts-held": held_table(values), "expert-bytes": byte_table()}
        PAGE.write_text(filled(PAGE.read_text(), tables))
    sys.stdout.write(f"{table(values)}\n\n{held_table(values)}\n")


if __name__ == "__main__":
    main()
