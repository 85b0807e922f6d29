"""`diloco syncer`: serve one run; and one file for each command that looks after a run's state."""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from diloco.cli.syncer import backup, check, promote, restore, serve
from diloco.errors import ConfigError


class _ServesUnlessTold(TyperGroup):
    """A command (the callback) with others beside it: the first argument names one of them, or is the command's own."""

    allow_interspersed_args = True  # of the command's own arguments: diloco syncer RUN_FILE --port-file FILE

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].isidentifier() and args[0] not in self.commands and not Path(args[0]).exists():
            known = ", ".join(self.commands)
            raise ConfigError(f"there is no run file and no command {args[0]!r} of `diloco syncer`; commands: {known}.")
        if not args or args[0] not in self.commands:
            return super(TyperGroup, self).parse_args(ctx, args)
        ctx._protected_args, ctx.args = args[:1], args[1:]
        return args[1:]

    def invoke(self, ctx: Any) -> Any:
        if not ctx._protected_args:
            return super(TyperGroup, self).invoke(ctx)
        name, command, args = self.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        assert command is not None
        # the arguments of this context belong to the command itself, and are none of this one's usage
        with command.make_context(f"{ctx.info_name} {name}", args, parent=ctx.parent) as own:
            return command.invoke(own)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return super(TyperGroup, self).collect_usage_pieces(ctx)


app = typer.Typer(cls=_ServesUnlessTold, add_completion=False, pretty_exceptions_enable=False)
app.callback()(serve.command)
app.command("check")(check.command)
app.command("backup")(backup.command)
app.command("restore")(restore.command)
app.command("promote")(promote.command)
