"""The `apiece` command."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.logging import RichHandler
from rich.markup import escape

from apiece import terminal
from apiece.commands import federate, finished, known, training
from apiece.commands.reproduce import reproduce
from apiece.errors import ApieceError
from apiece.importing import own_lines

app = typer.Typer(
    name="apiece",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized federated learning: many clients, each with its own small data, end up with a good "
    "model **apiece**.\n\nStart with `apiece run`, then `apiece report`.",
)


app.add_typer(federate.app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"apiece {version('apiece')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Holds what is asked of the command itself."""


for command in (
    training.run,
    training.compare,
    training.continual,
    training.tune,
    reproduce,
    finished.curves,
    training.resume,
    finished.report,
    known.methods,
    known.datasets,
    known.download,
    known.models,
    known.check,
    finished.export,
    finished.personalize,
):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=terminal.err, show_path=False, show_time=False)],
    )
    try:
        app(arguments, prog_name="apiece")
    except ApieceError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        lines = own_lines(error)
        if not lines or os.environ.get("APIECE_TRACEBACK"):
            raise
        notes = [*lines, *getattr(error, "__notes__", []), "For the whole traceback: APIECE_TRACEBACK=1"]
        _fail("\n  ".join([f"{type(error).__name__}: {error}", *notes]))


def _fail(message: str) -> None:
    terminal.err.print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)
