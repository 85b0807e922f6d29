"""What learners live through in the contract tests, the same on every exchange. Importable by processes that pytest
does not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import diloco
from diloco import Learner, Method
from diloco.errors import DilocoError
from diloco.exchange.base import Exchange
from diloco.learner.held import HeldExperts

LEARNERS = 3


@dataclass(frozen=True)
class Scenario:
    """One run. `fault` happens to learner 1: another "layout", another "method", other "buffers", another "base", a
    "nan" gradient, or an "error" in its own code.

    `resume_at`: the run is saved after this step and goes on over new exchanges. `trains`: learners that train part of
        the model.
    `overlaps`: learners with an overlap of their own. `tokens`: in a step of learner 0; each next one has 7 more, where
    there are any. `buffers`, `static`: as `Learner` takes them; with `buffers`, the model has running statistics.
    `has_list`: whether the names of its tensors hold a list of layers. `experts`: learners that train a part of the
        experts; unless it is None, the model has a mixture of experts. `holds`: learners whose models have a part of
        the experts, as `Learner` takes it.
    """

    name: str
    method: dict[str, Any]
    steps: int = 14
    dtype: str = "float32"
    inner: str = "adamw"
    fault: str = ""
    resume_at: int = 0
    trains: dict[int, tuple[str, ...]] = field(default_factory=dict)
    overlaps: dict[int, int] = field(default_factory=dict)
    tokens: int = 10
    buffers: str = ""
    static: str = "exchange"
    has_list: bool = True
    experts: dict[int, str] | None = None
    holds: dict[int, str] = field(default_factory=dict)

    def held(self, index: int) -> HeldExperts | None:
        """The experts of a learner's model; None: all."""
        text = {int(key): each for key, each in self.holds.items()}.get(index)
        return None if text is None else HeldExperts.of(text, Method.from_dict(self.method))

    def tokens_of(self, index: int) -> int:
        """In a step of a learner."""
        return self.tokens and self.tokens + 7 * index

    @property
    def parts(self) -> int:
        return 2 if self.resume_at else 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Result:
    """One learner's end: its tensors by name, plain facts, and the error that ended it, as [type, text]."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    error: list[str] | None = None


class Gate(nn.Module):
    """A router of two experts a row, with a bias that training moves without a gradient. It counts by itself what the
    learner counts with hooks."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) / 4)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.counts = [0] * experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        indices = (logits + self.e_score_correction_bias).topk(2).indices
        if torch.is_grad_enabled():
            for expert in indices.flatten().tolist():
                self.counts[expert] += 1
                self.e_score_correction_bias[expert] -= 1e-3
        return logits, logits.gather(1, indices).sigmoid(), indices


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(experts, 8, width) / 8)
        self.w_out = nn.Parameter(torch.randn(experts, width, 8) / 4)

    def forward(self, x: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("tkhw,tw->tkh", self.w_in[indices], x))
        return torch.einsum("tkwh,tkh,tk->tw", self.w_out[indices], hidden, scores)


