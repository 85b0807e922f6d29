from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lineage(_message.Message):
    __slots__ = ("run_id", "epoch", "boot")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    boot: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., boot: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("method", "initialised", "layout", "step", "run_tokens", "lineage", "lost_floor_s")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_FLOOR_S_FIELD_NUMBER: _ClassVar[int]
    method: str
    initialised: bool
    layout: str
    step: int
    run_tokens: int
    lineage: Lineage
    lost_floor_s: float
    def __init__(self, method: _Optional[str] = ..., initialised: _Optional[bool] = ..., layout: _Optional[str] = ..., step: _Optional[int] = ..., run_tokens: _Optional[int] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ..., lost_floor_s: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("run", "learner", "layout", "process", "after", "overlap", "seen", "tokens_per_step", "held", "dealt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    layout: str
    process: int
    after: int
    overlap: int
    seen: Lineage
    tokens_per_step: int
    held: _containers.RepeatedScalarFieldContainer[int]
    dealt: bool
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., layout: _Optional[str] = ..., process: _Optional[int] = ..., after: _Optional[int] = ..., overlap: _Optional[int] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., tokens_per_step: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., dealt: _Optional[bool] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "lineage")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    lineage: Lineage
    def __init__(self, incarnation: _Optional[int] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ...) -> None: ...

class DealRequest(_message.Message):
    __slots__ = ("run", "learner", "size")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    size: int
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class DealReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[int]] = ...) -> None: ...

class InitialiseHeader(_message.Message):
    __slots__ = ("run", "learner", "layout", "source", "step", "tokens", "part_bytes", "seen", "resumes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    layout: str
    source: str
    step: int
    tokens: int
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    seen: Lineage
    resumes: bool
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., layout: _Optional[str] = ..., source: _Optional[str] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., part_bytes: _Optional[_Iterable[int]] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., resumes: _Optional[bool] = ...) -> None: ...

