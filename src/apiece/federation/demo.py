"""A whole federation on this machine, for a look: TLS and keys on, one folder and one process per client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from apiece import data as datasets
from apiece import random
from apiece.data.federated import Federated, resident
from apiece.experiment import Experiment
from apiece.federation import keys, launch
from apiece.federation.client import Place
from apiece.federation.server import Plan, Rules, federated, new_run


def demo(
    experiment: Experiment, folder: Path, progress: Callable[[int], None], tell: Callable[[str], None]
) -> None:
    """Deal a dataset out to clients' folders and run the federation of `experiment` on it.

    The numbers are those of `apiece run` with all clients seen: the same ids, splits, keys and orders.
    """
    key = random.fold(experiment.partition_seed, "partition")
    dealt = datasets.prepare(
        experiment.data,
        experiment.partition,
        clients=experiment.clients,
        key=key,
        test=experiment.test,
        unseen=0.0,
        data_dir=experiment.data_dir,
    )
    data = resident(dealt, "the demo")
    count = data.population
    described = federated(experiment, count, min(experiment.cohort, count))
    plan = Plan(
        described, Rules(min_replies=1.0), count, data.input_shape, data.label_names, new_run(described)
    )
    plan.check()
    folder.mkdir(parents=True)
    keys.certify(folder / "keys")
    (folder / "keys" / "clients").mkdir()
    address = f"127.0.0.1:{launch.free_port()}"
    certificate, secret, known = (str(folder / "keys" / n) for n in ("server.crt", "server.key", "clients"))
    door = launch.Door(address, certificate, secret, known)
    places = [_settled(data, client, folder) for client in range(count)]
    plan.write(folder)
    door.write(folder)

    def start_clients(children: launch.Children) -> None:
        for place in places:
            own, authority = place.state / "key", folder / "keys" / "ca.crt"
            command = launch.client_command(place, address, "cpu", own, authority, insecure=False)
            children.start(command, place.state / "client.log", place.state / launch.HOME)

    launch.serve(folder, progress, tell, start_clients)


def _settled(data: Federated, client: int, folder: Path) -> Place:
    """A client's folder, with its examples and its key; the server gets the public half of that."""
    name = str(client)
    place = Place(folder / "clients" / name / "data.npz", folder / "clients" / name, name)
    public = keys.make_key(place.state / "key")
    public.rename(folder / "keys" / "clients" / f"{name}.pub")
    rows, labels = (
        np.sort(np.concatenate([data.train[client], data.test[client]])),
        np.array(data.label_names),
    )
    np.savez(place.data, x=data.x[rows].numpy(), y=labels[data.labels[rows]], label_names=labels)
    return place
