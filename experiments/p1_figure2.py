"""FedEC, Lan et al. 2023, Figure 2: how clients' features move over the rounds, with and without memory."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from p1_table2 import CIFAR_10, COLUMNS, ROWS, small
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.manifold import TSNE

from apiece import Experiment, Params, tree
from apiece.evaluate import models
from apiece.experiment import read
from apiece.prepare import prepare
from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table

CLIENTS = 10  # of a hundred, whose features are recorded
Floats = NDArray[np.float32]


def experiment(row: str, rounds: int) -> Experiment:
    found = ROWS[CIFAR_10][row]
    return replace(
        COLUMNS[CIFAR_10],
        method=found.method,
        settings=found.settings,
        rounds=rounds,
        evaluate_every=rounds,
        evaluate_last=0,
        evaluate_clients=CLIENTS,
        checkpoint_every=rounds,
    )


@torch.no_grad()
def features(run: Run) -> Floats:
    """(rounds, clients, features): after each round, the mean of what the last layer sees of a client's own
    training examples, by the model it has just adapted. A run keeps no such models: it is trained once more.
    """
    session = prepare(read(run.folder / "experiment.toml"), None, None)
    f, ids = session.federation, list(range(min(CLIENTS, session.federation.data.population)))
    width, device = f.start["head.weight"].shape[1], f.task.device
    seen_through = Params(
        {"head.weight": torch.eye(width, device=device), "head.bias": torch.zeros(width, device=device)}
    )
    examples = []
    for client in ids:
        rows, even = f.rows(f.data.train, [client], [client], 0)
        examples.append(f.shard(tree.take(rows, 0), even).all().x)
    recorded = []
    for closed in session.training.rounds(session.server, 0, session.experiment.rounds):
        done = closed.round.index + 1
        broadcast = session.training.broadcast(closed.server, done)
        adapted = [theta for _, theta in models(session.engine, f, broadcast, ids, done)]
        means = [
            f.task.predict(theta | seen_through, x).mean(0)
            for theta, x in zip(adapted, examples, strict=True)
        ]
        recorded.append(torch.stack(means))
    return torch.stack(recorded).cpu().numpy()


def change(track: Floats) -> float:
    """In percent: how far a client's feature moves in a round, as a share of its length."""
    steps = np.linalg.norm(np.diff(track, axis=0), axis=1)
    return float(100 * steps.mean() / np.linalg.norm(track, axis=1).mean())


def switches(track: Floats) -> float:
    """In percent of the rounds: how often it goes from one to the other of its two clusters (2-means).

    A path that drifts does so once, one that jumps between optima again and again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a feature that never moves is one cluster
        labels = KMeans(2, n_init=10, random_state=0).fit_predict(track)
    return float(100 * np.mean(labels[1:] != labels[:-1]))


def plane(found: Floats) -> dict[str, list[tuple[float, float]]]:
    """All clients' features of all rounds by t-SNE, a path for each client."""
    rounds, clients, width = found.shape
    every = found.transpose(1, 0, 2).reshape(-1, width)
    tsne = TSNE(perplexity=min(30, (len(every) - 1) / 3), init="pca", random_state=0)
    placed = tsne.fit_transform(every).reshape(clients, rounds, 2).astype(float).round(2).tolist()
    return {f"client {client}": [(x, y) for x, y in path] for client, path in enumerate(placed)}


def measure(run: Run) -> Measured:
    found = features(run)
    tracks = found.transpose(1, 0, 2)
    numbers = {name: float(np.mean([of(track) for track in tracks])) for name, of in FIGURES.items()}
    return Measured(numbers, paths=plane(found))


FIGURES: dict[str, Any] = {"change": change, "switches": switches}

TABLE = Table(
    id="p1-figure2",
    title="How clients' mean features move over the rounds: FedEC without its constraint, and with it",
    source="Lan, Chen, Xie, Chen, He, Zhang, Chen, Xu 2023 (FedEC), Figure 2",
    cells={
        (row, f"{rounds} rounds"): Cell(experiment(row, rounds), measure)
        for rounds in (30, 100)
        for row in ("FedEC-wo", "FedEC")
    },
    published={},
    figures=dict.fromkeys(FIGURES, "%"),
    seeds=(0, 1, 2),
    settings=(
        f"CIFAR-10 (100,2) as in p1-table2, with the settings of its first trials: nothing was searched. The "
        f"paper names neither dataset nor settings. The first {CLIENTS} clients; after a round each of them "
        f"adapts afresh to what the server has (FedEC: under the constraint to its θ̂), and the mean over its "
        f"training examples of what the last layer sees is recorded.",
        "The paper shows pictures and says: FedEC-wo scattered, in several clusters it jumps between; FedEC "
        "one cluster, changing gradually. In numbers: change is how far a feature moves in a round, as a "
        "share of its length; switches, how often it goes from one of its two clusters (2-means) to the "
        "other. Smaller is steadier. The pictures are t-SNE of all clients and rounds, a colour for each.",
    ),
    departures=("t-SNE of all clients in one plane; in the paper a row for each client.",),
    small=lambda experiment: replace(small(experiment), rounds=4, evaluate_every=4),
)
