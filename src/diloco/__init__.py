"""Train one PyTorch model across islands of compute joined by ordinary internet links.

The public names. Each is imported from its module at its first use, so `import diloco` is fast and does not import
torch.
"""

from typing import TYPE_CHECKING

from diloco import errors as errors

if TYPE_CHECKING:
    from diloco.core.adopt import Eager, KeepDisplacement, Mix, Replace
    from diloco.core.codecs import BF16, E3M0, FP16, FP32, Int4, Int8, SignPruned, TopK, TwoBit
    from diloco.core.fragments import Balanced, ByLayer, Experts, LayersOrBalanced, Named, Whole
    from diloco.core.merges import (
        CoordinateMedian,
        GeometricMedian,
        HeLoCo,
        Mean,
        MedianNormClip,
        MultiKrum,
        NormOutliers,
        NormZScore,
        RadialDirectional,
        SenderMean,
        TrimmedMean,
    )
    from diloco.core.method import Method
    from diloco.core.outer import SGD, Adam, DelayedNesterov, Nesterov
    from diloco.core.presets import (
        AsyncDiLoCo,
        DataParallel,
        DecoupledDiLoCo,
        DelayedDiLoCo,
        DiLoCo,
        EagerDiLoCo,
        LocalSGD,
        MuLoCo,
        SparseLoCo,
        StreamingDiLoCo,
    )
    from diloco.core.quorum import AllLive, Called, Pushed
    from diloco.errors import DilocoError
    from diloco.exchange.collective import Collective
    from diloco.exchange.local import run_local
    from diloco.exchange.remote import connect
    from diloco.following.follower import follow
    from diloco.learner import Learner
    from diloco.learner.pieces import Box, Gather, Piece
    from diloco.learner.sampler import LeasedSampler
    from diloco.protocol.steering import Pool

    __version__: str

__all__ = [
    # for training scripts
    "Learner", "LeasedSampler", "run_local", "Collective", "connect", "Pool",
    # readers of a run
    "follow",
    # layout of sharded tensors, for Learner(gather=…)
    "Gather", "Piece", "Box",
    # methods
    "Method", "DataParallel", "LocalSGD", "DiLoCo", "StreamingDiLoCo", "MuLoCo", "SparseLoCo", "DelayedDiLoCo",
    "EagerDiLoCo",
    "DecoupledDiLoCo", "AsyncDiLoCo",
    # the values of a method: fragments, who calls a merge, outer optimizers, merges, adoption, codecs
    "Whole", "ByLayer", "Balanced", "LayersOrBalanced", "Named", "Experts",
    "AllLive", "Called", "Pushed",
    "SGD", "Nesterov", "DelayedNesterov", "Adam",
    "Mean", "SenderMean", "RadialDirectional", "HeLoCo", "CoordinateMedian", "TrimmedMean", "GeometricMedian",
    "MultiKrum",
    "MedianNormClip", "NormOutliers", "NormZScore",
    "Replace", "Mix", "KeepDisplacement", "Eager",
    "FP32", "BF16", "FP16", "Int8", "Int4", "E3M0", "TwoBit", "TopK", "SignPruned",
    # errors and version
    "DilocoError", "errors", "__version__",
]  # fmt: skip

_MODULES = (
    "errors", "protocol.steering", "core.quorum", "core.codecs", "core.fragments", "core.merges", "core.outer",
    "core.adopt", "core.method", "core.presets", "learner", "learner.pieces", "learner.sampler", "exchange.local",
    "exchange.collective", "exchange.remote", "following.follower",
)  # fmt: skip
"""Homes of the public names, those without torch first: a name is looked up in one after the other."""


def __getattr__(name: str) -> object:
    """Import a public name from its module at its first use (PEP 562)."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("diloco")
    else:
        homes = (importlib.import_module(f"diloco.{module}") for module in _MODULES)
        value = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
