"""Readers of single files: run file, site file, event logs, keys and certificates, checkpoints."""

from __future__ import annotations

import hashlib
import json
import tempfile
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from tests.fuzz.examining import Target, unchanged
from tests.fuzz.mutations import JSON, SAFETENSORS, TOML, Form, joined, lines, mutated, mutated_parts, parted

from diloco import events
from diloco.config import parse_config
from diloco.core.presets import method_from_table
from diloco.errors import KEY_LINE, ConfigError
from diloco.event_log import EventTail, read_events
from diloco.exchange.key_pair import CA, CERT, KEY, KeyPair, key_line, parse_key_line, read_key_pair
from diloco.planning.site import load_site
from diloco.report.page import numbers, read_run, rows, summary
from diloco.syncer.keys.auth import read_revoked
from diloco.syncer.keys.certificates import holder_of
from diloco.syncer.keys.keyring import CERTIFICATES, Keyring
from diloco.tables import read_text
from diloco.training.checkpoint import from_bytes, lineage_of, load_checkpoint, save_checkpoint, to_bytes

ROOT = Path(__file__).parents[2]

RUN_FILE = """
[run]
name = "tiny"
tokens = 100_000
learners = 2
[model]
type = "llama"
hidden_size = 16
[data]
sequence_length = 16
[schedule]
warmup_steps = 1
[train]
global_batch = 4
[method]
preset = "StreamingDiLoCo"
sync_every = 10
fragments = { type = "ByLayer", layers = 2, pattern = "strided" }
outer = { type = "Nesterov", lr = 0.7, momentum = 0.5 }
[pool]
schedule = "constant"
[learner.far.train]
batch = 1
overlap = 2
[syncer]
address = "127.0.0.1:7700"
"""


@contextmanager
def directory_of(named: dict[str, bytes]) -> Iterator[Path]:
    """A directory with these files, which stay as they are."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root)
        fill(path, named)
        with unchanged(path):
            yield path


def fill(path: Path, named: dict[str, bytes]) -> None:
    """Write files below a directory."""
    for name, data in named.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
        (path / name).chmod(0o600)


def _one_file(name: str, seed: bytes, form: Form | None, read: Callable[[Path], object]) -> Target:
    def reading(data: bytes) -> None:
        with directory_of({"input": data}) as path:
            read(path / "input")

    return Target(name, (seed,), reading, lambda data, random: mutated(data, form, random))


def run_file() -> Target:
    """The run file, for all learners and for one, and the method in it."""

    def read(path: Path) -> None:
        for learner in (None, "far"):
            config = parse_config(read_text(path, "run file"), learner=learner)
            assert config.pool_values is None or config.run.learners
        method_from_table(config.method)

    return _one_file("run-file", RUN_FILE.encode(), TOML, read)


def site_file() -> Target:
    """The site file."""

    def read(path: Path) -> None:
        load_site(path)

    return _one_file("site-file", (ROOT / "examples" / "site.toml").read_bytes(), TOML, read)


_KEY_FILES = (CA, CERT, KEY, "revoked.toml", CERTIFICATES)


def keys() -> Target:
    """A directory of keys, the list of revoked certificates, and the operator's list of certificates."""
    seed = (Path(__file__).parent / "keys.seed").read_bytes()  # new ones would be others in every process

    def read(data: bytes) -> None:
        with directory_of(dict(zip(_KEY_FILES, parted(data), strict=False))) as path:
            refused: list[ConfigError] = []
            for reader in (
                lambda: read_revoked(path / "revoked.toml"), lambda: Keyring.read(path),
                lambda: read_key_pair(path),
            ):  # fmt: skip
                try:
                    reader()
                except ConfigError as error:
                    refused.append(error)
            if (path / CERT).exists():
                holder_of((path / CERT).read_bytes())
            if refused:
                raise refused[0]

    def mutate(data: bytes, random: Random) -> bytes:
        return mutated_parts(data, lambda index: TOML if index >= 3 else None, random)

    return Target("keys", (seed,), read, mutate)


def line_of_keys() -> Target:
    """A line of keys: as it is, and what a line with a right length and checksum holds."""
    files = dict(zip(_KEY_FILES, parted((Path(__file__).parent / "keys.seed").read_bytes()), strict=False))
    whole = key_line(KeyPair(files[CA], files[CERT], files[KEY])).removeprefix(KEY_LINE)
    seed = urlsafe_b64decode(whole + "=" * (-len(whole) % 4))[2:-8]

    def read(data: bytes) -> None:
        framed = len(data).to_bytes(2, "big") + data
        checked = urlsafe_b64encode(framed + hashlib.sha256(framed).digest()[:8]).decode()
        refused: list[ConfigError] = []
        for text in (data.decode("latin-1"), checked.rstrip("=")):
            try:
                parse_key_line(KEY_LINE + text)
            except ConfigError as error:
                refused.append(error)
        if len(refused) == 2:
            raise refused[1]

    return Target("line-of-keys", (seed,), read, lambda data, random: mutated(data[: 1 << 15], None, random))


