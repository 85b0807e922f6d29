"""Outer optimizers against torch.optim, degenerate identities, golden numbers, and purity."""

import json

import pytest
import torch
from torch import Tensor

from diloco.core.outer import OUTER_OPTIMIZERS, SGD, Adam, DelayedNesterov, Nesterov, Outer, State
from diloco.errors import ConfigError, LayoutError

IN_TORCH = [SGD(1.0), SGD(0.7), Nesterov(), Nesterov(0.4, 0.5), Adam(0.3), Adam(0.01, (0.5, 0.999), 1e-8)]
OUTERS = [*IN_TORCH, DelayedNesterov(buffer=3, c=0.2)]


def as_torch(outer: Outer, params: Tensor) -> torch.optim.Optimizer:
    match outer:
        case SGD(lr):
            return torch.optim.SGD([params], lr=lr, foreach=False)
        case Nesterov(lr, momentum):
            return torch.optim.SGD([params], lr=lr, momentum=momentum, nesterov=True, foreach=False)
        case Adam(lr, betas, eps):
            return torch.optim.Adam([params], lr=lr, betas=betas, eps=eps, foreach=False)
    raise AssertionError(outer)


def run(outer: Outer, params: Tensor, deltas: list[Tensor]) -> tuple[Tensor, State]:
    state = outer.init(params.numel())
    for delta in deltas:
        params, state = outer.step(state, params, delta)
    return params, state


@pytest.mark.parametrize("outer", IN_TORCH, ids=str)
def test_torch_optim_takes_the_same_steps(outer: Outer) -> None:
    num_steps = 60
    start = torch.randn(257)
    deltas = [torch.randn(257) * 0.1 for _ in range(num_steps)]
    reference = torch.nn.Parameter(start.clone())
    optimizer = as_torch(outer, reference)
    params, state = start, outer.init(257)
    travelled = torch.zeros(257)
    for delta in deltas:
        reference.grad = delta.clone()
        optimizer.step()
        before = params
        params, state = outer.step(state, params, delta)
        travelled += (params - before).abs() + params.abs()
    # torch may fuse multiply and add or order them otherwise, where we round each by itself: a few roundings (of 2⁻²⁴,
    # half a unit in the last place) a step in the update and one in the sum. The updates' own errors decay with
    # momentum, a factor 1 / (1 − 0.9) at most.
    assert torch.all((params - reference.detach()).abs() <= 40 * 2**-24 * travelled)


def test_adam_is_torch_adam_in_double_precision_up_to_rounding() -> None:
    outer = Adam(0.3, (0.9, 0.95), 0.1)
    start, deltas = torch.randn(64), [torch.randn(64) for _ in range(20)]
    reference = torch.nn.Parameter(start.double())
    optimizer = as_torch(outer, reference)
    for delta in deltas:
        reference.grad = delta.double()
        optimizer.step()
    params, _ = run(outer, start, deltas)
    # 20 steps of size ≤ lr/√(1 − β₂), each with about eight fp32 roundings
    assert torch.allclose(params.double(), reference.detach(), rtol=0, atol=20 * 8 * 1.4 * 2**-24)


def test_nesterov_golden_trajectory() -> None:
    """Constant Δ = 1, lr 0.5, μ 0.5: buf = 1, 1.5, 1.75, …; Θ falls by 0.5·(1 + buf/2). Exact in binary."""
    outer = Nesterov(lr=0.5, momentum=0.5)
    params, state = torch.tensor([4.0]), outer.init(1)
    bufs, seen = [], []
    for _ in range(4):
        params, state = outer.step(state, params, torch.tensor([1.0]))
        bufs.append(state["momentum"].item())
        seen.append(params.item())
    assert bufs == [1.0, 1.5, 1.75, 1.875]
    assert seen == [3.25, 2.375, 1.4375, 0.46875]


