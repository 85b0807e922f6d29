"""HAProxy in front of a syncer, by the configuration of `templates/haproxy`."""

from __future__ import annotations

import csv
import io
import re
import socket
import subprocess
import tempfile
from pathlib import Path
from shutil import which
from typing import Self

from benchmarks.processes import until
from diloco.demo.plan import free_port

TEMPLATE = Path(__file__).parents[1] / "templates" / "haproxy" / "haproxy.cfg"


def program() -> str | None:
    """Where HAProxy is; None: not installed."""
    return which("haproxy") or which("haproxy", path="/usr/sbin:/usr/local/sbin")


def configuration(port: int, admin: Path, syncer: str, standby: str | None, changed: dict[str, str]) -> str:
    """The template with places of this machine, and with `changed`: new text by text that the template has once."""
    places = {
        "    user haproxy\n    group haproxy\n": "",
        "log /dev/log local0": "log stdout format raw local0",
        "/run/haproxy/admin.sock mode": f"{admin} mode",
        "bind :7700 ": f"bind 127.0.0.1:{port} ",
        "server syncer 127.0.0.1:7701": f"server syncer {syncer}",
    }
    text = TEMPLATE.read_text()
    if standby is not None:
        text = re.sub(r"^( *)#\+ ", r"\1", text, flags=re.MULTILINE)
        places["server standby b.internal:7701"] = f"server standby {standby}"
    for old, new in {**places, **changed}.items():
        if text.count(old) != 1:
            raise ValueError(f"{TEMPLATE} has {old!r} {text.count(old)} times, and not once")
        text = text.replace(old, new)
    return text


class Proxy:
    """HAProxy as a process; a context manager that ends it.

    Arguments:
        syncer, standby: "host:port" behind it.
        changed: as in `configuration`.

    Attributes:
        address: what learners dial.
    """

    def __init__(
        self, directory: Path, syncer: str, *, standby: str | None = None, changed: dict[str, str] | None = None
    ) -> None:
        found = program()
        if found is None:
            raise RuntimeError("HAProxy is not installed; apt-get install haproxy")
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "haproxy.log"
        self._short = tempfile.TemporaryDirectory()  # a socket needs a short path
        self._admin = Path(self._short.name) / "admin"
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        file = directory / "haproxy.cfg"
        file.write_text(configuration(port, self._admin, syncer, standby, changed or {}))
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([found, "-db", "-f", str(file)], stdout=log, stderr=log)
        until(lambda: self.process.poll() is not None or self._serves(), "HAProxy does not start")
        if self.process.poll() is not None:
            self._short.cleanup()
            raise RuntimeError(self.log())

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def statistics(self, name: str, part: str) -> dict[str, str]:
        """Of a frontend or backend: `part` is "FRONTEND", "BACKEND" or a server."""
        rows = csv.DictReader(io.StringIO(self._ask("show stat").removeprefix("# ")))
        return next(row for row in rows if (row["pxname"], row["svname"]) == (name, part))

    def _ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self._admin))
            admin.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: admin.recv(1 << 16), b"")).decode()

    def _serves(self) -> bool:
        try:
            return self.statistics("syncer", "syncer")["status"].startswith("UP")
        except OSError:
            return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._short.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
