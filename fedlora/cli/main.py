"""The `fedlora` command: sub-commands are imported when they are used, so `--help` is fast.

Exit codes: 0 success, 2 wrong usage, 130 interrupted, otherwise the code of the error's class
(`fedlora.errors`). A user's mistake is one message on stderr, never a traceback; with `--json` it
is one JSON object on stdout too.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import typer
import typer.core
from typer.core import TyperGroup

from fedlora import __version__
from fedlora.cli.common import (
    INTERNAL_ERROR,
    INTERRUPTED,
    USAGE_ERROR,
    describe_error,
    setup_logging,
)
from fedlora.errors import FedLoraError, FileAccessError

typer.core.HAS_RICH = False  # plain help texts: they can be read by programs, and start faster

COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("fedlora.cli.init", "Write a commented configuration and sample data into a folder."),
    "check": ("fedlora.cli.check", "Resolve and validate a configuration; predict payload and epsilon."),
    "simulate": ("fedlora.cli.simulate", "Run a configuration as a simulation on Ray."),
    "sweep": ("fedlora.cli.sweep", "Run a grid of configurations on Ray."),
    "server": ("fedlora.cli.server", "Start the server of a real federation and its run."),
    "client": ("fedlora.cli.client", "Start one site's connection to the server."),
    "trainer": ("fedlora.cli.trainer", "Start the process that owns a site's data, model and ledger."),
    "certs": ("fedlora.cli.certs", "Make and renew the federation's TLS certificates."),
    "keys": ("fedlora.cli.keys", "Make, allow, rotate and revoke the keys of clients."),
    "status": ("fedlora.cli.status", "Show what runs at a server or a site, and its health."),
    "budget": ("fedlora.cli.budget", "Show, plan, verify, export and back up privacy ledgers."),
    "account": ("fedlora.cli.account", "Account for any mechanism without training."),
    "diagnose": ("fedlora.cli.diagnose", "Gauge, noise and moment diagnostics."),
    "audit": ("fedlora.cli.audit", "Attack a run and compare with its claimed epsilon."),
    "report": ("fedlora.cli.report", "Write a run's report as one HTML file."),
    "compare": ("fedlora.cli.compare", "Compare runs."),
    "export": ("fedlora.cli.export", "Export a run's adapter, reloaded and checked."),
    "dock": ("fedlora.cli.dock", "PAVE specifications: add, match, serve."),
}
"""Name to (module with `app: typer.Typer`, one line of help); what is not installed is left out."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
EPILOG = "Every command has --help with examples, and --json for one object on stdout."


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class LazyGroup(TyperGroup):
    """Imports a sub-command's module only when it is run or its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that are installed."""
        return [name for name, (module, _) in COMMANDS.items() if _exists(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None or not _exists(entry[0]):
            return None
        app = importlib.import_module(entry[0]).app
        command: click.Command = typer.main.get_command(app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands from their static help, without imports."""
        rows = [(name, COMMANDS[name][1]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    cls=LazyGroup,
    help="Private federated fine-tuning of transformer models with LoRA.\n\nExample: fedlora init my-federation\n\n"
    "Example: fedlora --log-level debug simulate my-federation/run.yaml privacy.target_epsilon=3",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=False)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
    log_level: str = typer.Option(
        "",
        "--log-level",
        help="debug, info, warning or error.  [default: FEDLORA_LOG_LEVEL, else info]",
    ),
) -> None:
    if version:
        typer.echo(f"fedlora {__version__}")
        raise typer.Exit(0)
    setup_logging(level=log_level or None)


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    as_json = "--json" in arguments
    if "--version" in arguments[:1]:
        sys.stdout.write(f"fedlora {__version__}\n")
        return 0
    command = typer.main.get_command(app)
    try:
        result: Any = command.main(list(arguments), prog_name="fedlora", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stdout.write(error.format_message() + "\n")
        return 0
    except click.UsageError as error:
        return _usage(error, as_json)
    except click.ClickException as error:
        return _fail(
            {"ok": False, "error": "Usage", "exit_code": 2, "message": error.format_message()}, as_json
        )
    except (click.Abort, KeyboardInterrupt):
        return _fail(
            {"ok": False, "error": "Interrupted", "exit_code": INTERRUPTED, "message": "interrupted"}, as_json
        )
    except FedLoraError as error:
        return _fail(describe_error(error), as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _unexpected(error, as_json)
    return result if isinstance(result, int) else 0


def _usage(error: click.UsageError, as_json: bool) -> int:
    help_ = f" (see: {error.ctx.command_path} --help)" if error.ctx is not None else ""
    record = {
        "ok": False,
        "error": "Usage",
        "exit_code": USAGE_ERROR,
        "message": error.format_message() + help_,
    }
    return _fail(record, as_json)


def _unexpected(error: Exception, as_json: bool) -> int:
    """Report an error that fedlora does not raise on purpose; the traceback only on request."""
    if os.environ.get("FEDLORA_TRACEBACK", "") == "1":
        logging.getLogger("fedlora").exception("internal error")
        raise error
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return _fail(describe_error(_file_error(error)), as_json)
    record = describe_error(error)
    first = (str(error).splitlines() or [""])[0][:300]
    record["message"] = (
        f"internal error {type(error).__name__}: {first} (set FEDLORA_TRACEBACK=1 for the traceback)"
    )
    record["exit_code"] = INTERNAL_ERROR
    return _fail(record, as_json)


def _file_error(error: OSError) -> FileAccessError:
    """Say which file it was (of a move, where it was to go) and what to do where the disk is full."""
    name = error.filename2 if error.filename2 is not None else error.filename
    where = "" if name is None else f"{os.fsdecode(name) if isinstance(name, str | bytes) else name}: "
    advice = "; free space, then start again" if error.errno in _FULL else ""
    return FileAccessError(f"{where}{error.strerror or error}{advice}")


def _fail(record: dict[str, Any], as_json: bool) -> int:
    sys.stderr.write(f"fedlora: {record['message']}\n")
    if as_json:
        sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    return int(record["exit_code"])


def run() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
