"""The command `twostroke`."""

import os
from typing import IO, Any

import click

from .. import __version__
from ..errors import ConfigError, TwostrokeError
from .commands import bench, chat, doctor, generate, keys, models, plan, serve, up, verify
from .commands import workers as workers_


class _Failure(click.ClickException):
    """Our errors, as click shows its own; the exit code is 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """A line each, to stderr."""
        for line in self.message.splitlines():
            click.echo(f"error: {line}", err=True, file=file)


class _UsageFailure(_Failure):
    """The same for a wrong setting."""

    exit_code = 2


class _Group(click.Group):
    """Commands in the order in which a reader needs them; our errors without tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except TwostrokeError as error:
            raise (_UsageFailure if isinstance(error, ConfigError) else _Failure)(error.message) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="twostroke")
def main() -> None:
    """Serve a language model with its two strokes apart: prefill and decode in separate processes.

    \b
    Start here, in two terminals:
      twostroke up
      twostroke generate "Why is the sky blue?"

    Settings come from flags, then TWOSTROKE_* variables, then a TOML file (--config), then defaults:
    --max-batch 8, TWOSTROKE_MAX_BATCH=8, and max_batch = 8 under [worker] mean the same.
    """
    # Read when gRPC is imported, which commands do later: else each server that stops leaves a line on stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Nothing of ours goes on in a fork; being ready for that costs a busy gateway a twentieth of its time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


for command in (up.up, generate.generate, chat.chat, bench.bench, models.models, models.convert, verify.verify):
    main.add_command(command)
for command in (plan.plan, doctor.doctor, serve.gateway, serve.prefill, serve.decode, serve.both, serve.health):
    main.add_command(command)
main.add_command(workers_.workers)
main.add_command(keys.keys)

if __name__ == "__main__":
    main()
