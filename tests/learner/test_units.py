"""Units below the tensor: rows of parameters in the pieces of ranks, in runs, and joined into whole parameters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.learner.mixtures import EXPERTS, Mixture, Uncounted, backward, mixture, train_step
from tests.learner.test_learner import assert_same, parameters_of
from tests.learner.test_routing import MIXTURES
from tests.learner.test_routing import mixture as of_transformers
from torch import Tensor, nn

import diloco
from diloco import Learner
from diloco.core.fragments import make_layout
from diloco.core.layout import Layout, Origin, named_tensors
from diloco.errors import LayoutError
from diloco.exchange.base import Exchange
from diloco.learner.frozen import exchanged_tensors
from diloco.learner.partition import AllToAll, Partition, partition_of
from diloco.learner.pieces import Box, Gather, Piece, Units, rows_of

CUT = diloco.Experts(groups=2, trunk=diloco.Whole())
EVERY = 3


def diloco_of(cut: Any, num_fragments: int) -> diloco.Method:
    """All fragments are sent at once, so that runs of different cuts can be compared."""
    return diloco.DiLoCo(sync_every=EVERY, fragments=cut, offsets=(EVERY,) * num_fragments)


# --- rows of a piece --------------------------------------------------------------------------------------------------


def box_of(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Tensor], Piece]:
    def piece(tensor: Tensor) -> Piece:
        box = Box(shape, offsets, sizes)
        return Piece(tuple(tensor.shape), box, tensor.reshape(shape)[box.within(Box.whole(shape))])

    return piece


@pytest.mark.parametrize("split", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_rows_of_all_pieces_make_up_a_unit(split: int, size: int) -> None:
    """Pieces by rows that cut through units, by columns, and by runs of the flattened parameter."""
    tensor = torch.arange(6.0 * 4 * 2).view(6, 4, 2)
    bounds = [round(i * 6 / split) for i in range(split + 1)]
    rows = [box_of((6, 4, 2), (a, 0, 0), (b - a, 4, 2)) for a, b in itertools.pairwise(bounds)]
    columns = [box_of((6, 4, 2), (0, a, 0), (6, b - a, 2)) for a, b in itertools.pairwise([0, 1, 4])]
    flat = [box_of((48,), (a,), (b - a,)) for a, b in itertools.pairwise([0, 5, 5 + 7 * split, 48])]
    for pieces, first in itertools.product((rows, columns, flat), range(0, 6, size)):
        unit = tensor[first : first + size]
        found = torch.full(unit.shape, torch.nan)
        for piece in pieces:
            own = rows_of(piece(tensor), Origin("w", first, 6), size)
            assert own.shape == unit.shape
            assert tuple(own.local.shape) == own.box.sizes
            if own.box.numel:
                assert own.local.data_ptr() >= tensor.data_ptr()  # a view, so that writing it writes the parameter
                view = found.view(own.box.shape)[own.box.within(Box.whole(own.box.shape))]
                assert view.isnan().all()  # no element is in two pieces
                view.copy_(own.local)
        assert torch.equal(found, unit)


def test_writing_the_rows_writes_the_parameter() -> None:
    tensor = torch.zeros(4, 3)
    rows_of(Piece((4, 3), Box((2, 6), (1, 0), (1, 6)), tensor.view(2, 6)[1:]), Origin("w", 2, 4), 2).local.fill_(1)
    assert tensor.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2


def test_a_box_whose_rows_are_not_those_of_the_parameter_is_refused() -> None:
    piece = Piece((4, 3), Box((2, 6), (0, 0), (2, 6)), torch.zeros(2, 6))
    with pytest.raises(LayoutError, match=r"row 1 of 'w' .*gather="):
        rows_of(piece, Origin("w", 1, 4), 1)


# --- partitions -------------------------------------------------------------------------------------------------------


class Ranks:
    """`AllToAll` between threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._sent = threading.Barrier(size, timeout=300), [list[Tensor]()] * size

    def of(self, rank: int) -> AllToAll:
        def all_to_all(send: Tensor, sizes: Sequence[int], wanted: Sequence[int], what: str) -> Tensor:
            self._sent[rank] = list(send.split(list(sizes)))
            self._barrier.wait()
            received = torch.cat([parts[rank] for parts in self._sent])
            self._barrier.wait()
            assert received.numel() == sum(wanted), what
            return received

        return all_to_all


