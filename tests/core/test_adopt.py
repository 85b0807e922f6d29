"""Replace and Mix: identities, separately rounded arithmetic, and what becomes of the overlap's tokens."""

import json

import pytest
import torch

from diloco.core.adopt import ADOPTIONS, Adopt, Eager, KeepDisplacement, Mix, Replace
from diloco.errors import ConfigError


def test_replace_takes_the_global_value() -> None:
    assert Replace().adopt(torch.tensor([1.0]), torch.tensor([2.0])).tolist() == [2.0]


def test_mix_golden() -> None:
    assert Mix(0.25).adopt(torch.tensor([4.0, -8.0]), torch.tensor([8.0, 0.0])).tolist() == [7.0, -2.0]


def test_mix_rounds_each_product_and_the_sum_once() -> None:
    local, global_ = torch.randn(999), torch.randn(999)
    alpha, rest = (torch.tensor(value, dtype=torch.float32).double() for value in (0.3, 1 - 0.3))
    # The product of two fp32 numbers is exact in fp64; so each .float() is the one rounding of that operation.
    kept, taken = (alpha * local.double()).float(), (rest * global_.double()).float()
    assert torch.equal(Mix(0.3).adopt(local, global_), (kept.double() + taken.double()).float())


def test_the_ends_of_mixing_are_exact() -> None:
    special = torch.tensor([-0.0, 0.0, 1e-45, 3.4e38, -1.5])
    other = torch.tensor([1.0, -1.0, -3.4e38, 3.4e38, 0.1])
    for local, global_ in [(special, other), (other, special)]:
        bits = torch.int32
        assert torch.equal(Mix(0.0).adopt(local, global_).view(bits), Replace().adopt(local, global_).view(bits))
        assert torch.equal(Mix(0.0).adopt(local, global_).view(bits), global_.view(bits))
        assert torch.equal(Mix(1.0).adopt(local, global_).view(bits), local.view(bits))


@pytest.mark.parametrize("adopt", [Replace(), Mix(0.0), Mix(0.5), Mix(1.0)], ids=str)
def test_adopting_writes_to_nothing(adopt: Adopt) -> None:
    local, global_ = torch.randn(3, 4), torch.randn(3, 4)
    kept = local.clone(), global_.clone()
    assert adopt.adopt(local, global_).shape == (3, 4)
    assert torch.equal(local, kept[0])
    assert torch.equal(global_, kept[1])


def test_only_what_overwrites_discards_the_overlap() -> None:
    assert not Replace().keeps_pending
    assert not Mix(0.0).keeps_pending
    assert Mix(0.5).keeps_pending
    assert Mix(1.0).keeps_pending
    assert KeepDisplacement().keeps_pending
    assert Eager().keeps_pending


@pytest.mark.parametrize("adopt", [Replace(), Mix(0.5)], ids=str)
def test_adoptions_survive_json(adopt: Adopt) -> None:
    assert ADOPTIONS.read(json.loads(json.dumps(adopt.to_dict()))) == adopt


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), "0.5", True, None])
def test_alpha_is_between_0_and_1(alpha: object) -> None:
    with pytest.raises(ConfigError, match=r"Mix\(alpha=…\) must be a number from 0 to 1, not"):
        Mix(alpha)  # type: ignore[arg-type]


def test_a_typo_is_named() -> None:
    with pytest.raises(ConfigError, match="'Replac' is not a known adoption; did you mean 'Replace'"):
        ADOPTIONS.read({"type": "Replac"})
    with pytest.raises(ConfigError, match="Mix needs a value for 'alpha'"):
        ADOPTIONS.read({"type": "Mix"})
