"""FedPA, Shen et al. 2023, Table 1: films ranked for the viewers of MovieLens-1M."""

from dataclasses import replace

from p2_table2 import rows

from apiece import Experiment
from apiece.report.results import Run
from apiece.reproduce import Cell, Gain, Measured, Table, curve

COLUMN = "MovieLens-1M"
BASE = Experiment(
    data="movielens",
    model="din",
    partition="natural",
    test=0.0,
    unseen=0.0,
    proxy=0.01,
    rounds=100,
    cohort=604,
    chunk=16,  # whole shards of up to 11,500 examples, 50 films of history each
    evaluate_every=50,
    checkpoint_every=50,
)
ROWS = rows(batch=0, mu=0.01, tau=1e-4, proxy_batch=1000, epochs=5)
RANKED = ("Hit@5", "Hit@10", "NDCG@5", "NDCG@10")
FIGURES = dict.fromkeys(("AUC", *RANKED), "%")


def measure(run: Run) -> Measured:
    """AUC over all viewers' test examples together, the others as means over viewers."""
    assert run.summary is not None
    measures, pooled = run.summary["measures"], run.summary["pooled"]["seen"]
    ranked = {name: 100 * measures[name]["seen"]["initial"] for name in RANKED}
    numbers = {"AUC": 100 * pooled["AUC"]["initial"], **ranked}
    return Measured(numbers, {"AUC, mean over viewers": curve(run, "seen_initial_mean")})


PUBLISHED = {
    "FedAvg": (74.82, 29.16, 42.90, 19.01, 23.46),
    "FedAvgM": (74.82, 29.16, 42.90, 19.01, 23.46),
    "FedProx": (74.59, 29.24, 42.98, 19.14, 23.58),
    "FedOpt": (72.50, 29.67, 44.19, 19.04, 23.74),
    "FedDF": (70.53, 25.53, 36.23, 17.01, 20.46),
    "FedMeta": (76.51, 29.30, 44.29, 19.19, 24.04),
    "FedPA": (78.78, 30.58, 43.82, 20.02, 24.31),
}

TABLE = Table(
    id="p2-table1",
    title="The film chosen last among 99 others: the server's model after 100 rounds",
    source="Shen, Kuang, Li, Wang, Lv, Yang, Wu, Wu 2023 (FedPA), Table 1",
    cells={
        (row, COLUMN): Cell(replace(BASE, method=method, settings=settings), measure)
        for row, (method, settings) in ROWS.items()
    },
    published={(row, COLUMN): dict(zip(FIGURES, values, strict=True)) for row, values in PUBLISHED.items()},
    figures=FIGURES,
    seeds=(0, 1, 2),
    settings=(
        "The paper's: T = 100, 604 of 6,040 viewers a round, 5 epochs of Adam 0.01, 1 % of the training "
        "examples as proxy, E_g = 5 epochs with 0.001 on the aggregator, means without weights; each "
        "viewer's latest choice held out with 99 films never chosen, 4 such films for each in training. "
        "Nothing was searched.",
        "From the authors' code: DIN's sizes, proxy batches of 1,000, FedProx μ = 0.01, FedAdam's τ 1e-4.",
        "Ours: a client's whole shard is one batch, FedDF and FedMeta have one epoch of Adam 1e-4 in "
        "batches of 1,000 on the proxy, FedMeta in a row that is not the paper's E_g, all as in p2-table2. "
        "NDCG@K is 1 / log2(rank + 1) up to rank K, else 0; the paper's formula is garbled.",
    ),
    departures=(
        "The films of a viewer's history are drawn, not the latest: times are not in the file at hand.",
        "The proxy keeps its viewers' profiles; the authors' code blanks them.",
    ),
    gains=tuple(
        Gain("FedPA", over, COLUMN, "AUC", round(PUBLISHED["FedPA"][0] - PUBLISHED[over][0], 2))
        for over in ("FedAvg", "FedMeta")
    ),
)