def event_log() -> Target:
    """Event logs, as the report and a follower read them."""
    told: list[events.Event] = [
        events.SyncerStarted(t=1.0, who="syncer", run="tiny", address="x:1", versions=(0, 0), method={"name": ""}),
        events.Initialised(t=1.5, who="syncer", learner="a", source="seed", layout_digest="0", num_parameters=9),
        events.Admitted(t=1.6, who="syncer", call="Join", learner="a", name="a", role="learner", key="00", peer="x"),
        events.Joined(t=2.0, who="syncer", learner="a", incarnation=1),
        events.Contributed(
            t=3.0, who="syncer", learner="a", fragment=0, round=0, base=0, tokens=5, steps=1, num_bytes=8
        ),
        events.Merged(
            t=3.5, who="syncer", fragment=0, round=0, version=1, contributors=("a",), weights=(1.0,), tokens=(5,)
        ),
        events.Published(t=3.6, who="syncer", fragment=0, version=1, digest="00", num_bytes=8),
        events.Traffic(t=4.0, who="syncer", sent_bytes={"joins": 9}, received_bytes={}, learner="a"),
        events.Refused(t=4.0, who="syncer", call="Join", name="b", peer="y", reason="AuthError", text="no", times=3),
        events.Evicted(t=5.0, who="syncer", learner="a", incarnation=1, reason="lost"),
        events.Finished(t=6.0, who="syncer", steps=4, tokens=5, seconds=5.0, reason="stopped"),
    ]  # fmt: skip
    seed = b"".join(event.model_dump_json().encode() + b"\n" for event in told)

    def read(data: bytes) -> None:
        with directory_of({"events.jsonl": data}) as path:
            assert len(EventTail(path / "events.jsonl").read()) == len(read_events(path / "events.jsonl"))
            timeline, story = read_run([path])
            json.dumps(story.since(0), allow_nan=False)
            found = numbers(timeline)
            json.dumps(found)
            summary(found)
            rows(found)

    return Target("events", (seed,), read, lambda data, random: mutated(data, lines(JSON), random))


_MANIFEST, _TENSORS = "manifest.json", "tensors.safetensors"


def checkpoint() -> Target:
    """A checkpoint's two files, and a random state within."""
    random_state = {"python": (3, (1, 2), None), "torch": torch.arange(8, dtype=torch.uint8)}
    state = {
        "learner": {"lineage": {"run_id": "0" * 32, "epoch": 3, "boot": 5}, "core": {"step": 4}}, "run": "tiny",
        "model": {"a": torch.ones(2, 3), "b": torch.tensor(2.0, dtype=torch.bfloat16)}, "steps": (1, {2: "x"}),
        "random": [to_bytes(random_state)],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        saved = save_checkpoint(Path(root), 4, state, keep=1).path
        seed = joined([(saved / _MANIFEST).read_bytes(), (saved / _TENSORS).read_bytes()])

    def read(data: bytes) -> None:
        named = dict(zip((f"step-4/{_MANIFEST}", f"step-4/{_TENSORS}"), parted(data), strict=False))
        with directory_of({"step-3/whole": b"", **named}) as path:
            found = load_checkpoint(path / "step-4")
            lineage_of(path / "step-4")
            match found:
                case {"random": [torch.Tensor() as raw]}:
                    from_bytes(raw)

    def mutate(data: bytes, random: Random) -> bytes:
        changed = mutated_parts(data, lambda index: SAFETENSORS if index else JSON, random)
        parts = parted(changed)
        if len(parts) == 2 and parts[1] != parted(data)[-1] and random.random() < 0.8:  # the manifest knows of it
            try:
                manifest = json.loads(parts[0])
                manifest["files"][_TENSORS] = {
                    "num_bytes": len(parts[1]), "sha256": hashlib.sha256(parts[1]).hexdigest()
                }  # fmt: skip
                return joined([json.dumps(manifest).encode(), parts[1]])
            except (ValueError, LookupError, TypeError, RecursionError):
                return changed
        return changed

    return Target("checkpoint", (seed,), read, mutate)