class Moe(nn.Module):
    """A mixture of experts with the names of transformers."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate, self.experts = Gate(width, experts), Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        _, scores, indices = self.gate(x)
        return self.experts(x, scores, indices)


class Net(nn.Module):
    """110 thousand parameters, so four codec segments, and every kind of tensor that is not trained."""

    def __init__(self, width: int = 160, *, normed: bool = False, has_list: bool = True, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(24, width)
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.layers = nn.ModuleList(layers) if has_list else nn.ModuleDict(zip("abcd", layers, strict=True))
        self.head = nn.Linear(width, 33)
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("shift", torch.rand(33))
        self.register_buffer("seed", torch.randint(0, 1000, ()))
        self.register_buffer("empty", torch.empty(0))
        self.norm = nn.BatchNorm1d(width) if normed else nn.Identity()
        self.moe = Moe(width, experts) if experts else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x) * self.scale)
        for layer in self.layers.children():
            x = x + torch.tanh(layer(x))
        if self.moe is not None:
            x = x + self.moe(x)
        return self.head(x) + self.shift


EXPERTS = 6


def make_model(scenario: Scenario, index: int, *, whole: bool = False) -> Net:
    """Every learner starts from other values; the run's are those of learner 0's `whole` model. The base is the same
    where each brings it."""
    torch.manual_seed(100 + index)
    width = 161 if scenario.fault == "layout" and index == 1 else 160
    held = None if whole else scenario.held(index)
    experts = 0 if scenario.experts is None else EXPERTS if held is None else len(held.experts)
    model = Net(width, normed=bool(scenario.buffers) and not experts, has_list=scenario.has_list, experts=experts).to(
        getattr(torch, scenario.dtype)
    )
    if scenario.static == "digest":
        generator = torch.Generator().manual_seed(1)
        model.scale.data.copy_(torch.rand(width, generator=generator))
        model.shift.copy_(torch.rand(33, generator=generator))
        if scenario.fault == "base" and index == 1:
            model.shift[7] += 1e-6
    return model


def make_optimizer(scenario: Scenario, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if scenario.inner == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    return torch.optim.AdamW(parameters, lr=3e-3)


def inner_gradient(model: nn.Module, index: int, step: int) -> None:
    """The gradient on data that only this learner has."""
    generator = torch.Generator().manual_seed(1000 * index + step)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(6, 24, generator=generator).to(dtype), torch.randn(6, 33, generator=generator).to(dtype)
    (model(x) - y).square().mean().backward()


def live(
    scenario: Scenario,
    part: int,
    index: int,
    exchange: Exchange,
    carried: dict[str, Any],
    all_end: Callable[[], None] = lambda: None,
) -> Result:
    """A learner's life, or the part of it before or after a restart; `carried` is what it saved in between.

    `all_end` waits until the others have trained too: one that has left is no part of what eager learners expect a mean
    to be of.
    """
    method = Method.from_dict(scenario.method)
    if scenario.fault == "method" and index == 1:
        method = replace(method, sync_every=method.sync_every + 1)
    model = make_model(scenario, index)
    optimizer = make_optimizer(scenario, model)
    first, last = 1, scenario.steps
    if scenario.resume_at:
        first, last = (1, scenario.resume_at) if part == 0 else (scenario.resume_at + 1, scenario.steps)
    resume = None
    if part == 1 and index == 0:  # as training frameworks do, before anything is attached
        model.load_state_dict(carried["model"])
        optimizer.load_state_dict(carried["optimizer"])
        resume = carried["learner"]
    trains = {int(key): patterns for key, patterns in scenario.trains.items()}.get(index)
    trains_experts = {int(key): text for key, text in (scenario.experts or {}).items()}.get(index)
    overlap = {int(key): steps for key, steps in scenario.overlaps.items()}.get(index)
    buffers: Any = "local" if scenario.fault == "buffers" and index == 1 else scenario.buffers or "refuse"
    static: Any = scenario.static
    held = {int(key): text for key, text in scenario.holds.items()}.get(index)
    whole = make_model(scenario, index, whole=True) if held is not None and index == 0 else None
    with Learner(
        model, optimizer, method=method, exchange=exchange, trains=trains, trains_experts=trains_experts,
        holds_experts=held, whole=whole, overlap=overlap, buffers=buffers, static=static, resume=resume,
    ) as learner:  # fmt: skip
        if part == 1 and index > 0:
            if index == 1:
                model.load_state_dict(carried["model"])
            optimizer.load_state_dict(carried["optimizer"])
            learner.load_state_dict(carried["learner"])
        assert learner.resumed is (True if part == 1 else None)
        for step in range(first, last + 1):
            if scenario.fault and index == 1 and step == 7:
                if scenario.fault == "error":
                    raise ArithmeticError("the training code failed")
                with torch.no_grad():
                    model.head.bias[3] = torch.nan
            inner_gradient(model, index, step)
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=scenario.tokens_of(index))
        if part + 1 < scenario.parts:
            carried["learner"] = learner.state_dict()
            carried["model"] = {name: value.clone() for name, value in model.state_dict().items()}
            carried["optimizer"] = optimizer.state_dict()
        result = finish(model, learner)
        all_end()
        learner.close()
    exchange.close()
    return result


def finish(model: nn.Module, learner: Learner) -> Result:
    """Everything that must be the same on every exchange, once the answers that are on their way have come."""
    learner.state_dict()
    metrics = learner.metrics()
    tensors = {f"parameters.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    tensors |= {f"global.{name}": value for name, value in learner.global_state_dict().items()}
    kept = ("learner", "steps", "tokens", "versions", "merges", "ledger", "run_tokens", "num_bytes")
    return Result(tensors, {key: metrics[key] for key in kept})


def failed(error: Exception) -> Result:
    return Result({}, {}, [type(error).__name__, str(error)])


FAILURES = (DilocoError, ArithmeticError)
"""What a life may end with; anything else is a bug and ends the test."""


def _scenarios() -> list[Scenario]:
    by_layer = diloco.ByLayer(layers=2)
    methods = {
        "data parallel": diloco.DataParallel(),
        "data parallel, e3m0": diloco.DataParallel(codec="e3m0"),
        "data parallel, by layer": replace(
            diloco.DataParallel(fragments=by_layer, codec=("bf16", "fp32")), offsets=(1, 1, 1)
        ),
        "local sgd": diloco.LocalSGD(sync_every=4),
        "local sgd, tokens": diloco.LocalSGD(sync_every=4, weight="tokens"),
        "diloco": diloco.DiLoCo(sync_every=4),
        "diloco, sgd": diloco.DiLoCo(sync_every=4, outer=diloco.SGD(lr=0.5)),
        "diloco, adam": diloco.DiLoCo(sync_every=4, outer=diloco.Adam(lr=0.01), codec=("fp32", "int8")),
        "diloco, H overlap": diloco.DiLoCo(sync_every=4, overlap=4, codec="int4"),
        "diloco, tokens and feedback": diloco.DiLoCo(sync_every=4, weight="tokens", codec="e3m0", error_feedback=True),
        "muloco": diloco.MuLoCo(sync_every=4),
        "sparseloco": diloco.SparseLoCo(sync_every=4),
        "streaming, overlap 0": diloco.StreamingDiLoCo(sync_every=6, overlap=0, fragments=by_layer),
        "streaming, overlap 1": diloco.StreamingDiLoCo(sync_every=6, overlap=1, fragments=by_layer, mix=0.0),
        "streaming, overlap 4": diloco.StreamingDiLoCo(
            sync_every=6, overlap=4, fragments=by_layer, error_feedback=True
        ),
        "streaming, overlap H": diloco.StreamingDiLoCo(sync_every=6, overlap=6, fragments=by_layer),
        "streaming, more fragments than steps": diloco.StreamingDiLoCo(
            sync_every=2, overlap=1, fragments=diloco.Balanced(5), codec="int8"
        ),
        "streaming, offsets": diloco.StreamingDiLoCo(
            sync_every=6, overlap=3, offsets=(5, 1, 1), fragments=by_layer, weight="tokens", codec=("int8", "bf16")
        ),
        "delayed": diloco.DelayedDiLoCo(sync_every=4),
        "delayed, 2H, by layer": diloco.DelayedDiLoCo(sync_every=3, intervals=2, fragments=by_layer, codec="int8"),
        "eager": diloco.EagerDiLoCo(sync_every=4),
        "eager, int4, by layer": diloco.EagerDiLoCo(
            sync_every=4, fragments=by_layer, codec="int4", error_feedback=True, weight="tokens"
        ),
        "eager, 2H": diloco.EagerDiLoCo(sync_every=3, intervals=2, codec=("e3m0", "fp32")),
        "keep displacement": replace(
            diloco.StreamingDiLoCo(sync_every=6, overlap=3, fragments=by_layer), adopt=diloco.KeepDisplacement()
        ),
        "screened": replace(
            diloco.StreamingDiLoCo(
                sync_every=6, overlap=4, fragments=by_layer, weight="tokens", error_feedback=True
            ),
            screen=diloco.NormOutliers(1.01),
        ),
        "changing intervals": diloco.DiLoCo(sync_every=((0, 2), (6, 4)), fragments=diloco.Balanced(2)),
        "streaming, balanced": diloco.StreamingDiLoCo(
            sync_every=6, overlap=2, fragments=diloco.Balanced(6), codec="int4"
        ),
        "diloco, fp16": diloco.DiLoCo(sync_every=5, codec="fp16"),
    }  # fmt: skip
    experts = {
        "diloco": diloco.DiLoCo(
            sync_every=4, codec="int8", error_feedback=True,
            fragments=diloco.Experts(groups=3, trunk=by_layer, every=2, up="fp32", outer=diloco.SGD(lr=0.9)),
        ),
        "tokens": diloco.DiLoCo(
            sync_every=3, weight="tokens",
            fragments=diloco.Experts(groups=2, trunk=diloco.Whole(), up="e3m0", down="bf16"),
        ),
        "streaming": diloco.StreamingDiLoCo(
            sync_every=4, overlap=3, fragments=diloco.Experts(groups=6, every=3, down="fp32"), weight="tokens"
        ),
        "delayed": diloco.DelayedDiLoCo(
            sync_every=3, fragments=diloco.Experts(groups=2, every=2, outer=diloco.Adam(lr=0.01)), weight="tokens"
        ),
    }  # fmt: skip
    parts = {0: "0-3", 1: "2,4", 2: "5"}
    holds = {  # by the number of groups. In virtual time 2 starts first, and 0 and 1 as what is due after step 1 needs
        2: {1: "0-2 of 6", 2: "3-5 of 6"},
        3: {0: "0-3 of 6", 1: "0-1,4-5 of 6", 2: "2-5 of 6"},
        6: {0: "0-4 of 6", 1: "0,2-5 of 6", 2: "1,4 of 6"},
    }
    scenarios = [Scenario(name, method.to_dict()) for name, method in methods.items()]
    streaming = methods["streaming, overlap 4"].to_dict()
    return [
        *scenarios,
        Scenario(
            "streaming, any model", diloco.StreamingDiLoCo(sync_every=6, overlap=2, mix=0.0).to_dict(), has_list=False
        ),
        Scenario("no tokens", methods["local sgd, tokens"].to_dict(), tokens=0),
        Scenario("parameters", diloco.DataParallel(average="parameters").to_dict(), inner="sgd"),
        Scenario("bf16 parameters", methods["diloco, H overlap"].to_dict(), dtype="bfloat16"),
        Scenario("resumed", streaming, resume_at=8),
        Scenario("resumed, adam", methods["diloco, adam"].to_dict(), resume_at=9),
        Scenario("resumed, eager", methods["eager, int4, by layer"].to_dict(), resume_at=9),
        Scenario(
            "part of the model",
            methods["diloco, tokens and feedback"].to_dict(),
            trains={1: ("layers.*",), 2: ("*.bias",)},
        ),
        Scenario("part of the fragments", streaming, trains={1: ("layers.[01].*",), 2: ("embed.*", "layers.[13].*")}),
        Scenario("own overlaps", streaming, overlaps={0: 1, 1: 6}),
        Scenario("own overlaps that are the method's", streaming, overlaps={0: 4, 1: 4, 2: 4}),
        Scenario("averaged", methods["diloco"].to_dict(), buffers="average"),
        Scenario("averaged, adam, lossy", methods["diloco, adam"].to_dict(), buffers="average"),
        Scenario("averaged, keep displacement", methods["keep displacement"].to_dict(), buffers="average"),
        Scenario("averaged, eager", methods["eager, int4, by layer"].to_dict(), buffers="average"),
        Scenario("averaged, resumed", methods["eager, int4, by layer"].to_dict(), resume_at=9, buffers="average"),
        Scenario("local", methods["diloco"].to_dict(), buffers="local"),
        Scenario("local, resumed", methods["diloco"].to_dict(), resume_at=9, buffers="local"),
        Scenario("base", streaming, static="digest"),
        Scenario("base, resumed", streaming, resume_at=8, static="digest"),
        *(
            Scenario(f"experts, {name}", method.to_dict(), experts={}, buffers="average")
            for name, method in experts.items()
        ),
        *(
            Scenario(f"parts, {name}", method.to_dict(), experts=parts, buffers="average")
            for name, method in experts.items()
        ),
        *(
            Scenario(
                f"held, {name}", method.to_dict(), experts={}, buffers="average", holds=holds[method.fragments.groups]
            )
            for name, method in experts.items()
            if isinstance(method.fragments, diloco.Experts)
        ),
        # One holder for each expert: the counts of routed tokens, by which several are weighed, begin anew.
        Scenario(
            "held, resumed",
            experts["diloco"].to_dict(),
            experts={},
            buffers="average",
            resume_at=7,
            holds={0: "0-1 of 6", 1: "2-3 of 6", 2: "4-5 of 6"},
        ),
        Scenario("parts, resumed", experts["tokens"].to_dict(), experts=parts, buffers="average", resume_at=7),
        Scenario("other buffers", methods["diloco"].to_dict(), fault="buffers", buffers="average"),
        Scenario("other base", methods["diloco"].to_dict(), fault="base", static="digest"),
        Scenario("other layout", methods["diloco"].to_dict(), fault="layout"),
        Scenario("other method", methods["diloco"].to_dict(), fault="method"),
        Scenario("nan", methods["diloco, tokens and feedback"].to_dict(), fault="nan"),
        Scenario("error", streaming, fault="error"),
    ]


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}
