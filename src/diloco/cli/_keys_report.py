"""The output of `diloco keys`: certificates with their states, the files to copy, and new keys as lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from diloco.cli._output import make_table, print_result
from diloco.exchange.key_pair import CERT, key_line, read_key_pair
from diloco.exchange.wire.address import is_local
from diloco.syncer.keys.auth import REVOKED
from diloco.syncer.keys.certificates import SOON, left
from diloco.syncer.keys.keyring import CA_KEY, NEXT_KEY, SYNCER, Issued, Keyring

THERE = "run/keys/"
"""Target of the copy commands, below the home directory of the other machine."""

USES = {
    SYNCER: 'the syncer: diloco syncer run.toml --keys {keys}, or keys = "{keys}" below [syncer] of its run file',
    "standby": "a second syncer: diloco syncer run.toml --keys {keys}",
    "learner": (
        'the learner {name}: diloco.connect(…, keys="{keys}"), or diloco train run.toml --shard N --name {name} '
        "--keys {keys}"
    ),
    "viewer": (
        "watching: diloco status run.toml --keys {keys}; likewise diloco page, and diloco export or diloco follow for "
        "the model"
    ),
    "evaluator": "evaluating: diloco evaluate --follow HOST:PORT --run run.toml --keys {keys}",
    "rollout": "generating: diloco rl rollout run.toml --name {name} --keys {keys}",
    "reward": "scoring: diloco rl reward run.toml --name {name} --keys {keys}",
    "admin": "steering: diloco admin pause run.toml --keys {keys}; and for all that a viewer does (diloco status)",
}
"""What new keys are for, by role; the first syncer's are of the role standby, too."""


