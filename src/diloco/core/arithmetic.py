"""How the arithmetic of long vectors on the host is computed: by torch operations, or by loops that Numba compiles at
run time (`diloco.compute`), which give the same bits several times as fast.

The torch operations are the reference. The loops replace those that cost most: the block formats and casts
(`core.codecs`), weighted sums and block sums (`core.merges`), outer steps and what surrounds them (`core.outer`,
`core.global_fragment`), adoptions (`core.adopt`), the flush of denormals (`core.memory`). A loop holds the
interpreter's lock only while it starts. It goes through a run of segments, whose blocks stay near a core.

What codecs, outer optimizers and adoptions do to one element is a function of theirs, in their own files; one without
it is computed by torch. Numba is imported when the first long vector comes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args

from diloco.errors import ConfigError

log = logging.getLogger("diloco")

_LOOPS = "diloco.compute.loops"

Arithmetic = Literal["auto", "compiled", "torch"]

WORTH_ELEMENTS = 1 << 22
"""Elements of a vector from which the loops are loaded: torch closes a round of it in .2 s (e3m0, eight learners), and
Numba takes .9 s to be ready, and some seconds for the first compilation on a machine."""


@dataclass
class _Chosen:
    arithmetic: Arithmetic = "auto"
    loops: ModuleType | None = None


_chosen = _Chosen()


def choose(arithmetic: Arithmetic) -> None:
    """Choose for this process how the arithmetic of rounds is computed. The bits are the same.

    Arguments:
        arithmetic: "torch": by torch operations. "compiled": by compiled loops, whatever the size. "auto": by compiled
            loops once a vector is long enough to be worth loading them, if they can be loaded here.

    Raises:
        ConfigError: another word, or "compiled" where Numba cannot be loaded.
    """
    if arithmetic not in get_args(Arithmetic):
        raise ConfigError(f"the arithmetic must be one of {', '.join(get_args(Arithmetic))}, not {arithmetic!r}.")
    try:
        _chosen.loops = import_module(_LOOPS) if arithmetic == "compiled" else None
    except (ImportError, OSError) as error:
        raise ConfigError(f"the compiled loops cannot be loaded ({error}); choose auto or torch.") from error
    _chosen.arithmetic = arithmetic


def prepare(num_elements: int, device: Any = None) -> None:
    """Load the loops if a vector of `num_elements` is worth it. Where they cannot be loaded, a warning says so.

    Arguments:
        device: a `torch.device`, on which the vector is; None: the host.
    """
    on_host = device is None or device.type == "cpu"
    if not on_host or _chosen.arithmetic != "auto" or _chosen.loops is not None or num_elements < WORTH_ELEMENTS:
        return
    try:
        _chosen.loops = import_module(_LOOPS)
    except (ImportError, OSError) as error:
        log.warning("the compiled loops cannot be loaded (%s); torch computes the same, more slowly.", error)
        _chosen.arithmetic = "torch"


def reading(codec: Any, payload: Any) -> ModuleType | None:
    """As `loops`, if they can read this payload (a tensor) of this codec."""
    loops = _chosen.loops
    return loops if loops is not None and payload.device.type == "cpu" and loops.can_read(codec, payload) else None


def loops() -> ModuleType | None:
    """The module `compute.loops`, if compiled loops are to be used now; None: use torch operations."""
    return _chosen.loops