def test_sgd_golden_trajectory() -> None:
    params, state = run(SGD(0.5), torch.tensor([4.0, -1.0]), [torch.tensor([1.0, -2.0])] * 3)
    assert params.tolist() == [2.5, 2.0]
    assert state == {}


def test_the_first_adam_step_is_the_sign_of_delta() -> None:
    params, state = Adam(0.5, eps=1e-12).step(Adam(0.5).init(2), torch.tensor([1.0, 1.0]), torch.tensor([0.25, -8.0]))
    # m/(1−β₁) = Δ and √(v/(1−β₂)) = |Δ|; β is no binary fraction, so a few roundings remain
    assert torch.allclose(params, torch.tensor([0.5, 1.5]), rtol=0, atol=4 * 2**-24)
    assert state["step"].item() == 1
    assert state["step"].dtype == torch.int64


def test_without_momentum_nesterov_is_sgd() -> None:
    start, deltas = torch.randn(100), [torch.randn(100) for _ in range(10)]
    assert torch.equal(run(Nesterov(0.7, 0.0), start, deltas)[0], run(SGD(0.7), start, deltas)[0])


def test_sgd_of_one_averages_parameters() -> None:
    """LocalSGD: Θ − 1·mean(Θ − θ_m) = mean(θ_m). Small integers, so that no rounding hides the identity."""
    anchor = torch.tensor([3.0, -5.0])
    thetas = torch.tensor([[1.0, 2.0], [5.0, -8.0]])
    params, _ = SGD(1.0).step({}, anchor, (anchor - thetas).mean(0))
    assert torch.equal(params, thetas.mean(0))


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_shards_get_the_bits_of_the_whole(outer: Outer) -> None:
    start, deltas = torch.randn(1000), [torch.randn(1000) for _ in range(5)]
    whole, whole_state = run(outer, start, deltas)
    for cut in (1, 7, 512, 999):  # cuts that are no multiple of a vector register
        parts = [run(outer, start[part], [d[part] for d in deltas]) for part in (slice(0, cut), slice(cut, None))]
        assert torch.equal(torch.cat([params for params, _ in parts]), whole)
        for name, tensor in whole_state.items():
            if tensor.dim():
                assert torch.equal(torch.cat([state[name] for _, state in parts]), tensor)


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@pytest.mark.parametrize("num_elements", [65_535, 65_536, 65_537, 150_001])
def test_long_vectors_get_the_bits_of_short_ones(outer: Outer, num_elements: int) -> None:
    start, deltas = torch.randn(num_elements), [torch.randn(num_elements) for _ in range(3)]
    whole, whole_state = run(outer, start, deltas)
    cuts = [slice(first, first + 10_007) for first in range(0, num_elements, 10_007)]
    parts = [run(outer, start[cut], [delta[cut] for delta in deltas]) for cut in cuts]
    assert torch.equal(torch.cat([params for params, _ in parts]), whole)
    for name, tensor in whole_state.items():
        pieces = [state[name] for _, state in parts]
        assert torch.equal(torch.cat(pieces) if tensor.dim() else pieces[0], tensor)


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_new_parameters_may_be_written_over_the_outer_gradient(outer: Outer) -> None:
    start, delta = torch.randn(100_003), torch.randn(100_003)
    _, state = run(outer, start, [torch.randn(100_003)] * 2)
    kept, kept_state = start.clone(), {name: tensor.clone() for name, tensor in state.items()}
    params, new_state = outer.step(state, start, delta)
    over, over_state = outer.step(state, start, delta, out=delta)
    assert over.data_ptr() == delta.data_ptr()
    assert torch.equal(over, params)
    assert torch.equal(start, kept)
    for name, tensor in state.items():
        assert torch.equal(tensor, kept_state[name])
        assert torch.equal(over_state[name], new_state[name])


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_a_step_writes_to_nothing_and_can_be_repeated(outer: Outer) -> None:
    start, delta = torch.randn(50), torch.randn(50)
    _, state = run(outer, start, [torch.randn(50)] * 2)
    kept = [start.clone(), delta.clone(), {name: tensor.clone() for name, tensor in state.items()}]
    params, new_state = outer.step(state, start, delta)
    again, again_state = outer.step(state, start, delta)
    assert torch.equal(params, again)
    assert torch.equal(start, kept[0])
    assert torch.equal(delta, kept[1])
    for name, tensor in state.items():
        assert torch.equal(tensor, kept[2][name])
        assert torch.equal(new_state[name], again_state[name])
    inputs = {each.data_ptr() for each in (start, delta, *state.values())}
    assert inputs.isdisjoint(each.data_ptr() for each in (params, *new_state.values()))


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_an_empty_fragment_is_stepped(outer: Outer) -> None:
    params, _ = outer.step(outer.init(0), torch.empty(0), torch.empty(0))
    assert params.shape == (0,)


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_outer_optimizers_survive_json(outer: Outer) -> None:
    again = OUTER_OPTIMIZERS.read(json.loads(json.dumps(outer.to_dict())))
    assert again == outer
    assert hash(again) == hash(outer)