class InitialiseReply(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: Received
    def __init__(self, received: _Optional[_Union[Received, _Mapping]] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("num_bytes", "all", "checksum")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    all: bool
    checksum: int
    def __init__(self, num_bytes: _Optional[int] = ..., all: _Optional[bool] = ..., checksum: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("start",)
    START_FIELD_NUMBER: _ClassVar[int]
    start: int
    def __init__(self, start: _Optional[int] = ...) -> None: ...

class Units(_message.Message):
    __slots__ = ("first", "stop")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    first: int
    stop: int
    def __init__(self, first: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class UnitSet(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Units]
    def __init__(self, ranges: _Optional[_Iterable[_Union[Units, _Mapping]]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "number", "num_units", "data_units", "data_passes", "data_digest", "unit_tokens", "claim", "seen", "process", "groups")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_UNITS_FIELD_NUMBER: _ClassVar[int]
    DATA_UNITS_FIELD_NUMBER: _ClassVar[int]
    DATA_PASSES_FIELD_NUMBER: _ClassVar[int]
    DATA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    number: int
    num_units: int
    data_units: int
    data_passes: int
    data_digest: str
    unit_tokens: int
    claim: _containers.RepeatedCompositeFieldContainer[UnitSet]
    seen: Lineage
    process: int
    groups: GroupRules
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., num_units: _Optional[int] = ..., data_units: _Optional[int] = ..., data_passes: _Optional[int] = ..., data_digest: _Optional[str] = ..., unit_tokens: _Optional[int] = ..., claim: _Optional[_Iterable[_Union[UnitSet, _Mapping]]] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., process: _Optional[int] = ..., groups: _Optional[_Union[GroupRules, _Mapping]] = ...) -> None: ...

class GroupRules(_message.Message):
    __slots__ = ("digest", "vocab_size", "group_size", "max_prompt_tokens", "max_tokens", "max_staleness", "queue", "inline")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    vocab_size: int
    group_size: int
    max_prompt_tokens: int
    max_tokens: int
    max_staleness: int
    queue: int
    inline: bool
    def __init__(self, digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., group_size: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_staleness: _Optional[int] = ..., queue: _Optional[int] = ..., inline: _Optional[bool] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("units", "claimed", "repeat")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[Units]
    claimed: _containers.RepeatedCompositeFieldContainer[Units]
    repeat: bool
    def __init__(self, units: _Optional[_Iterable[_Union[Units, _Mapping]]] = ..., claimed: _Optional[_Iterable[_Union[Units, _Mapping]]] = ..., repeat: _Optional[bool] = ...) -> None: ...

class GroupScore(_message.Message):
    __slots__ = ("number", "rewards", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    rewards: _containers.RepeatedScalarFieldContainer[float]
    reason: str
    def __init__(self, number: _Optional[int] = ..., rewards: _Optional[_Iterable[float]] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ("run", "learner", "role", "process", "order", "digest", "holds", "wants", "scores")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    role: str
    process: int
    order: int
    digest: str
    holds: _containers.RepeatedScalarFieldContainer[int]
    wants: int
    scores: _containers.RepeatedCompositeFieldContainer[GroupScore]
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., role: _Optional[str] = ..., process: _Optional[int] = ..., order: _Optional[int] = ..., digest: _Optional[str] = ..., holds: _Optional[_Iterable[int]] = ..., wants: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[GroupScore, _Mapping]]] = ...) -> None: ...

class GroupPlace(_message.Message):
    __slots__ = ("number", "task", "object", "start", "num_bytes", "digest", "versions", "rewards", "worker")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    number: int
    task: str
    object: str
    start: int
    num_bytes: int
    digest: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    worker: str
    def __init__(self, number: _Optional[int] = ..., task: _Optional[str] = ..., object: _Optional[str] = ..., start: _Optional[int] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ..., rewards: _Optional[_Iterable[float]] = ..., worker: _Optional[str] = ...) -> None: ...

class WorkReply(_message.Message):
    __slots__ = ("numbers", "groups", "why", "versions")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupPlace]
    why: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[_Union[GroupPlace, _Mapping]]] = ..., why: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class MadeGroup(_message.Message):
    __slots__ = ("number", "task", "versions", "weights", "rewards", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    task: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    weights: str
    rewards: _containers.RepeatedScalarFieldContainer[float]
    data: bytes
    def __init__(self, number: _Optional[int] = ..., task: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ..., weights: _Optional[str] = ..., rewards: _Optional[_Iterable[float]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GroupsRequest(_message.Message):
    __slots__ = ("run", "learner", "process", "groups")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    process: int
    groups: _containers.RepeatedCompositeFieldContainer[MadeGroup]
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., process: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[MadeGroup, _Mapping]]] = ...) -> None: ...

class GroupsReply(_message.Message):
    __slots__ = ("refused",)
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    refused: _containers.RepeatedCompositeFieldContainer[GroupScore]
    def __init__(self, refused: _Optional[_Iterable[_Union[GroupScore, _Mapping]]] = ...) -> None: ...

class Discard(_message.Message):
    __slots__ = ("reason", "tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    tokens: int
    def __init__(self, reason: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "fragment", "round", "base", "tokens", "steps", "trained", "discarded", "num_bytes", "step", "part", "tensors", "number", "boot", "start", "stop", "units", "overwritten", "resumes", "process", "routed")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    OVERWRITTEN_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    fragment: int
    round: int
    base: int
    tokens: int
    steps: int
    trained: int
    discarded: _containers.RepeatedCompositeFieldContainer[Discard]
    num_bytes: int
    step: int
    part: bool
    tensors: _containers.RepeatedScalarFieldContainer[int]
    number: int
    boot: int
    start: int
    stop: int
    units: _containers.RepeatedCompositeFieldContainer[Units]
    overwritten: _containers.RepeatedCompositeFieldContainer[Units]
    resumes: bool
    process: int
    routed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment: _Optional[int] = ..., round: _Optional[int] = ..., base: _Optional[int] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., trained: _Optional[int] = ..., discarded: _Optional[_Iterable[_Union[Discard, _Mapping]]] = ..., num_bytes: _Optional[int] = ..., step: _Optional[int] = ..., part: _Optional[bool] = ..., tensors: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ..., boot: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., units: _Optional[_Iterable[_Union[Units, _Mapping]]] = ..., overwritten: _Optional[_Iterable[_Union[Units, _Mapping]]] = ..., resumes: _Optional[bool] = ..., process: _Optional[int] = ..., routed: _Optional[_Iterable[int]] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: Received
    def __init__(self, received: _Optional[_Union[Received, _Mapping]] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("first", "stop")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    first: int
    stop: int
    def __init__(self, first: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ObjectRange(_message.Message):
    __slots__ = ("name", "start", "stop")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: int
    stop: int
    def __init__(self, name: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "fragment", "static", "object", "direct", "base", "joining", "segments", "seen", "versions", "kept", "process")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    STATIC_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    fragment: int
    static: bool
    object: ObjectRange
    direct: bool
    base: int
    joining: bool
    segments: Segments
    seen: Lineage
    versions: _containers.RepeatedScalarFieldContainer[int]
    kept: Kept
    process: int
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment: _Optional[int] = ..., static: _Optional[bool] = ..., object: _Optional[_Union[ObjectRange, _Mapping]] = ..., direct: _Optional[bool] = ..., base: _Optional[int] = ..., joining: _Optional[bool] = ..., segments: _Optional[_Union[Segments, _Mapping]] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., versions: _Optional[_Iterable[int]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., process: _Optional[int] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("version", "lossless", "digest", "payload_bytes", "num_bytes", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    lossless: bool
    digest: str
    payload_bytes: int
    num_bytes: int
    checksum: int
    def __init__(self, version: _Optional[int] = ..., lossless: _Optional[bool] = ..., digest: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("fragment", "base", "version", "contributors", "weights", "scale", "digest", "lossless", "num_bytes", "verdicts", "outer_bytes", "lineage", "start", "url", "url_start")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    OUTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    URL_START_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    base: int
    version: int
    contributors: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[float]
    scale: float
    digest: str
    lossless: bool
    num_bytes: int
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    outer_bytes: int
    lineage: Lineage
    start: int
    url: str
    url_start: int
    def __init__(self, fragment: _Optional[int] = ..., base: _Optional[int] = ..., version: _Optional[int] = ..., contributors: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ..., scale: _Optional[float] = ..., digest: _Optional[str] = ..., lossless: _Optional[bool] = ..., num_bytes: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., outer_bytes: _Optional[int] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ..., start: _Optional[int] = ..., url: _Optional[str] = ..., url_start: _Optional[int] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    def __init__(self, manifest: _Optional[bytes] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "versions", "step", "run_tokens", "loss", "scores")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    run: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    step: int
    run_tokens: int
    loss: float
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, run: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., run_tokens: _Optional[int] = ..., loss: _Optional[float] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("fragment", "number", "reason", "version")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    number: int
    reason: str
    version: int
    def __init__(self, fragment: _Optional[int] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("fragment", "version")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("step", "start_step", "run_tokens", "num_live", "sync_every", "versions", "calls", "verdicts", "drained", "order", "paused", "at_least", "settled", "budget_tokens", "budget_steps", "dealt")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    SYNC_EVERY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_STEPS_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    step: int
    start_step: int
    run_tokens: int
    num_live: int
    sync_every: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    drained: bool
    order: int
    paused: bool
    at_least: int
    settled: bool
    budget_tokens: int
    budget_steps: int
    dealt: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., start_step: _Optional[int] = ..., run_tokens: _Optional[int] = ..., num_live: _Optional[int] = ..., sync_every: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., drained: _Optional[bool] = ..., order: _Optional[int] = ..., paused: _Optional[bool] = ..., at_least: _Optional[int] = ..., settled: _Optional[bool] = ..., budget_tokens: _Optional[int] = ..., budget_steps: _Optional[int] = ..., dealt: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "seen", "versions", "process")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    seen: Lineage
    versions: _containers.RepeatedScalarFieldContainer[int]
    process: int
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., versions: _Optional[_Iterable[int]] = ..., process: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("lineage", "standing")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    lineage: Lineage
    standing: Standing
    def __init__(self, lineage: _Optional[_Union[Lineage, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Evicted(_message.Message):
    __slots__ = ("reason", "replaced")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    replaced: bool
    def __init__(self, reason: _Optional[str] = ..., replaced: _Optional[bool] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("welcome", "standing", "evicted")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    standing: Standing
    evicted: Evicted
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., evicted: _Optional[_Union[Evicted, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "step", "tokens", "step_s", "waiting", "versions", "finished", "confirmed", "seen", "steps", "process", "earlier_tokens", "blocked_with", "training_loss", "evaluation", "blocked_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_WITH_FIELD_NUMBER: _ClassVar[int]
    TRAINING_LOSS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    step: int
    tokens: int
    step_s: float
    waiting: bool
    versions: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    confirmed: _containers.RepeatedScalarFieldContainer[int]
    seen: Lineage
    steps: int
    process: int
    earlier_tokens: int
    blocked_with: _containers.RepeatedScalarFieldContainer[int]
    training_loss: float
    evaluation: Evaluation
    blocked_s: float
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., step_s: _Optional[float] = ..., waiting: _Optional[bool] = ..., versions: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ..., confirmed: _Optional[_Iterable[int]] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., steps: _Optional[int] = ..., process: _Optional[int] = ..., earlier_tokens: _Optional[int] = ..., blocked_with: _Optional[_Iterable[int]] = ..., training_loss: _Optional[float] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., blocked_s: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("loss", "run_tokens")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    run_tokens: int
    def __init__(self, loss: _Optional[float] = ..., run_tokens: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("lineage", "standing", "is_suspended")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    IS_SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    lineage: Lineage
    standing: Standing
    is_suspended: bool
    def __init__(self, lineage: _Optional[_Union[Lineage, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., is_suspended: _Optional[bool] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class PromoteReply(_message.Message):
    __slots__ = ("epoch", "versions")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "tokens", "earlier_tokens", "process", "seen", "step", "training_loss", "evaluation", "blocked_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINING_LOSS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    tokens: int
    earlier_tokens: int
    process: int
    seen: Lineage
    step: int
    training_loss: float
    evaluation: Evaluation
    blocked_s: float
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., tokens: _Optional[int] = ..., earlier_tokens: _Optional[int] = ..., process: _Optional[int] = ..., seen: _Optional[_Union[Lineage, _Mapping]] = ..., step: _Optional[int] = ..., training_loss: _Optional[float] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., blocked_s: _Optional[float] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SteerRequest(_message.Message):
    __slots__ = ("run", "order", "learner", "at_least", "bans", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    order: str
    learner: str
    at_least: int
    bans: bool
    reason: str
    def __init__(self, run: _Optional[str] = ..., order: _Optional[str] = ..., learner: _Optional[str] = ..., at_least: _Optional[int] = ..., bans: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class SteerReply(_message.Message):
    __slots__ = ("said",)
    SAID_FIELD_NUMBER: _ClassVar[int]
    said: str
    def __init__(self, said: _Optional[str] = ...) -> None: ...

class OpenPageRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class OpenPageReply(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...

class ProbeHeader(_message.Message):
    __slots__ = ("run", "learner", "up_bytes", "down_bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    up_bytes: int
    down_bytes: int
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., up_bytes: _Optional[int] = ..., down_bytes: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("num_bytes", "seconds", "received")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    seconds: float
    received: Received
    def __init__(self, num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., received: _Optional[_Union[Received, _Mapping]] = ...) -> None: ...
