"""Error feedback is transactional: committed with the contribution it belongs to, put back to the bit otherwise."""

import itertools

import pytest
import torch
from torch import Tensor

import diloco
from diloco.core.codecs import Codec, codec_from_name, compress
from diloco.learner.device import DeviceQueue, Displacement
from diloco.learner.error_feedback import ErrorFeedback, TentativeResidual

N = 70_000  # more than two segments of a payload
CODEC = codec_from_name("int4")


def make_residuals(*, error_feedback: float = True) -> ErrorFeedback:
    return ErrorFeedback(diloco.DiLoCo(codec="int4", error_feedback=error_feedback), num_fragments=2)


def gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(N, generator=generator) for _ in range(count)]


def residual_of(residuals: ErrorFeedback, fragment: int = 0) -> Tensor | None:
    return residuals.state_dict().get(str(fragment))


def displacement(values: Tensor) -> Displacement:
    return Displacement(DeviceQueue(values.device), values, None, None, ())


def send(
    residuals: ErrorFeedback, round_: int, gradient: Tensor, fragment: int = 0
) -> tuple[TentativeResidual, Tensor]:
    tentative = residuals.offered(fragment, round_)
    return tentative, residuals.encode(tentative, displacement(gradient))


def test_what_an_encoding_lost_goes_into_the_next_one() -> None:
    residuals = make_residuals()
    expected: Tensor | None = None
    for round_, gradient in enumerate(gradients(3)):
        payload, expected = compress(CODEC, gradient, expected)
        assert torch.equal(send(residuals, round_, gradient)[1], payload)
        residuals.commit(0, round_)
        assert torch.equal(residual_of(residuals), expected)
    assert residual_of(residuals, fragment=1) is None


def test_what_is_kept_may_decay() -> None:
    residuals = make_residuals(error_feedback=0.9)
    expected: Tensor | None = None
    for round_, gradient in enumerate(gradients(3)):
        payload, expected = compress(CODEC, gradient, expected, 0.9)
        assert torch.equal(send(residuals, round_, gradient)[1], payload)
        residuals.commit(0, round_)
        assert torch.equal(residual_of(residuals), expected)


def test_without_error_feedback_nothing_is_kept() -> None:
    residuals = make_residuals(error_feedback=False)
    for round_, gradient in enumerate(gradients(2)):
        assert torch.equal(send(residuals, round_, gradient)[1], CODEC.encode(gradient))
        residuals.roll_back(0, round_)
    assert residuals.state_dict() == {}


def test_roll_back_is_exact() -> None:
    residuals = make_residuals()
    first, second, again = gradients(3)
    send(residuals, 0, first)
    residuals.roll_back(0, 0)
    assert residual_of(residuals) is None
    send(residuals, 1, first)
    residuals.commit(0, 1)
    before = residual_of(residuals)
    assert before is not None
    kept = before.clone()
    send(residuals, 2, second)
    residuals.roll_back(0, 2)
    assert torch.equal(residual_of(residuals), kept)
    assert torch.equal(send(residuals, 3, again)[1], compress(CODEC, again, kept)[0])


