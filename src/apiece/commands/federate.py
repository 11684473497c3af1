"""`apiece federate`: a demo on one machine, the server, a client."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from apiece import terminal
from apiece.commands.flags import WHAT, ExperimentFile, experiment_of
from apiece.errors import ApieceError
from apiece.experiment import Experiment
from apiece.terminal import OUTPUT, JsonFlag

app = typer.Typer(
    name="federate",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="A real federation, over a network: a server, and clients with data of their own. Runs on Flower: "
    "`pip install 'apiece[flower]'`. How to set one up: docs/federation.md.",
)

WHO, ROUND, DOOR = "Who takes part", "A round", "The way in"


def _option(panel: str, help: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


Method = Annotated[
    str | None, _option(WHAT, "A method, `wrapper(method)` or `module:Class`.", "--method", "-m")
]
Set = Annotated[
    list[str] | None,
    _option(WHAT, "A setting of the method. May be repeated.", "--set", "-s", metavar="KEY=VALUE"),
]
Model = Annotated[str | None, _option(WHAT, "A model, `mlp(hidden=(64,32))` or `module:factory`.")]
Rounds = Annotated[int | None, _option(WHAT, "Rounds.", "--rounds", "-r")]
Cohort = Annotated[int | None, _option(WHAT, "Clients per round. Default: all that train.")]
Seed = Annotated[int | None, _option(WHAT, "Seed of the training.")]
Out = Annotated[Path | None, _option(OUTPUT, "Folder for the files. Default: in runs/.", "--out", "-o")]


@app.command()
def demo(
    experiment: ExperimentFile = None,
    clients: Annotated[int, _option(WHO, "Clients to deal the data to, if it has none of its own.")] = 3,
    data: Annotated[str | None, _option(WHO, "A dataset (`apiece datasets`) or a file or folder.")] = None,
    partition: Annotated[str | None, _option(WHO, "How to deal it: `iid`, `dirichlet:ALPHA`, …")] = None,
    method: Method = None,
    set: Set = None,
    model: Model = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    seed: Seed = None,
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """A whole federation on this machine: a server and clients as processes, TLS and keys on.

    Every client ends with its own model in its own folder.

    Example: `apiece federate demo --clients 3 --method fedec`
    """
    from apiece.federation import launch
    from apiece.federation.server import new_run

    launch.require_flower()
    from apiece.federation import demo as demos

    given = {"data": data, "partition": partition, "method": method, "model": model, "seed": seed}
    described = experiment_of(
        experiment, {**given, "rounds": rounds or (None if experiment else 5), "set": set}
    )
    described = replace(described, clients=clients, cohort=cohort or max(clients, described.cohort))
    folder = out or Path("runs") / f"federation-{new_run(described)}"
    if folder.exists():
        raise ApieceError(f"{folder} exists: choose another folder with --out")
    with terminal.bar(described.method, described.rounds, json, folder, "apiece federate demo") as tick:
        demos.demo(described, folder.resolve(), lambda done: tick(done, None), _tell(json))
    terminal.show_runs([folder], folder, json)
    if not json:
        typer.echo(f"models: {folder}/clients/*/personalized.safetensors")


@app.command()
def server(
    experiment: ExperimentFile = None,
    method: Method = None,
    set: Set = None,
    model: Model = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    seed: Seed = None,
    start: Annotated[str | None, _option(WHAT, "A model to start from: a run, a .safetensors file.")] = None,
    prior: Annotated[str | None, _option(WHAT, "Likewise: the prior of methods that keep to one.")] = None,
    test: Annotated[float | None, _option(WHAT, "Share of each client's examples held out.")] = None,
    evaluate_every: Annotated[int | None, _option(WHAT, "Rounds between evaluations.")] = None,
    input_shape: Annotated[
        str, _option(WHO, "Shape of an example: `64`, or `1,28,28`. The clients' data must have it.")
    ] = "",
    labels: Annotated[
        str, _option(WHO, "How many labels there are, numbered from 0; or their names: `cat,dog`.")
    ] = "",
    clients: Annotated[
        int, _option(WHO, "Clients that must have joined before the first round. Default: one per key.")
    ] = 0,
    min_replies: Annotated[
        float, _option(ROUND, "Share of the cohort that must reply, or the round is void.")
    ] = 0.5,
    deadline: Annotated[float, _option(ROUND, "Seconds a round waits for replies.")] = 600.0,
    max_norm: Annotated[float, _option(ROUND, "Updates with a larger norm are refused.")] = math.inf,
    address: Annotated[str, _option(DOOR, "HOST:PORT to listen at.")] = "0.0.0.0:8000",
    certificate: Annotated[str, _option(DOOR, "The server's certificate, a .pem or .crt file.")] = "",
    private_key: Annotated[str, _option(DOOR, "Its private key.")] = "",
    client_keys: Annotated[
        str, _option(DOOR, "Folder of the clients' public keys: NAME.pub lets a client in and names it.")
    ] = "",
    insecure: Annotated[
        bool, _option(DOOR, "Neither encrypt nor authenticate; clients say their names.", "--insecure")
    ] = False,
    resume: Annotated[
        Path | None, _option(OUTPUT, "Go on with a federation that was interrupted: its folder.")
    ] = None,
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Serve a federation: wait for its clients, train with them, and print the table.

    Example: `apiece federate server --method fedec --model mlp --input-shape 64 --labels 10 --rounds 50
    --certificate server.crt --private-key server.key --client-keys keys`

    After an interruption: `apiece federate server --resume DIR`
    """
    from apiece.federation import launch
    from apiece.federation.server import Plan, Rules, federated, new_run

    launch.require_flower()
    from apiece.federation import keys

    if resume is not None:
        _run(Plan.read(resume).experiment, resume, json)
        return
    door = launch.Door(
        address, _absolute(certificate), _absolute(private_key), _absolute(client_keys), insecure
    )
    door.check()
    count = clients or (len(keys.names(Path(client_keys))) if client_keys else 0)
    if not count:
        raise ApieceError("say how many clients train: --clients 3, or a folder with their keys")
    given = {"method": method, "model": model, "rounds": rounds, "seed": seed, "start": start, "prior": prior}
    described = experiment_of(
        experiment, {**given, "test": test, "evaluate_every": evaluate_every, "set": set}
    )
    described = replace(described, start=_absolute(described.start), prior=_absolute(described.prior))
    described = federated(described, count, cohort or count)
    rules = Rules(min_replies, deadline, max_norm)
    plan = Plan(described, rules, count, _shape(input_shape), _labels(labels), new_run(described))
    plan.check()
    folder = out or Path("runs") / f"federation-{plan.run}"
    if folder.exists() and any(folder.iterdir()):
        raise ApieceError(f"{folder} is not empty: choose another folder with --out, or --resume it")
    folder.mkdir(parents=True, exist_ok=True)
    plan.write(folder)
    door.write(folder)
    _run(described, folder, json)


