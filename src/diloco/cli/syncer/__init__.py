"""`diloco syncer`: serve one run, and the commands that maintain the state of a run."""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from diloco.cli.syncer import promote, serve, state
from diloco.errors import ConfigError


class _CommandWithSubcommands(TyperGroup):
    """A command (the callback) that also has subcommands: `diloco syncer RUN_FILE`, `diloco syncer check STORE`.

    If the first argument names a subcommand, the subcommand runs; otherwise all arguments are the command's own.
    """

    allow_interspersed_args = True  # the command's options may follow its argument

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].isidentifier() and args[0] not in self.commands and not Path(args[0]).exists():
            known = ", ".join(self.commands)
            raise ConfigError(f"there is no run file and no command {args[0]!r} of `diloco syncer`; commands: {known}.")
        if not args or args[0] not in self.commands:
            if unexpected := super(TyperGroup, self).parse_args(ctx, args):  # a group keeps them for a subcommand
                raise ConfigError(
                    f"unexpected argument {unexpected[0]!r}; subcommands come first: diloco syncer check STORE"
                )
            return []
        ctx._protected_args, ctx.args = args[:1], args[1:]
        return args[1:]

    def invoke(self, ctx: Any) -> Any:
        if not ctx._protected_args:
            return super(TyperGroup, self).invoke(ctx)
        name, command, args = self.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        assert command is not None
        # a child of the parent context: the command's own arguments are not part of a subcommand's usage line
        with command.make_context(f"{ctx.info_name} {name}", args, parent=ctx.parent) as own:
            return command.invoke(own)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return super(TyperGroup, self).collect_usage_pieces(ctx)


app = typer.Typer(cls=_CommandWithSubcommands, add_completion=False, pretty_exceptions_enable=False)
app.callback()(serve.command)
app.command()(state.check)
app.command("promote")(promote.command)