@pytest.mark.parametrize("first_settled", ["commit", "roll_back"])
@pytest.mark.parametrize("second_settled", ["commit", "roll_back"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_in_flight(first_settled: str, second_settled: str, order: tuple[int, int]) -> None:
    """What was delivered and what is fed back add up to what was measured, whichever of the two was merged."""
    residuals = make_residuals()
    start, first, second = gradients(3)
    send(residuals, 0, start)
    residuals.commit(0, 0)
    before = residual_of(residuals)
    assert before is not None
    payloads = [send(residuals, 1, first)[1], send(residuals, 2, second)[1]]
    settled = (first_settled, second_settled)
    for which in order:
        getattr(residuals, settled[which])(0, which + 1)
    after = residual_of(residuals)
    assert after is not None
    if settled == ("roll_back", "roll_back"):
        assert torch.equal(after, before)
        return
    measured, delivered = before.double(), torch.zeros(N, dtype=torch.float64)
    for outcome, gradient, payload in zip(settled, (first, second), payloads, strict=True):
        if outcome == "commit":
            measured += gradient.double()
            delivered += CODEC.decode(payload, N).double()
    # Four fp32 roundings of sums of numbers below 16.
    torch.testing.assert_close(after.double(), measured - delivered, rtol=0, atol=4 * 2**-20)


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("merged", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_number_in_flight(decay: float, merged: tuple[bool, ...], order: tuple[int, ...]) -> None:
    """The residual is what it would be if the contributions that were not merged had never been sent."""
    residuals = make_residuals(error_feedback=decay)
    start, *deltas = gradients(4)
    send(residuals, 0, start)
    residuals.commit(0, 0)
    before = residual_of(residuals)
    assert before is not None
    payloads = [send(residuals, round_, delta)[1] for round_, delta in zip((3, 4, 8), deltas, strict=True)]
    for which in order:
        (residuals.commit if merged[which] else residuals.roll_back)(0, (3, 4, 8)[which])
    expected = before.double()
    for delta, payload, listed in zip(deltas, payloads, merged, strict=True):
        if listed:
            expected = delta.double() + decay * expected - CODEC.decode(payload, N).double()
    after = residual_of(residuals)
    assert after is not None
    if not any(merged):
        assert torch.equal(after, before)
    # A dozen fp32 roundings of sums of numbers below 16.
    torch.testing.assert_close(after.double(), expected, rtol=0, atol=12 * 2**-20)
    assert residuals._open == [[], []]  # nothing is kept of what is settled


@pytest.mark.parametrize("merged", list(itertools.product([True, False], repeat=3)))
def test_what_is_saved_is_as_if_all_that_is_on_its_way_were_refused(merged: tuple[bool, ...]) -> None:
    """A saved residual has in it what an update has listed; saving changes nothing."""
    saving, refusing = make_residuals(), make_residuals()
    for residuals in (saving, refusing):
        for round_, gradient in enumerate(gradients(4)):
            send(residuals, round_, gradient)
        residuals.commit(0, 0)
        for round_, listed in enumerate(merged, 1):
            if listed:
                residuals.commit(0, round_)
    saved = residual_of(saving)
    for round_, listed in enumerate(merged, 1):
        if not listed:
            refusing.roll_back(0, round_)
    expected = residual_of(refusing)
    assert saved is not None
    assert expected is not None
    # Refused one by one they leave three times as many roundings of numbers below 16 as left out at once.
    torch.testing.assert_close(saved, expected, rtol=0, atol=8 * 2**-20)
    if not any(merged):
        assert torch.equal(saved, expected)
    for round_ in range(1, 4):
        saving.commit(0, round_)
    residual_of(saving)
    again = make_residuals()
    for round_, gradient in enumerate(gradients(4)):
        send(again, round_, gradient)
        again.commit(0, round_)
    assert torch.equal(residual_of(saving), residual_of(again))


def test_refused_before_it_was_encoded() -> None:
    """A refusal can overtake a slow encoder; what is encoded afterwards leaves no trace."""
    residuals = make_residuals()
    first, second, third = gradients(3)
    send(residuals, 0, first)
    residuals.commit(0, 0)
    before = residual_of(residuals)
    late = residuals.offered(0, 1)
    residuals.roll_back(0, 1)
    residuals.encode(late, displacement(second))
    assert residual_of(residuals) is before
    # The same round may be tried again.
    payload = send(residuals, 1, third)[1]
    assert torch.equal(payload, compress(CODEC, third, before)[0])
    residuals.commit(0, 1)
    assert residual_of(residuals) is not before


def test_an_earlier_one_is_refused_while_the_next_is_encoded() -> None:
    residuals = make_residuals()
    first, second = gradients(2)
    send(residuals, 0, first)

    class Slow(Displacement):
        def compress(self, codec: Codec, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
            residuals.roll_back(0, 0)  # meanwhile, on the training thread
            return super().compress(codec, residual, decay)

    slow = Slow(DeviceQueue(second.device), second, None, None, ())
    payload = residuals.encode(residuals.offered(0, 1), slow)
    assert residual_of(residuals) is None
    residuals.commit(0, 1)
    after = residual_of(residuals)
    assert after is not None
    # Two fp32 roundings of sums of numbers below 16.
    torch.testing.assert_close(after, second - CODEC.decode(payload, N), rtol=0, atol=2 * 2**-20)


def test_state_is_kept_apart() -> None:
    """A saved state and its owner are independent: changing the one does not change the other."""
    residuals = make_residuals()
    first, second = gradients(2)
    send(residuals, 0, first)
    residuals.commit(0, 0)
    state = residuals.state_dict()
    saved = {key: value.clone() for key, value in state.items()}
    send(residuals, 1, second)
    assert torch.equal(state["0"], saved["0"])
    other = make_residuals()
    other.load_state_dict(state)
    state["0"].zero_()
    assert torch.equal(residual_of(other), saved["0"])
    assert list(other.state_dict()) == ["0"]