def test_numbers_are_kept_as_floats() -> None:
    assert SGD(1).to_dict() == {"type": "SGD", "lr": 1.0}
    assert isinstance(SGD(1).lr, float)
    assert Adam(1, betas=[0, 0.5]) == Adam(1.0, betas=(0.0, 0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(0), r"SGD\(lr=…\) must be a finite number above 0, not 0"),
        (lambda: SGD(float("inf")), "above 0, not inf"),
        (lambda: SGD("0.7"), "above 0, not '0.7'"),
        (lambda: SGD(True), "above 0, not True"),
        (lambda: Nesterov(momentum=1.0), r"Nesterov\(momentum=…\) must be a number from 0 to 1 but below 1, not 1.0"),
        (lambda: Nesterov(momentum=-0.1), "not -0.1"),
        (lambda: Nesterov(lr=float("nan")), r"Nesterov\(lr=…\).* not nan"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), r"each of Adam\(betas=…\) must be .* below 1, not 1.0"),
        (lambda: Adam(0.1, betas=(0.9,)), "must be two numbers"),
        (lambda: Adam(0.1, betas=0.9), "must be two numbers, not 0.9"),
        (lambda: DelayedNesterov(buffer=0), r"DelayedNesterov\(buffer=…\) must be a whole number of at least 1, not 0"),
        (lambda: DelayedNesterov(c=-0.1), r"DelayedNesterov\(c=…\) must be a number from 0 to 1, not -0.1"),
        (lambda: Adam(0.1, eps=0.0), r"Adam\(eps=…\) must be a finite number above 0"),
        (
            lambda: OUTER_OPTIMIZERS.read({"type": "Nestrov"}),
            "'Nestrov' is not a known outer optimizer; did you mean 'Nesterov'",
        ),
        (
            lambda: OUTER_OPTIMIZERS.read({"type": "Nesterov", "moment": 0.9}),
            "no field 'moment'; did you mean 'momentum'",
        ),
        (lambda: OUTER_OPTIMIZERS.read({"type": "SGD"}), "SGD needs a value for 'lr'"),
    ],
)
def test_wrong_arguments_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("state", "params", "delta", "message"),
    [
        ({"momentum": torch.zeros(3)}, torch.zeros(3), torch.zeros(1), "delta of .* 3 elements, not \\(1,\\) float32"),
        ({"momentum": torch.zeros(2)}, torch.zeros(3), torch.zeros(3), "momentum of .* 3 elements, not \\(2,\\)"),
        ({"momentum": torch.zeros(3)}, torch.zeros(3).double(), torch.zeros(3), "params of .* not \\(3,\\) float64"),
        ({"momentum": torch.zeros(3)}, torch.zeros(3), torch.zeros(3).bfloat16(), "delta of .* not \\(3,\\) bfloat16"),
        ({"momentum": torch.zeros(4)}, torch.zeros(2, 2), torch.zeros(4), "params of .* not \\(2, 2\\)"),
        ({}, torch.zeros(3), torch.zeros(3), r"state of .* holds \['momentum'\], not \[\]"),
        (Adam(1.0).init(3), torch.zeros(3), torch.zeros(3), r"not \['first_moment', 'second_moment', 'step'\]"),
    ],
)
def test_a_step_refuses_what_does_not_fit(state: State, params: Tensor, delta: Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Nesterov().step(state, params, delta)


# --- Delayed Nesterov -------------------------------------------------------------------------------------------------


def test_delayed_nesterov_of_one_without_spreading_is_nesterov() -> None:
    params = torch.randn(100, generator=torch.Generator().manual_seed(0))
    plain, delayed = Nesterov(lr=0.6, momentum=0.8), DelayedNesterov(lr=0.6, momentum=0.8, buffer=1, c=0.0)
    states, values = [plain.init(100), delayed.init(100)], [params, params]
    for step in range(5):
        delta = torch.randn(100, generator=torch.Generator().manual_seed(1 + step))
        for i, outer in enumerate((plain, delayed)):
            values[i], states[i] = outer.step(states[i], values[i], delta)
        assert torch.equal(*values)


@pytest.mark.parametrize(("buffer", "c"), [(2, 0.0), (3, 0.1), (4, 0.25)])
def test_delayed_nesterov_is_the_papers_algorithm(buffer: int, c: float) -> None:
    outer, beta, lr = DelayedNesterov(lr=0.5, momentum=0.9, buffer=buffer, c=c), 0.9, 0.5
    theta = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values, state = theta.float(), outer.init(10)
    m, gathered = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    for s in range(1, 11):
        g = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        gathered = gathered + g
        if s % buffer == 0:
            m = beta * m + gathered / buffer
            theta = theta - lr * ((1 - c * buffer + c) * beta * m + g / buffer)
            gathered = torch.zeros_like(gathered)
        else:
            theta = theta - lr * (c * beta * m + g / buffer)
        values, state = outer.step(state, values, g.float())
    torch.testing.assert_close(values.double(), theta, rtol=1e-5, atol=1e-5)  # fp32 against fp64


def test_buffered_outer_gradients_are_applied_once() -> None:
    """Without momentum N outer gradients move the model by their mean, whatever N is."""
    outer = DelayedNesterov(lr=1.0, momentum=0.0, buffer=4)
    values, state = torch.zeros(1), outer.init(1)
    for _ in range(8):
        values, state = outer.step(state, values, torch.ones(1))
    assert values.item() == -2.0


def test_delayed_nesterovs_c_is_bounded_by_its_buffer() -> None:
    assert DelayedNesterov(buffer=4, c=0.25).c == 0.25
    with pytest.raises(ConfigError, match="exceeds 1/buffer = 0.25"):
        DelayedNesterov(buffer=4, c=0.3)


def test_delayed_nesterov_golden_trajectory() -> None:
    """Δ = 1, N = 2, c = 1/4, lr 1, μ 1/2, exact in binary. m is 0, 1, 1, 3/2; each step takes Δ/2 + share·m/2, share
    1/4 or 3/4."""
    outer = DelayedNesterov(lr=1.0, momentum=0.5, buffer=2, c=0.25)
    params, state = torch.tensor([4.0]), outer.init(1)
    seen, momenta, gathered = [], [], []
    for _ in range(4):
        params, state = outer.step(state, params, torch.tensor([1.0]))
        seen.append(params.item())
        momenta.append(state["momentum"].item())
        gathered.append(state["buffer"].item())
    assert seen == [3.5, 2.625, 2.0, 0.9375]
    assert momenta == [0.0, 1.0, 1.0, 1.5]
    assert gathered == [1.0, 0.0, 1.0, 0.0]
    assert state["step"].item() == 4
    assert state["step"].dtype == torch.int64
