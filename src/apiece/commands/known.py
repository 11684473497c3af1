"""Commands for what there is: methods, datasets, models; to fetch a dataset, and to examine a method."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from apiece import catalog, settings, terminal
from apiece.check import examine
from apiece.choice import pick_device
from apiece.commands.flags import HOW, SetFlag
from apiece.data import DATASETS
from apiece.data.place import data_folder
from apiece.folder import json_text
from apiece.models import MODELS
from apiece.terminal import JsonFlag
from apiece.traffic import traffic
from apiece.wrappers import WRAPPERS


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One method, or `wrapper(method)`: its settings and their defaults."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """The methods and wrappers, or the settings of one.

    Example: `apiece methods fedavg`
    """
    if name is not None:
        _one_method(name, json)
        return
    rows = []
    for entry in catalog.names():
        sizes, described = traffic(catalog.build(catalog.example(entry), {})), catalog.describe(entry)
        rows.append(
            {
                "name": entry if json or entry not in WRAPPERS else f"{entry}(…)",
                "kind": described.kind,
                "paper": described.paper,
                "up": f"{sizes.up:.2g}",
                "down": f"{sizes.down:.2g}",
                "keeps": sizes.memory,
                "what": described.what,
            }
        )
    terminal.show_rows(rows, json)


def datasets(json: JsonFlag = False) -> None:
    """The datasets known by name; your own are given to `--data` as a path."""
    rows = [{"name": name, "what": what} for name, what in DATASETS.items()]
    own = {"name": "PATH", "what": "your own .npz, .csv or .parquet file, or a folder with a file per client"}
    terminal.show_rows(rows if json else [*rows, own], json)


def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset (`apiece datasets`).")],
    data_dir: Annotated[
        str, typer.Option(help="The data folder. Default: what APIECE_DATA says, or ~/.cache/apiece.")
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Fetch a dataset into the data folder, or say where it is to be had by hand.

    Files are checked against their published checksums. What was interrupted goes on where it broke off.

    Example: `apiece download cifar10 --data-dir data`
    """
    from apiece.data import download as downloads

    if name in downloads.BY_HAND:
        typer.echo(downloads.BY_HAND[name])
        return
    with terminal.download_bar(json) as tick:
        found = downloads.download(name, data_folder(data_dir), tick)
    terminal.show_rows([{"name": name, "file": str(path)} for path in found], json)


def models(json: JsonFlag = False) -> None:
    """The built-in models; your own are given to `--model` as `module:factory` or `file.py:factory`."""
    rows = [{"name": name, "what": entry.description} for name, entry in MODELS.items()]
    own = {"name": "file.py:factory", "what": "your own: a function that returns a torch.nn.Module"}
    terminal.show_rows(rows if json else [*rows, own], json)


def check(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method, `wrapper(method)` or `file.py:Class`.")
    ],
    set: SetFlag = None,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.", rich_help_panel=HOW)] = "cpu",
    json: JsonFlag = False,
) -> None:
    """Examine a method: the conformance suite that every method here passes. Exit code 1: it does not.

    Example: `apiece check my_method.py:MyMethod`
    """
    findings = examine(catalog.build(method, settings.nested(set or [])), str(pick_device(device)))
    if json:
        typer.echo(json_text([finding._asdict() for finding in findings]), nl=False)
    else:
        for finding in findings:
            mark = "[green]✓[/]" if finding.ok else "[red]✗[/]"
            terminal.out.print(
                f"{mark} {escape(finding.rule)}  {escape(finding.detail)}".rstrip(), soft_wrap=True
            )
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _one_method(name: str, as_json: bool) -> None:
    method = catalog.build(name if "(" in name else catalog.example(name), {})
    described = catalog.describe(name.partition("(")[0].strip())
    table = catalog.settings_of(method)
    if as_json:
        facts = {"name": name, **described._asdict(), **traffic(method)._asdict(), "settings": table}
        typer.echo(json_text(facts), nl=False)
        return
    typer.echo(f"{name}: {described.what}")
    typer.echo(", ".join(part for part in described[:2] if part))
    sizes = traffic(method)
    typer.echo(f"per round, in model sizes: {sizes.up:.2g} up, {sizes.down:.2g} down; keeps {sizes.memory}")
    slots = [key for key, value in table.items() if isinstance(value, dict) and "local" in value]
    path = ".".join([*slots[:1], "local.lr"])
    typer.echo(f"\nSettings, as in an experiment file (on the command line: --set {path}=0.1):")
    typer.echo(settings.to_toml({"settings": table}))
