"""The objects of a run: what goes in comes out, and nothing else does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.store.small_run import (
    METHOD,
    NUM_ELEMENTS,
    STATIC,
    SmallRun,
    check_versions,
    held_of,
    layout_of,
    payload_of,
    read_newest,
    record_at,
    theta_of,
    update_of,
)

from diloco.core.layout import digest
from diloco.errors import ConfigError, DamagedObjectError, MissingObjectError, NotInitialisedError, StoreError
from diloco.following.stored_status import newest_digests
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import NamedVersion
from diloco.run.objects import Blob
from diloco.store import reading
from diloco.store.directory import Directory
from diloco.store.format import TensorFormat
from diloco.store.objects import open_store, read_manifest
from diloco.store.reading import ObjectReader


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with Directory(tmp_path / "run") as objects:
        run = SmallRun(objects)
        run.initialise()
        run.publish(1, 1)
        yield run


def path_of(run: SmallRun, name: str) -> Path:
    return Path(run.objects.name) / "objects" / name


def names_of(run: SmallRun) -> dict[str, str]:
    """The objects by what they hold."""
    assert run.manifest.frozen is not None
    assert run.manifest.record is not None
    newest = run.manifest.fragments[1][0]
    assert newest.update is not None
    return {
        "version": newest.held,
        "update": newest.update,
        "frozen": run.manifest.frozen,
        "record": run.manifest.record,
    }


# what goes in comes out


def test_a_run_comes_back(run: SmallRun) -> None:
    record = {**record_at(7), "more": [1, None, "x"]}
    run.save_record(record)
    saved = read_newest(run.objects)
    assert (saved.run, saved.method, saved.layout, saved.source) == ("demo", METHOD, layout_of(NUM_ELEMENTS), "seed 17")
    assert (saved.step, saved.tokens, saved.record, saved.static) == (3, 5, record, STATIC)
    assert saved.contributors == ((), ("site-a", "site-b"))
    assert saved.epochs == (Epoch(1, (0, 0)),)
    assert saved.fragments[0].outer_state == {}
    assert saved.fragments[0].residual is None
    check_versions(run.objects, {0: 0, 1: 1})
    assert newest_digests(run.objects) == ([(0, digest(theta_of(0, 0))), (1, digest(theta_of(1, 1)))], 1)


def test_updates_come_back(run: SmallRun) -> None:
    with ObjectReader(run.objects) as reader:
        update, payload = reader.update(names_of(run)["update"], 1, 1)
    assert update == update_of(held_of(1, 1))
    assert torch.equal(payload, payload_of(held_of(1, 1)))


def test_objects_are_plain_safetensors_of_the_tensors_own_memory(run: SmallRun) -> None:
    tensors = safetensors.torch.load_file(path_of(run, names_of(run)["version"]))
    assert sorted(tensors) == ["outer.momentum", "outer.steps", "residual", "theta"]
    assert torch.equal(tensors["theta"], theta_of(1, 1))
    frozen = safetensors.torch.load_file(path_of(run, names_of(run)["frozen"]))
    assert bytes(frozen["static"].numpy().tobytes()) == STATIC
    held = held_of(0, 1)
    blob = TensorFormat().version("0" * 32, held, update_of(held), 1)
    assert blob.num_bytes == len(blob.parts[0]) + 8 + 3 * 4 * NUM_ELEMENTS
    held.theta[0] = 7.0
    theta = next(part for part in blob.parts[1:] if bytes(part[:4]) == bytes(held.theta[:1].numpy().tobytes()))
    assert len(theta) == 4 * NUM_ELEMENTS


def test_the_same_version_has_the_same_bytes() -> None:
    held = held_of(0, 1)
    first, again = (TensorFormat().version("0" * 32, held, update_of(held), 1) for _ in range(2))
    assert (first.hash, [*map(bytes, first.parts)]) == (again.hash, [*map(bytes, again.parts)])


@pytest.mark.parametrize("num_elements", [1, 7, 32768, 40001])
def test_tensors_are_read_in_pieces_of_any_size(
    tmp_path: Path, num_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "HEAD_BYTES", 100)
    with Directory(tmp_path) as objects:
        run = SmallRun(objects, num_elements)
        run.initialise(static=b"")
        run.publish(0, 1)
        for piece_bytes in (64, 4096, 1 << 20):
            monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
            check_versions(objects, {0: 1, 1: 0}, num_elements)
        assert read_newest(objects).static == b""


def test_a_read_that_failed_goes_on_with_the_objects_that_it_lacks(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, read, get = read_manifest(run.objects), list[str](), run.objects.get
    missing = manifest.fragments[1][0].held
    is_away = True

    def recorded(name: str, start: int = 0, stop: int | None = None) -> Any:
        if name == missing and is_away:
            raise StoreError("the bucket is away.")
        read.append(name)
        return get(name, start, stop)

    monkeypatch.setattr(run.objects, "get", recorded)
    format_ = TensorFormat()
    with pytest.raises(StoreError, match="is away"):
        format_.read(run.objects, manifest)
    is_away = False
    read.clear()
    found = format_.read(run.objects, manifest)
    assert {each for each in read if each != manifest.record} == {missing}
    assert [each.digest for each in found.fragments] == [
        each.digest for each in TensorFormat().read(run.objects, manifest).fragments
    ]


def test_there_is_nothing_before_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run in .*/run; check the path"):
        read_newest(open_store(tmp_path / "run"))
    with Directory(tmp_path / "run") as objects:
        assert newest_digests(objects) == ([], 0)
        SmallRun(objects).claim()
        with pytest.raises(NotInitialisedError, match="no model yet"):
            read_newest(objects)


def test_a_reader_begins_again_when_what_it_reads_is_superseded(run: SmallRun) -> None:
    """The run publishes, and deletes at once, whenever an object has been read."""

    class Publishing(Directory):
        version = 1

        def get(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
            found = super().get(name, start, stop)
            if self.version < 5:
                self.version += 1
                run.publish(1, self.version)
            return found

    publishing = Publishing(run.objects.name, lock=False)
    saved = read_newest(publishing)
    assert saved.fragments[1].version == publishing.version == 5
    path_of(run, run.manifest.fragments[1][0].held).unlink()
    with pytest.raises(MissingObjectError, match=r"\(fragment 1, version 5\) is missing; `diloco syncer check"):
        read_newest(publishing)
    assert newest_digests(publishing) is None


# damage is found, never skipped


def flip_at(place: int) -> Callable[[bytearray], bytes]:
    def damage(data: bytearray) -> bytes:
        data[place] ^= 1
        return bytes(data)

    return damage


DAMAGES: dict[str, Callable[[bytearray], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: bytes(data[:-1]),
    "cut in the header": lambda data: bytes(data[:20]),
    "longer": lambda data: bytes(data) + b"\0",
    "first bit": flip_at(0),
    "a size beyond all memory": flip_at(6),
    "a bit of the header": flip_at(30),
    "last bit": flip_at(-1),
}

HOLDS = {
    "version": "fragment 1, version 1", "frozen": "the layout and the frozen parameters",
    "record": "the record of members and tokens", "update": "the update of fragment 1 to version 1",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", HOLDS)
def test_damage_is_named_and_nothing_older_takes_its_place(run: SmallRun, kind: str, damage: str) -> None:
    name = names_of(run)[kind]
    path = path_of(run, name)
    path.write_bytes(DAMAGES[damage](bytearray(path.read_bytes())))
    with ObjectReader(run.objects) as reader:
        read = (lambda: reader.update(name, 1, 1)) if kind == "update" else (lambda: read_newest(run.objects))
        with pytest.raises(
            DamagedObjectError, match=rf"object {name} of .*/run \({HOLDS[kind]}\) is damaged "
        ) as caught:
            read()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"`diloco syncer check {run.objects.name}` says what can still be served.")


def test_a_flipped_bit_in_any_tensor_is_found(run: SmallRun) -> None:
    path = path_of(run, names_of(run)["version"])
    whole = path.read_bytes()
    end_of_header = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:end_of_header])
    del entries["__metadata__"]
    assert len(entries) == 4
    for name, entry in entries.items():
        path.write_bytes(flip_at(end_of_header + entry["data_offsets"][0] + 1)(bytearray(whole)))
        with pytest.raises(DamagedObjectError, match=f"its {name} does not match the hash in its header"):
            read_newest(run.objects)


def test_no_memory_is_reserved_for_a_size_that_an_object_does_not_have(run: SmallRun) -> None:
    """The header describes 40 GB of Θ, in a layout of as many elements."""
    num_elements = 10**10
    header = {"theta": {"dtype": "F32", "shape": [num_elements], "data_offsets": [0, 4 * num_elements]}}
    update = update_of(held_of(1, 1))
    described = {"run_id": "0" * 32, "update": update.as_dict(), "tokens": 1}
    metadata = {"diloco": json.dumps(described), "hashes": json.dumps({"theta": update.digest})}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    head = len(text).to_bytes(8, "little") + text
    named = NamedVersion(1, run.put(Blob(hashlib.sha256(head).hexdigest(), (head, bytes(100)))))
    with ObjectReader(run.objects) as reader:
        frozen = replace(reader.frozen(names_of(run)["frozen"]), layout=layout_of(num_elements))
        with pytest.raises(DamagedObjectError, match=r"its size differs from the 400000\d+ bytes"):
            reader.version(named, 1, frozen)


def test_another_object_under_a_name_is_found(run: SmallRun) -> None:
    """Each is whole, and is in the place of another one."""
    newest, other = run.manifest.fragments[1][0], run.manifest.fragments[0][0]
    swapped = replace(run.manifest, fragments=((newest,), (other,)))
    with pytest.raises(DamagedObjectError, match=r"\(fragment 0, version 1\) is damaged \(it is another object\)"):
        TensorFormat().read(run.objects, swapped)
    with pytest.raises(DamagedObjectError, match="is damaged"):
        TensorFormat().read(run.objects, replace(run.manifest, frozen=newest.held))
    with pytest.raises(DamagedObjectError, match=r"the record .* is damaged"):
        TensorFormat().read(run.objects, replace(run.manifest, record=newest.held))
    with pytest.raises(StoreError, match="names objects of two runs"):
        TensorFormat().read(run.objects, replace(run.manifest, run_id="1" * 32))
    with ObjectReader(run.objects) as reader:
        assert newest.update is not None
        with pytest.raises(DamagedObjectError, match="another object"):
            reader.update(newest.update, 1, 2)
        with pytest.raises(DamagedObjectError, match="another object"):
            reader.update(newest.held, 1, 1)


def test_a_version_is_bound_to_the_digest_it_is_published_with(run: SmallRun) -> None:
    held = held_of(1, 2)
    update = replace(update_of(held), digest=digest(theta_of(0, 2)))
    name = run.put(run.format.version("0" * 32, held, update, 1))
    named = replace(run.manifest.fragments[1][0], version=2, held=name)
    run.swap(run.manifest.with_versions({1: named}))
    with pytest.raises(DamagedObjectError, match=r"version 2\) is damaged \(its digest is not the published one"):
        read_newest(run.objects)