def _run(described: Experiment, folder: Path, json: bool) -> None:
    from apiece.federation import launch

    if (folder / "summary.json").exists():
        raise ApieceError(f"{folder} is finished: see it with: apiece report {folder} -o report.html")
    again = f"apiece federate server --resume {folder}"
    with terminal.bar(described.method, described.rounds, json, folder, again, launch.DOOR) as tick:
        launch.serve(folder.resolve(), lambda done: tick(done, None), _tell(json))
    terminal.show_runs([folder], folder, json)


@app.command()
def client(
    server: Annotated[str, _option(DOOR, "The server's HOST:PORT.", metavar="HOST:PORT")],
    data: Annotated[Path, _option(WHO, "This client's examples: an .npz, .csv or .parquet file.")],
    state: Annotated[
        Path, _option(WHO, "This client's folder: its states, which survive restarts, and its model.")
    ],
    label_column: Annotated[str, _option(WHO, "The data's column of labels.")] = "label",
    device: Annotated[str, _option(WHO, "`cpu`, `cuda`, `cuda:N`, or `auto`.")] = "auto",
    key: Annotated[Path | None, _option(DOOR, "This client's private key.")] = None,
    root_certificate: Annotated[
        Path | None,
        _option(DOOR, "The authority that signed the server's certificate, if it is your own."),
    ] = None,
    name: Annotated[str, _option(DOOR, "With --insecure: this client's name.")] = "",
    insecure: Annotated[bool, _option(DOOR, "Neither encrypt nor authenticate.", "--insecure")] = False,
) -> None:
    """Take part in a federation, until stopped: the examples are read here, and stay here.

    Example: `apiece federate client --server server.example.org:8000 --data patients.csv --state ward
    --key ward.key --root-certificate ca.crt`

    The personalized model is in the state folder: personalized.safetensors.
    """
    from apiece.choice import pick_device
    from apiece.federation import launch
    from apiece.federation.client import Place

    launch.require_flower()
    for path in (data, key, root_certificate):
        if path is not None and not path.exists():
            raise ApieceError(f"no such file: {path}")
    if insecure and not name:
        raise ApieceError("with --insecure a client says its name: --name NAME")
    place = Place(data, state, name, label_column, pick_device(device))
    rows = len(place.examples().y)
    typer.echo(f"{rows} examples in {data}; connecting to {server}", err=True)
    launch.run_client(launch.client_command(place, server, device, key, root_certificate, insecure), state)


def _absolute(text: str) -> str:
    return str(Path(text).expanduser().resolve()) if text else text


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ApieceError(f"--input-shape is the shape of an example, like 64 or 1,28,28; got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _labels(text: str) -> tuple[str, ...]:
    count = int(text) if text.isdecimal() else 0
    names = tuple(str(i) for i in range(count)) or tuple(name.strip() for name in text.split(","))
    if len(names) < 2 or not all(names) or len({*names}) < len(names):
        raise ApieceError(f"--labels is how many labels there are, or their names like cat,dog; got {text!r}")
    return names


def _tell(quiet: bool) -> Callable[[str], None]:
    def tell(line: str) -> None:
        if not quiet:
            terminal.err.print(line, highlight=False, markup=False, soft_wrap=True)

    return tell