def by_experts_and_columns(rank: int, shape: tuple[int, ...]) -> Box:
    """Rank 0 has the first expert and a half, where rows are experts; the rest is divided by columns."""
    if shape[0] == EXPERTS:
        first, stop = [(0, 1), (1, 4), (1, 4)][rank]
        half = shape[1] // 2 if len(shape) > 1 else 0
        if len(shape) == 1 or rank == 0:
            return Box(shape, (first, *(0,) * (len(shape) - 1)), (stop - first, *shape[1:]))
        offset, size = (0, half) if rank == 1 else (half, shape[1] - half)
        return Box(shape, (first, offset, *(0,) * (len(shape) - 2)), (stop - first, size, *shape[2:]))
    return Box.whole(shape)


def by_experts(rank: int, shape: tuple[int, ...]) -> Box:
    """Two ranks with two experts each, and replicas of the trunk."""
    if shape[0] != EXPERTS or rank == 2:
        return Box.whole(shape) if shape[0] != EXPERTS else Box(shape, (0,) * len(shape), (0, *shape[1:]))
    return Box(shape, (2 * rank, *(0,) * (len(shape) - 1)), (2, *shape[1:]))


@pytest.mark.parametrize("held", [by_experts_and_columns, by_experts])
@pytest.mark.parametrize("averaged", [False, True])
def test_units_divided_over_ranks_have_the_bits_of_one_process(
    held: Callable[[int, tuple[int, ...]], Box], averaged: bool
) -> None:
    from diloco.learner.pieces import read_dtensor
    from diloco.learner.roles import described

    model = mixture()
    for layer in model.layers:
        layer.gate.e_score_correction_bias.copy_(torch.randn(EXPERTS))
    method = diloco_of(CUT, 3)
    layout = described(model, method, "average" if averaged else "local", "exchange", read_dtensor).layout(method)
    whole = exchanged_tensors(model, layout)
    assert any(place.spec.role for place in layout.fragments[0].tensors) == averaged
    alone = partition_of(layout, whole, Units(layout))
    new = [torch.randn(fragment.numel) for fragment in layout.fragments]
    parameters: dict[str, Tensor] = {Units(layout).parameter(name): each.detach() for name, each in whole.items()}
    boxes = [{name: held(rank, tuple(each.shape)) for name, each in parameters.items()} for rank in range(3)]
    ranks = Ranks(3)

    def life(rank: int) -> None:
        def piece(name: str, tensor: Tensor) -> Piece:
            box = boxes[rank][name]
            return Piece(box.shape, box, tensor)

        def cut_to(unit: str, source: int) -> Box:
            def of_source(name: str, tensor: Tensor) -> Piece:
                box = boxes[source][name]
                return Piece(box.shape, box, torch.empty(box.sizes))

            return Units(layout, of_source)(unit, whole[unit]).box

        units: Gather = Units(layout, piece)
        own = {name: parameters[name][box.within(Box.whole(box.shape))].clone() for name, box in boxes[rank].items()}
        tensors = Units(layout).by_name(own)
        of_ranks = [{unit: cut_to(unit, source) for unit in whole} for source in range(3)]
        partition = Partition(layout, rank, of_ranks, units, ranks.of(rank))
        for fragment in layout.fragments:
            elements = partition.elements(fragment.index)
            expected = alone.gather(fragment.index, whole)
            assert torch.equal(partition.gather(fragment.index, tensors), expected[elements])
            found = partition.spread(fragment.index, new[fragment.index][elements].clone(), torch.device("cpu"))
            for name, value in alone.spread(fragment.index, new[fragment.index], torch.device("cpu")).items():
                box = of_ranks[rank][name]
                assert torch.equal(found[name], value[box.within(Box.whole(box.shape))]), name
                assert partition.local(name, tensors[name]).shape == box.sizes

    with ThreadPoolExecutor(3) as pool:
        for result in [pool.submit(life, rank) for rank in range(3)]:
            result.result()