@dataclass(frozen=True)
class KeysReport:
    """The changes that a command made to a keyring.

    Attributes:
        issued: the certificates to list.
        new: names whose new directory must be copied.
        replaced: names whose changed directory must be copied again.
        changed: syncers whose changed list of revoked certificates must be copied.
        grace: how long replaced keys stay valid; None: no keys were replaced.
        stale: syncers whose certificate lacks hosts that another syncer's certificate names.
        authority: "begin" or "finish" of a replacement of the authority.
    """

    keyring: Keyring
    issued: Sequence[Issued]
    new: Sequence[str] = ()
    replaced: Sequence[str] = ()
    changed: Sequence[str] = ()
    grace: timedelta | None = None
    stale: Sequence[str] = ()
    authority: str | None = None

    def show(self, as_json: bool) -> None:
        """Print a table and sentences, or JSON. The only secrets in it are the lines of new keys."""
        now, directory = datetime.now(UTC), self.keyring.directory
        states = [(each, _state(each, now)) for each in self.issued]
        soon = [each.name for each, state in states if state == "ends soon"]
        copies, key_lines = self._copies(), self._key_lines()
        never = [str(directory / name) for name in (CA_KEY, NEXT_KEY) if copies and (directory / name).exists()]

        def show_text() -> None:
            from rich.console import Console

            console = Console(markup=False, highlight=False)
            cells = [
                (it.name, _role(it.name, it.role), _ends(it, state, now), _told(it, state)) for it, state in states
            ]
            console.print(make_table(("name", "role", "ends (UTC)", "state"), cells, num_text=4))
            for line in (*self._notes(soon), *self._instructions(copies, never, key_lines)):
                console.print(line, soft_wrap=True)

        keys = [{**each.model_dump(mode="json"), "state": state} for each, state in states]
        value = {
            "directory": str(directory), "keys": keys, "copy": copies, "never_copy": never, "ends_soon": soon,
            "lines": key_lines,
        }  # fmt: skip
        print_result(as_json, value, show_text, indent=2)

    def _notes(self, soon: Sequence[str]) -> list[str]:
        """What the changes mean for the owners of keys."""
        notes = [f"{name}: its certificate ends soon; `diloco keys rotate {name}` makes a new one." for name in soon]
        if self.grace is not None:
            days = self.grace / timedelta(days=1)
            notes.append(f"The old keys are refused {f'in {days:g} days' if days else 'at once'}; copy these first.")
        if self.authority == "begin":
            notes += ["Both authorities are trusted from now on. Copy the syncers' keys first, then all others."]
            notes += ["Restart each process that was started with a line, with its new line."]
            notes += ["When every machine and process has its new keys: diloco keys rotate ca --finish"]
        if self.authority == "finish":
            notes += ["The old authority is no longer trusted. Copy the syncers' keys first, then all others."]
        return [*notes, *(f"{name} does not name these hosts yet: diloco keys rotate {name}" for name in self.stale)]

    def _instructions(
        self, copies: Sequence[str], never: Sequence[str], key_lines: Mapping[str, str]
    ) -> list[str]:  # fmt: skip
        """Which files to copy, and the same keys as lines."""
        lines = []
        hosts = self.keyring.run.hosts
        if copies and all(is_local(f"[{host}]:1" if ":" in host else f"{host}:1") for host in hosts):
            lines += ["The run's only host is this machine, so nothing needs to be copied. For other machines:"]
        elif copies:
            lines += ["Copy over a trusted channel; replace the name before the colon by the address of that machine:"]
        lines += [f"  {line}" for line in copies]
        for it in (it for it in self.issued if it.name in self.new):
            keys = self.keyring.directory / it.name
            lines += [f"{keys} is for {USES[_role(it.name, it.role)].format(name=it.name, keys=keys)}"]
        if key_lines:
            lines += ["The same keys as lines, for DILOCO_KEYS or a secret store; each is as secret as its directory:"]
        lines += [f"  {name}  {line}" for name, line in key_lines.items()]
        if never:
            lines += [f"Never copy {' or '.join(never)}: its holder can make keys of this run."]
        return lines

    def _copies(self) -> list[str]:
        """Shell commands, in the order in which to run them."""
        directory, lines = self.keyring.directory, []
        for name in self.new:
            machine = self._machine(name)
            lines += [f"ssh {machine} mkdir -p {THERE}", f"scp -r {directory / name} {_remote(machine)}{THERE}"]
        for name in self.replaced:
            lines += [f"scp -r {directory / name} {_remote(self._machine(name))}{THERE}"]
        for name in self.changed:
            if (directory / name / REVOKED).exists():
                lines += [f"scp {directory / name / REVOKED} {_remote(self._machine(name))}{THERE}{name}/"]
        return lines

    def _key_lines(self) -> dict[str, str]:
        """New keys as lines, by name; not those of syncers, which need their directory."""
        folders = {name: self.keyring.directory / name for name in (*self.new, *self.replaced)}
        return {
            name: key_line(read_key_pair(folder))
            for name, folder in folders.items()
            if name not in self.keyring.syncers and (folder / CERT).exists()
        }

    def _machine(self, name: str) -> str:
        """The syncer's first host, or the name itself."""
        return self.keyring.run.hosts[0] if name == SYNCER else name


def _role(name: str, role: str) -> str:
    """The role as people read it: the certificates of both syncers of a run have the role standby."""
    return SYNCER if name == SYNCER else role


def _remote(machine: str) -> str:
    return f"[{machine}]:" if ":" in machine else f"{machine}:"


def _state(it: Issued, now: datetime) -> str:
    if it.revoked is not None and it.revoked <= now:
        return "revoked"
    if it.expires <= now:
        return "expired"
    if it.revoked is not None:
        return "replaced"
    return "ends soon" if it.expires - now <= SOON else "valid"


def _ends(it: Issued, state: str, now: datetime) -> str:
    rest = f" ({left(now, it.expires)})" if state in ("valid", "ends soon") else ""
    return f"{it.expires.astimezone(UTC):%Y-%m-%d}{rest}"


def _told(it: Issued, state: str) -> str:
    told = {"revoked": "revoked {:%Y-%m-%d}", "replaced": "replaced, refused from {:%Y-%m-%d} on"}
    return told.get(state, state).format(it.revoked)
