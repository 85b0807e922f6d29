"""A store in a bucket: S3 and what speaks its protocol (R2, MinIO, …), Google, Azure; by obstore.

Credentials are found as the cloud's own tools find them: environment variables, files that they name, the machine's
role. A manifest is swapped by a conditional request (`If-None-Match: *`, `If-Match`, Google's generations). No request
is repeated here: a repeated swap whose first answer was lost would look refused, and only its sender can tell.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from diloco.errors import ConfigError, MissingObjectError, StoreError, SwapRefusedError, first_line
from diloco.protocol.manifest import MOST_BYTES, is_object_name
from diloco.run.objects import Found

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

MANIFEST = "manifest.json"

MANIFEST_TIMEOUT_S = 5.0
"""Of a request for the manifest, which is small: a lease has room for a second try."""

STALLED_S = 120.0
"""Without a byte, a request for an object has failed."""

PART_BYTES = 8 << 20
"""Objects are sent in requests of this size, so many at a time; smaller ones in one request."""

PARTS_AT_ONCE = 4

_NO_RETRIES: Any = {"max_retries": 0}

_DETAIL = re.compile(r"status code: (\d{3}[\w ]*)|HTTP error: (.*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class Bucket:
    """The `Objects` of a URL: "s3://bucket/run", "gs://bucket/run",
    "https://account.r2.cloudflarestorage.com/bucket/run" or
    "https://account.blob.core.windows.net/container/run". An endpoint and a region may follow:
    "s3://bucket/run?endpoint=https://minio.example.org&region=eu"; they come before environment variables.

    Raises:
        ConfigError: obstore is not installed, or the URL is not of a bucket.
    """

    shortest_swap_s = 1.0
    """Google and R2 accept one write of a name a second."""

    def __init__(self, url: str) -> None:
        self.name = url
        stalled, manifest = timedelta(seconds=STALLED_S), timedelta(seconds=MANIFEST_TIMEOUT_S)
        self._objects = _opened(url, {"read_timeout": stalled, "timeout": timedelta(hours=1)})
        self._small = _opened(url, {"timeout": manifest, "connect_timeout": manifest})

    def close(self) -> None:
        """As `Directory.close`; a bucket has no lock."""

    # --- objects ------------------------------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """As `Objects.put`. The parts of a broken upload are removed by the bucket's lifecycle rules only."""
        views = [memoryview(part).cast("B") for part in parts]
        with self._mapped("write", name):
            if sum(view.nbytes for view in views) <= PART_BYTES:
                self._objects.put(_path(name), b"".join(views), use_multipart=False)
            else:
                self._objects.put(_path(name), iter(views), chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """As `Objects.get`; fewer bytes where the object ends before `stop`."""
        from obstore.exceptions import BaseError

        with self._mapped("read", name):
            try:
                if stop is not None:
                    return memoryview(self._objects.get_range(_path(name), start=start, end=stop))
                options: Any = {"range": {"offset": start}} if start else None
                return memoryview(self._objects.get(_path(name), options=options).bytes())
            except BaseError as error:
                if _reason(error).startswith("416"):  # the object ends before `start`
                    return memoryview(b"")
                raise

    def list(self) -> list[str]:
        """As `Objects.list`. Keys with other names are ignored."""
        return sorted(filter(is_object_name, (path.removeprefix("objects/") for path in self._paths("objects/"))))

    def delete(self, names: Sequence[str]) -> None:
        """As `Objects.delete`."""
        self._delete([_path(name) for name in names])

    def _delete(self, paths: Sequence[str]) -> None:
        with self._mapped("delete", "objects"):
            try:
                if paths:
                    self._small.delete(list(paths))
            except FileNotFoundError:  # Google and Azure stop at one that is missing
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._small.delete(path)

    def sign(self, name: str, expires_s: float) -> str:
        """A URL from which anyone can read an object for so long.

        Raises:
            StoreError: these credentials cannot sign.
        """
        import obstore

        with self._mapped("sign a URL of", name):
            return obstore.sign(self._objects, "GET", _path(name), timedelta(seconds=expires_s))

    # --- the manifest -------------------------------------------------------------------------------------------------

    def manifest(self) -> Found | None:
        """As `Objects.manifest`."""
        try:
            with self._mapped("read", MANIFEST):
                found = self._small.get(MANIFEST)
                is_small = found.meta["size"] <= MOST_BYTES  # what is larger is damaged, and not read
                return Found(bytes(found.bytes()) if is_small else b"", _token(found.meta))
        except MissingObjectError:
            return None

    def swap(self, data: bytes, token: str | None) -> str:
        """As `Objects.swap`."""
        return self._swap(MANIFEST, data, token)

    def _swap(self, path: str, data: bytes, token: str | None) -> str:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._mapped("write", path):
            try:
                mode: Any = "create" if token is None else json.loads(token)
                return _token(self._small.put(path, data, mode=mode, use_multipart=False))
            except PreconditionError as error:
                raise SwapRefusedError(f"{self.name} has another {path} than the one that was read.") from error
            except AlreadyExistsError as error:
                # also S3's 409, by which nothing is decided: another request for this name was under way
                if token is None and self._has(path):
                    raise SwapRefusedError(f"{self.name} already has a {path}.") from error
                raise

    def _has(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            self._small.head(path)
            return True
        return False

    # --- the start ----------------------------------------------------------------------------------------------------

    def require_conditions(self) -> None:
        """Try the conditions that the manifest depends on, with two small objects that are deleted again.

        Raises:
            StoreError: this bucket ignores or refuses them, or these credentials may not write, list or delete.
        """
        probe, other = (f"probe/{secrets.token_hex(8)}" for _ in range(2))
        token = self._swap(probe, b"probe", None)
        try:
            stale = self._swap(other, b"other", None)
            if self._is_accepted(probe, None) or self._is_accepted(probe, stale):
                raise StoreError(
                    f"{self.name} ignores the conditions of conditional writes, so that two syncers could both "
                    "publish; use another bucket, or a directory as the [syncer] store."
                )
            if not (self._is_accepted(probe, token, again=True) and probe in self._paths("probe/")):
                raise StoreError(
                    f"{self.name} refuses a conditional write whose condition holds; use another bucket, or a "
                    "directory as the [syncer] store."
                )
        finally:
            self._delete([probe, other])

    def _is_accepted(self, path: str, token: str | None, *, again: bool = False) -> bool:
        """Whether a write with this condition succeeds. `again`: after a refusal of another kind, once more."""
        try:
            self._swap(path, b"again", token)
        except SwapRefusedError:
            return False
        except StoreError:
            if not again:
                raise
            time.sleep(self.shortest_swap_s)
            return self._is_accepted(path, token)
        return True

    def _paths(self, prefix: str) -> Sequence[str]:
        with self._mapped("list", "objects"):
            return [each["path"] for batch in self._objects.list(prefix=prefix) for each in batch]

    @contextmanager
    def _mapped(self, verb: str, what: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or verb == "write":
                raise StoreError(f"there is no bucket for {self.name} ({_reason(error)}); create it.") from error
            raise MissingObjectError(f"{self.name} has no {what}.") from error
        except (BaseError, ValueError) as error:
            raise StoreError(
                f"cannot {verb} {what} in {self.name} ({_reason(error)}); check the bucket, its endpoint and region, "
                "and that the credentials may read, write, list and delete there."
            ) from error


def _opened(url: str, timeouts: dict[str, timedelta]) -> AzureStore | GCSStore | S3Store:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store, from_url
    except ImportError as error:
        raise ConfigError(f"the store {url} needs the package obstore; pip install 'diloco[bucket]'.") from error
    place, _, options = url.partition("?")
    if re.search(r"//[^/]*:(?!\d+/).*@" if place.startswith("http") else r"//.*:.*@", place):
        raise ConfigError("the URL of a bucket has credentials before its @; set them in the environment instead.")
    given: dict[str, Any] = dict(parse_qsl(options, keep_blank_values=True))
    if unknown := sorted(given.keys() - {"endpoint", "region"}):
        raise ConfigError(
            f"the store {place} has the option {unknown[0]!r}; a URL's options are endpoint and region, and "
            "credentials are set in the environment."
        )
    endpoint = given.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    client: Any = {**timeouts, "allow_http": urlsplit(endpoint).scheme == "http"}
    try:
        opened = from_url(place, client_options=client, retry_config=_NO_RETRIES, **given)
        if not isinstance(opened, AzureStore | GCSStore | S3Store):
            raise ValueError(f"a {type(opened).__name__}")
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"{url} is not the URL of a bucket ({first_line(error)}); use one such as s3://bucket/run, gs://bucket/run "
            "or https://account.blob.core.windows.net/container/run."
        ) from error
    return opened


def _path(name: str) -> str:
    return f"objects/{name}"


def _token(meta: Any) -> str:
    """What obstore compares: an e-tag, and on Google a generation."""
    return json.dumps({key: meta[key] for key in ("e_tag", "version") if meta[key] is not None})


def _reason(error: BaseException) -> str:
    """A short reason: the status and code of the bucket's answer, or why there was none."""
    text = str(error)
    if (detail := _DETAIL.search(text)) is None:
        return first_line(error)
    code = _CODE.search(text)
    return " ".join(filter(None, (*detail.groups(), code and code[1])))
