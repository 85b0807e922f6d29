"""A learner's state for `torch.distributed.checkpoint` (DCP), which saves it and loads it with any number of ranks.

All sharded tensors, parameters included, are saved as shards of a fragment's flat vector. So four ranks of FSDP2 can
save a checkpoint, and two ranks of tensor parallel, or one process, resume from it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from diloco.core.fragments import gather, scatter
from diloco.errors import CheckpointError, ConfigError, translated
from diloco.escaping import MALFORMED
from diloco.exchange.group import Group, as_bytes
from diloco.learner.driver import LearnerDriver
from diloco.learner.state_dict import learner_state, require_layout

PLAIN = "plain"
"""The entry with the plain values, as JSON."""


class FragmentShard(Tensor):
    """A rank's shard of a fragment's flat vector, in the form that DCP saves and loads: torch's `_Checkpointable`.

    It has the size of the whole vector, and no memory of its own; it supports no computation.

    Arguments:
        local: the shard, [stop − start], on the host.
        elements: the slice of the vector that it holds.
        num_elements: of the whole vector.
    """

    local: Tensor
    _start: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, elements: slice, num_elements: int) -> Self:
        assert local.shape == (elements.stop - elements.start,)
        whole: Self = Tensor._make_wrapper_subclass(cls, (num_elements,), dtype=local.dtype, device=local.device)
        whole.local, whole._start = local, torch.Size([elements.start])
        return whole

    # torch annotates the argument under another name.
    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Shard({self.local.numel()} of {self.numel()} elements from {self._start[0]} on)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} is not possible on one rank's shard of a vector")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.local.numel() == 0:
            return []
        chunk = ChunkStorageMetadata(offsets=self._start, sizes=self.local.size())
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.size())
        return [WriteItem(MetadataIndex(fqn, self._start), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=self._start, sizes=self.local.size())]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local


def distributed_state(learner: LearnerDriver) -> dict[str, Any]:
    """`learner_state` in the form for `dcp.save`. Every rank calls it.

    Raises:
        ConfigError: the exchange has state of its own, which cannot be divided by fragments.
    """
    state = _state_of_parts(learner)
    del state["rank"]
    tensors: dict[str, Any] = {}

    def packed(path: tuple[str, ...], tensor: Tensor) -> Any:
        name, dtype = "/".join(path), str(tensor.dtype).removeprefix("torch.")
        fragment = _fragment_of(path) if tensor.dim() == 1 else None
        if fragment is None or learner.layout.fragments[fragment].numel:  # else the learner does not hold it
            tensors[name] = tensor if fragment is None else _shard(learner, tensor, fragment)
        shape = list(tensor.shape) if fragment is None else []
        return {"tensor": name, "fragment": fragment, "shape": shape, "dtype": dtype}

    plain = _packed(state, (), packed)
    return {PLAIN: json.dumps(plain), **tensors}


def load_distributed_state(
    learner: LearnerDriver, storage: str | Path | StorageReader, prefix: str, process_group: ProcessGroup | None
) -> dict[str, Any]:
    """The state for `resume`, from a checkpoint with `distributed_state` of any number of ranks at the key `prefix`.

    Raises:
        CheckpointError: the checkpoint has no such entry, or one of another model.
    """

    def fill(targets: dict[str, Any]) -> dict[str, Any]:
        reader = FileSystemReader(storage) if isinstance(storage, str | Path) else storage
        is_alone = learner.exchange.rank[1] == 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended here
            load({prefix: targets}, storage_reader=reader, process_group=process_group, no_dist=is_alone)
        return targets

    try:
        plain = json.loads(fill({PLAIN: ""})[PLAIN])
    except (CheckpointException, OSError, KeyError, RuntimeError, ValueError) as error:
        where = f"{storage} " if isinstance(storage, str | Path) else ""
        raise CheckpointError(
            f"the checkpoint {where}has no learner under {prefix!r} ({str(error).splitlines()[0]}); save "
            f"{{{prefix!r}: learner.distributed_state_dict()}} with torch.distributed.checkpoint."
        ) from error
    targets: dict[str, Any] = {}

    def prepared(spec: Mapping[str, Any]) -> Any:
        dtype, fragment = getattr(torch, spec["dtype"]), spec["fragment"]
        if fragment is None:
            targets[spec["tensor"]] = torch.empty(spec["shape"], dtype=dtype)
            return targets[spec["tensor"]]
        elements = learner.tensors.partition.elements(fragment)
        local = torch.empty(elements.stop - elements.start, dtype=dtype)
        if learner.layout.fragments[fragment].numel:
            targets[spec["tensor"]] = _shard(learner, local, fragment)
        return local

    require_layout(dict(plain["mapping"])["layout"], learner.layout)
    state: dict[str, Any] = _restored(plain, prepared)
    fill(targets)
    state["rank"] = list(learner.exchange.rank)
    parts = [state["parameters"][str(fragment)] for fragment in range(len(learner.layout.fragments))]
    state["parameters"] = learner.tensors.pieces_of(parts)
    return state


def whole_state(learner: LearnerDriver, group: Group) -> dict[str, Any]:
    """`learner_state` of the ranks of `group` as that of one process, on rank 0; {} on the others. Every rank calls it.

    Raises:
        ConfigError: as `distributed_state`.
    """
    state = _state_of_parts(learner)

    def joined(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        if _fragment_of(path) is None or tensor.dim() != 1:
            return tensor
        numbers = group.gather_values(tensor.numel(), "the sizes of a vector's parts")
        sizes = [number * tensor.itemsize for number in numbers]
        raw = group.collect(as_bytes(tensor.contiguous()), sizes, f"the parts of {'/'.join(path)}")
        return raw.view(tensor.dtype)

    state = _mapped(state, joined)
    if group.rank:
        return {}
    parameters: dict[str, Tensor] = {}
    for fragment in learner.layout.fragments:
        dtypes = {place.spec.name: getattr(torch, place.spec.dtype) for place in fragment.tensors}
        for name, value in scatter(fragment, state["parameters"][str(fragment.index)]).items():
            parameters[name] = value.to(dtypes[name])
    return {**state, "rank": [0, 1], "parameters": parameters}


def own_part(learner: LearnerDriver, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the state of one process, for `resume`. Every rank calls it with the same state.

    Raises:
        CheckpointError: the state is of another model, or damaged.
    """
    partition = learner.tensors.partition

    def cut(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        fragment = _fragment_of(path)
        return tensor if fragment is None or tensor.dim() != 1 else tensor[partition.elements(fragment)]

    with translated(MALFORMED, CheckpointError, "the learner's state in the checkpoint is damaged", "use another one"):
        require_layout(state["layout"], learner.layout)
        whole = [gather(each, state["parameters"]) for each in learner.layout.fragments]
        own: dict[str, Any] = _mapped({**state, "parameters": {}}, cut)
    parts = [each[partition.elements(fragment)] for fragment, each in enumerate(whole)]
    return {**own, "rank": list(learner.exchange.rank), "parameters": learner.tensors.pieces_of(parts)}


def _state_of_parts(learner: LearnerDriver) -> dict[str, Any]:
    """`learner_state`, with the parameters by fragment, as the part that this process exchanges."""
    state = learner_state(learner)
    if state["exchange"]:
        raise ConfigError(
            "a checkpoint with any number of ranks needs an exchange without state of its own, a syncer's; save "
            "learner.state_dict() of every rank."
        )
    return {**state, "parameters": {str(f): here for f, here in enumerate(learner.tensors.parts_here())}}


def _shard(learner: LearnerDriver, local: Tensor, fragment: int) -> FragmentShard:
    elements = learner.tensors.partition.elements(fragment)
    return FragmentShard(local, elements, learner.layout.fragments[fragment].numel)


def _fragment_of(path: tuple[str, ...]) -> int | None:
    """The fragment of the tensor at a path of the state, by the first key that begins with a number; None: none."""
    if path[0] not in _BY_FRAGMENT:
        return None
    return next((int(number) for key in path[1:] if (number := key.split(".")[0]).isdigit()), None)


_BY_FRAGMENT = ("anchors", "origins", "parameters", "received", "eager", "residuals")
"""Parts of `learner_state` that hold tensors of fragments."""


def _mapped(value: Any, change: Callable[[tuple[str, ...], Tensor], Tensor]) -> Any:
    """A nested value with each tensor replaced by `change(path, tensor)`."""
    plain = _packed(value, (), lambda path, tensor: {"tensor": change(path, tensor)})
    return _restored(plain, itemgetter("tensor"))


def _packed(value: Any, path: tuple[str, ...], packed: Callable[[tuple[str, ...], Tensor], Any]) -> Any:
    """A nested value in plain JSON types, each tensor replaced by `packed(path, tensor)`."""
    match value:
        case Tensor():
            return packed(path, value)
        case Mapping():
            return {"mapping": [[key, _packed(each, (*path, str(key)), packed)] for key, each in value.items()]}
        case list() | tuple():
            entries = [_packed(each, (*path, str(index)), packed) for index, each in enumerate(value)]
            return {"list": entries, "is_tuple": isinstance(value, tuple)}
    return value


def _restored(value: Any, prepared: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The inverse of `_packed`, with each tensor from `prepared`."""
    match value:
        case {"tensor": _}:
            return prepared(value)
        case {"mapping": items}:
            return {key: _restored(each, prepared) for key, each in items}
        case {"list": entries, "is_tuple": is_tuple}:
            found = [_restored(each, prepared) for each in entries]
            return tuple(found) if is_tuple else found
    return value