# --- runs -------------------------------------------------------------------------------------------------------------


def global_models(
    make: Callable[[int], nn.Module], method: diloco.Method, *, steps: int = 2 * EVERY, **options: Any
) -> list[dict[str, Tensor]]:
    """Each learner's global model at the end of a run of two learners."""

    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = make(index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Learner(model, optimizer, method=method, exchange=exchange, **options) as learner:
            for step in range(1, steps + 1):
                train_step(model, optimizer, index, step)
                learner.step()
            learner.finish()
            state = learner.global_state_dict()
            model.load_state_dict(state)
            return state

    return diloco.run_local(life, learners=2)


def test_a_model_cut_into_experts_computes_what_the_model_cut_by_tensors_does() -> None:
    """With everything trained, the same H and codec, and elementwise merges, a cut changes no number."""
    models = [
        global_models(lambda index: mixture(index, Uncounted), diloco_of(cut, num_fragments), buffers="local")
        for cut, num_fragments in (
            (diloco.Whole(), 1), (CUT, 3),
            (diloco.Named([["layers.*"], ["embed.*", "head.*"]]), 2),
            (diloco.Experts(groups=4, trunk=diloco.Balanced(2)), 6),
        )
    ]  # fmt: skip
    for first, second in models:
        assert_same(first, models[0][0])
        assert_same(second, models[0][0])
    assert not torch.equal(models[0][0]["head.weight"], mixture(0).state_dict()["head.weight"])


def test_a_bias_of_experts_is_averaged_in_their_fragments() -> None:
    """The buffer is cut as the router's weight is, although training replaces it."""

    def life(index: int, exchange: Exchange) -> list[Tensor]:
        model = mixture(index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = diloco_of(CUT, 3)
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="average") as learner:
            names = [fragment.names for fragment in learner.layout.fragments]
            assert "layers.0.gate.e_score_correction_bias.1" in names[0]
            assert "layers.1.gate.e_score_correction_bias.2" in names[1]
            for step in range(1, EVERY + 1):
                train_step(model, optimizer, index, step)
                for layer in model.layers:
                    layer.gate.e_score_correction_bias = torch.arange(4.0) * step * (index + 1)
                learner.step()
            return [layer.gate.e_score_correction_bias for layer in model.layers]

    for biases in diloco.run_local(life, learners=2):
        for bias in biases:
            torch.testing.assert_close(bias, torch.arange(4.0) * EVERY * 1.5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_transformers_are_cut_and_joined(kind: str) -> None:
    """Every learner ends with the same global model, under the model's own names, which the layout also joins."""

    def make(index: int) -> nn.Module:
        torch.manual_seed(index)
        return of_transformers(kind)

    def life(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = make(index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = diloco_of(diloco.Experts(groups=2, trunk=diloco.Whole()), 3)
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="average") as learner:
            for step in range(1, EVERY + 1):
                batch = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(10 * index + step))
                model(batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step()
            learner.finish()
            state = learner.global_state_dict()
            assert state.keys() == model.state_dict().keys()
            model.load_state_dict(state)
            return state, named_tensors(learner.layout, learner._driver.newest())

    (first, joined), (second, _) = diloco.run_local(life, learners=2)
    assert_same(first, second)
    assert any(name.endswith("experts.gate_up_proj") for name in joined)
    assert_same({name: first[name] for name in joined}, joined)
    assert not torch.equal(joined[min(joined)], make(0).state_dict()[min(joined)])


@pytest.mark.parametrize("method", [diloco_of(CUT, 3), diloco.StreamingDiLoCo(sync_every=4, fragments=CUT)])
def test_a_learner_resumes_with_the_same_bits(method: diloco.Method) -> None:
    steps = 9

    def life(index: int, exchange: Exchange, saved: Any = None) -> Any:
        model = mixture(index)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="average") as learner:
            first = 1
            if saved is not None:
                assert learner.load_state_dict(saved[index][0])
                optimizer.load_state_dict(saved[index][1])
                first = steps + 1
            for step in range(first, first + steps):
                train_step(model, optimizer, index, step)
                learner.step(tokens=21)
                if saved is None and step == steps:
                    return learner.state_dict(), optimizer.state_dict()
            return learner.state_dict()

    def through(index: int, exchange: Exchange) -> Any:
        model = mixture(index)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="average") as learner:
            for step in range(1, 2 * steps + 1):
                train_step(model, optimizer, index, step)
                learner.step(tokens=21)
                if step == steps:
                    learner.state_dict()  # waits for the updates in flight, as saving does
            return learner.state_dict()

    saved = diloco.run_local(life, learners=2)
    resumed = diloco.run_local(lambda index, exchange: life(index, exchange, saved), learners=2)
    for mine, theirs in zip(resumed, diloco.run_local(through, learners=2), strict=True):
        assert_same(mine["parameters"], theirs["parameters"])
        assert_same(mine["anchors"], theirs["anchors"])
        for own, other in zip(mine["core"]["fragments"], theirs["core"]["fragments"], strict=True):
            assert own["pending_routed"] == other["pending_routed"]


def test_what_is_frozen_for_good_is_found_by_its_rows() -> None:
    """Another expert's adoption does not count as training."""

    def life(index: int, exchange: Exchange) -> None:
        model = mixture(index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = diloco.DiLoCo(sync_every=4, fragments=CUT, offsets=(2, 4, 4))
        with Learner(model, optimizer, method=method, exchange=exchange, buffers="local") as learner:
            for step in range(1, 13):
                if step == 3:
                    model.layers[0].experts.down_proj.requires_grad_(False)
                train_step(model, optimizer, index, step)
                learner.step()

    with pytest.raises(LayoutError, match=r"'layers.0.experts.down_proj.[0-3]' requires no gradient"):
        diloco.run_local(life, learners=2)


def test_master_weights_of_a_fused_parameter_are_found() -> None:
    class Masters(torch.optim.Optimizer):
        """SGD on fp32 copies of the parameters."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.copies = [each.detach().float() for group in self.param_groups for each in group["params"]]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for copy, parameter in zip(self.copies, self.param_groups[0]["params"], strict=True):
                copy.sub_(parameter.grad.float(), alpha=0.1)
                parameter.copy_(copy)

    def life(index: int, exchange: Exchange) -> None:
        model = mixture(index).bfloat16()
        optimizer = Masters(model.parameters())
        with Learner(model, optimizer, method=diloco_of(CUT, 3), exchange=exchange, buffers="local") as learner:
            for step in range(1, EVERY + 1):
                train_step(model, optimizer, index, step)
                learner.step()

    with pytest.raises(diloco.errors.ConfigError, match=r"keeps master weights of 'layers.0.*\.[01]'"):
        diloco.run_local(life, learners=2)


def test_a_layout_without_units_finds_its_tensors_as_before() -> None:
    model = mixture()
    layout: Layout = make_layout(model, diloco.Whole())
    units = Units(layout)
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    assert exchanged_tensors(model, layout) == parameters
    assert_same(units.joined(parameters_of(model)), parameters_of(model))
    assert isinstance(model, Mixture)
    backward(model, 0, 1)
