"""Commands for what runs have left: report, curves, export, personalize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apiece import terminal
from apiece.commands.flags import RunFolder
from apiece.errors import ApieceError
from apiece.terminal import JsonFlag


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Runs, or folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: table, learning curves, every client, the partition.

    Example: `apiece report runs/first runs/second -o report.html`
    """
    from apiece import report as reports  # with matplotlib: slow to import

    runs = [run for folder in folders for run in _runs_in(folder)]
    typer.echo(f"report: {reports.write(runs, output)}")


def curves(folder: RunFolder, json: JsonFlag = False) -> None:
    """Adaptation curves of a run: its unseen clients' score by personalization epochs and by local examples.

    They are written to adaptation.csv in its folder, where `apiece report` finds them.

    Example: `apiece curves runs/first`
    """
    from apiece import adaptation, deploy

    opened, server, round = deploy.latest(folder)
    points = adaptation.curves(opened, server, round)
    adaptation.write(folder, points)
    terminal.show_rows(
        [
            {
                "along": p.along,
                "amount": str(p.amount),
                f"{opened.federation.task.headline} in %": f"{100 * p.mean:.1f}",
                "worst 10 %": f"{100 * p.worst10:.1f}",
            }
            for p in points
        ],
        json,
    )


def export(
    folder: RunFolder,
    client: Annotated[str, typer.Option(help="The client, by id or by name (see partition.csv).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Write the personalized model of one client of a run: its model apiece.

    Example: `apiece export runs/first --client 7 -o client7.safetensors`

    Load it with `safetensors.torch.load_file`; its metadata name the model, the input shape and the labels.
    """
    from apiece import deploy

    terminal.show_deployed(deploy.export(folder, client, output), output, json)


def personalize(
    folder: RunFolder,
    data: Annotated[
        Path, typer.Option(help="The newcomer's .npz, .csv or .parquet file: the run's features and labels.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Write a personalized model for a client that was not part of the run.

    Example: `apiece personalize runs/first --data newcomer.npz -o newcomer.safetensors`
    """
    from apiece import deploy

    terminal.show_deployed(deploy.personalize(folder, data, output), output, json)


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it."""
    if (folder / "experiment.toml").exists() or not folder.is_dir():
        return [folder]
    inside = sorted(path.parent for path in folder.glob("*/experiment.toml"))
    if not inside:
        raise ApieceError(f"{folder} holds no run")
    return inside
