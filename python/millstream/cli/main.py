"""The tree of commands and the one place where an exception becomes an exit code.

Where it sits: the entry point `millstream`; each command is a module beside this one, imported when it is asked for: a
server need not load what a demo uses.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.cli.context import (
    EXIT_CODES,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    App,
    client_options,
    complain,
    exit_code,
)
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = "millstream"
COMPLETION_VARIABLE: Final = "_MILLSTREAM_COMPLETE"
SHELLS: Final = ("bash", "zsh", "fish")

EPILOG: Final = """\b
Start here:
  millstream serve                            run a server (in another terminal)
  millstream append hello "hi" --create       write a record, make the stream
  millstream tail hello                       see it, then whatever comes

\b
More:
  seq 100000 | millstream append numbers - --create
  millstream read numbers | wc -l
  millstream stream list

\b
Exit codes:
"""


COMMANDS: Final = {
    "serve": "serve",
    "append": "append",
    "read": "read",
    "tail": "tail",
    "stream": "stream",
    "backup": "backup",
    "restore": "backup",
    "verify": "verify",
    "pipeline": "pipeline_submit",
    "doctor": "doctor",
    "demo": "demo",
    "completion": "main",
}
"""Each command and the module that has it whole, in the order in which a newcomer needs them."""


class Tree(click.Group):
    def list_commands(self, _: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        module = COMMANDS.get(name)
        if module is None:
            return None
        command: click.Command = getattr(import_module(f"millstream.cli.{module}"), name)
        return command


@click.group(
    cls=Tree,
    invoke_without_command=True,
    epilog=EPILOG + "".join(f"  {code:<4}{text}\n" for code, text in EXIT_CODES.items()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, help="Print the version and exit.")
@client_options
@click.pass_context
def cli(context: click.Context, version: bool) -> None:
    """Millstream: durable streams over plain HTTP."""
    context.ensure_object(App)
    if version:
        import millstream

        click.echo(f"{PROGRAM} {millstream.__version__}")
        context.exit(0)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print the completion script for a shell (default: the one in $SHELL).

    \b
    bash:  eval "$(millstream completion bash)"      in ~/.bashrc
    zsh:   eval "$(millstream completion zsh)"       in ~/.zshrc
    fish:  millstream completion fish > ~/.config/fish/completions/millstream.fish

    Names of streams are completed too, if the server answers quickly.
    """
    from click.shell_completion import get_completion_class

    shell = shell or os.path.basename(os.environ.get("SHELL", ""))
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for shell `{shell}`; choose bash, zsh or fish")
    click.echo(found(cli, {}, PROGRAM, COMPLETION_VARIABLE).source())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    _take_ctrl_c()
    app = App()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments), app)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has enough. The interpreter must not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _take_ctrl_c() -> None:
    """Background jobs of a script, and what some CI runners start, inherit SIGINT as ignored. Whoever sends it to a
    command wants it to end in order, so every command takes it, as `serve` does. Whether SIGHUP is ignored stays
    the caller's choice: that is what `nohup` is for."""
    inherited = signal.getsignal(signal.SIGINT)
    if inherited is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(arguments: list[str], app: App) -> int:
    try:
        with cli.make_context(PROGRAM, arguments, obj=app) as context:
            result: Any = cli.invoke(context)
            return result if isinstance(result, int) else EXIT_OK
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        complain(_sentence(error.format_message()), _usage_hint(error), "usage", as_json=app.json)
        return exit_code(error)
    except MillstreamError as error:
        hint = None if error.hint is None else _sentence(error.hint)
        complain(_sentence(error.message), hint, error.code, as_json=app.json)
        return exit_code(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        name = f"`{error.filename}`: " if error.filename else ""
        complain(f"{name}{error.strerror or error}", None, "os_error", as_json=app.json)
        return EXIT_FAILURE


def _usage_hint(error: click.ClickException) -> str | None:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"see `{error.ctx.command_path} --help`"
    return None


def _sentence(text: str) -> str:
    """House style: begins in lower case, ends without a full stop. Names stay as they are."""
    text = text.strip().removesuffix(".")
    first = text.partition(" ")[0]
    return text[:1].lower() + text[1:] if first.isalpha() and first[1:].islower() else text
