"""Record: what a run leaves in its folder, so that it can be read, reported and resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apiece import checkpoint
from apiece import folder as files
from apiece.data.federated import Clients, Ints
from apiece.evaluate import Group, Pair, Total, summarize
from apiece.method import Server
from apiece.store import Store
from apiece.train import Closed

GROUPS = ("seen", "unseen")
SCORES = ("initial", "personalized")
SCORE_COLUMNS = tuple(
    name
    for group in GROUPS
    for name in (
        *(
            f"{group}_{score}_{figure}"
            for score in SCORES
            for figure in ("mean", "weighted", "std", "worst10")
        ),
        f"{group}_harmed",
    )
)
CLIENT_COLUMNS = ("client", "seen", "test", "metric", "n_train", "n_test", "initial", "personalized")

Groups = dict[str, Group | None]


class Scored(NamedTuple):
    """The scores on one set of clients: the run's own (`test`), or another dataset's, all newcomers."""

    test: str
    data: Clients
    ids: Ints  # who was scored
    pairs: dict[str, Pair]
    groups: Groups
    pooled: Mapping[str, Mapping[str, Total]] = {}  # group → measures over its clients' examples together


class Record:
    """The logs of one run; without a folder it only counts."""

    def __init__(
        self, folder: Path | None, run_id: str, metrics: Sequence[str], also: Sequence[str], target: float
    ) -> None:
        self.folder = folder
        self.run_id = run_id
        self.target = target
        self._metrics = tuple(metrics)
        self._also = tuple(also)
        self._totals: dict[str, Any] = {"bytes_up": 0, "bytes_down": 0, "skipped": 0, "seconds": 0.0}
        self._reached: dict[str, int | None] = {f"{g}_{s}": None for g in GROUPS for s in SCORES}
        self._clock = time.perf_counter()
        self._sharing = 1  # runs that are carried out together
        self._logs: dict[str, files.Log] = {}
        if folder is not None:
            counts = ("round", "replies", "skipped", "bytes_up", "bytes_down")
            others = [f"{test} {group}_{score}_mean" for test in also for group in GROUPS for score in SCORES]
            columns = (*counts, *(f"client_{m}" for m in metrics), *SCORE_COLUMNS, *others, "seconds")
            self._logs = {
                "rounds": files.Log(folder / "rounds.csv", columns),
                "cohorts": files.Log(folder / "cohorts.csv", ("round", "client")),
                "labels": files.Log(folder / "labels.csv", ("round", "label", "count")),
            }

    def open(self, template: Server, device: Any) -> tuple[int, Server]:
        """(rounds done, server state): of the last checkpoint, or the beginning."""
        found = None
        if self.folder is not None:
            found = checkpoint.read(self.folder / "checkpoint", self.run_id, template, device)
        if found is not None:
            self._totals = found.log["totals"]
            self._reached = found.log["reached"]
        for name, log in self._logs.items():
            log.open(found.log["lengths"][name] if found is not None else 0)
        self._clock = time.perf_counter()
        return (found.round, found.server) if found is not None else (0, template)

    def share_time(self, runs: int) -> None:
        """From now on so many runs are carried out together: each one's seconds are its share."""
        self._sharing, self._clock = runs, time.perf_counter()

    def rounds(self, closed: Sequence[Closed], scored: Sequence[Scored]) -> None:
        """Log rounds that are over; `scored` are the scores after the last of them, if measured."""
        seconds = self._lap() / max(len(closed), 1)
        rows = []
        for done in closed:
            replies = int(done.finite.sum())
            counts = (replies, len(done.ids) - replies, done.bytes_up, done.bytes_down)
            for total, amount in zip(("skipped", "bytes_up", "bytes_down"), counts[1:], strict=True):
                self._totals[total] += amount
            # A later stage may report other metrics than the first round did.
            metrics = tuple(float(done.metrics[m]) if m in done.metrics else "" for m in self._metrics)
            scores = self._cells(scored if done is closed[-1] else ())
            rows.append((done.round.index + 1, *counts, *metrics, *scores, f"{seconds:.4f}"))
        self._append("rounds", rows)
        self._append("cohorts", [(done.round.index + 1, client) for done in closed for client in done.ids])
        labels = [
            (done.round.index + 1, i, int(n)) for done in closed for i, n in enumerate(done.labels) if n
        ]
        self._append("labels", labels)
        if scored:
            self._note_targets(closed[-1].round.index + 1, scored[0].groups)

    def beginning(self, scored: Sequence[Scored]) -> None:
        """Log the scores before round 0."""
        blank = ("",) * len(self._metrics)
        self._append("rounds", [(0, 0, 0, 0, 0, *blank, *self._cells(scored), f"{self._lap():.4f}")])
        self._note_targets(0, scored[0].groups)

    def clients(self, scored: Sequence[Scored]) -> None:
        """One row per client, test set and metric: the latest scores."""
        if self.folder is not None:
            rows = [row for one in scored for row in _client_rows(one)]
            files.write_csv(self.folder / "clients.csv", CLIENT_COLUMNS, rows)

    def checkpoint(self, round: int, server: Server, store: Store) -> None:
        """From here a resumed run goes on."""
        if self.folder is None:
            return
        log = {
            "totals": self._totals,
            "reached": self._reached,
            "lengths": {name: file.length() for name, file in self._logs.items()},
        }
        checkpoint.make_room(self.folder / "checkpoint")
        store.commit(round)
        checkpoint.write(self.folder / "checkpoint", self.run_id, checkpoint.Checkpoint(round, server, log))

    def summary(self, facts: dict[str, Any], scored: Sequence[Scored]) -> dict[str, Any]:
        """The run in figures; writing it ends the run."""
        self._lap()
        own, others = _figures(scored[0]), {one.test: _figures(one) for one in scored[1:]}
        reached = {"target": self.target, "rounds_to_target": self._reached}
        summary = {**facts, **self._totals, **reached, **own, "also": others}
        if self.folder is not None:
            files.write_json(self.folder / "summary.json", summary)
        return summary

    def _cells(self, scored: Sequence[Scored]) -> tuple[Any, ...]:
        """The cells of SCORE_COLUMNS and of the other datasets' columns; blank where nothing was measured."""
        own = _scores(scored[0].groups if scored else None)
        if not scored:
            return (*own, *[""] * (4 * len(self._also)))
        groups = [one.groups[name] for one in scored[1:] for name in GROUPS]
        return (*own, *("" if g is None else getattr(g, score) for g in groups for score in SCORES))

    def _append(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        if self._logs:
            self._logs[name].append(rows)

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._clock = (now - self._clock) / self._sharing, now
        self._totals["seconds"] += lap
        return lap

    def _note_targets(self, round: int, groups: Groups) -> None:
        for name, group in groups.items():
            for score in SCORES:
                key = f"{name}_{score}"
                if group is not None and self._reached[key] is None and getattr(group, score) >= self.target:
                    self._reached[key] = round


def _scores(groups: Groups | None) -> tuple[Any, ...]:
    """The cells of SCORE_COLUMNS."""
    cells: list[Any] = []
    for name in GROUPS:
        group = groups[name] if groups is not None else None
        if group is None:
            cells += [""] * 9
            continue
        for score in SCORES:
            figures = (score, f"{score}_weighted", f"{score}_std", f"{score}_worst10")
            cells += [getattr(group, figure) for figure in figures]
        cells.append(group.harmed)
    return tuple(cells)


def _figures(scored: Scored) -> dict[str, Any]:
    """Of the headline measure, of every measure, and of those over many clients' examples together."""

    def figures(groups: Groups) -> dict[str, Any]:
        return {name: group._asdict() if group else None for name, group in groups.items()}

    measures = {
        name: figures(summaries(pair, scored.data, scored.ids, lower=name == "loss"))
        for name, pair in scored.pairs.items()
    }
    return {
        **figures(scored.groups),
        "measures": measures,
        "pooled": {
            group: {name: total._asdict() for name, total in totals.items()}
            for group, totals in scored.pooled.items()
        },
    }


def summaries(pair: Pair, data: Clients, ids: Ints, lower: bool = False) -> Groups:
    """Figures of the seen and of the unseen clients; `lower` scores are better ones, or higher."""
    seen, n_test = data.seen[ids], data.sizes(ids)[1]
    groups = (summarize(pair, some, n_test, lower) for some in (seen, ~seen))
    return dict(zip(GROUPS, groups, strict=True))


def _client_rows(scored: Scored) -> list[tuple[Any, ...]]:
    ids, seen = scored.ids.tolist(), scored.data.seen[scored.ids].astype(int).tolist()
    n_train, n_test = (sizes.tolist() for sizes in scored.data.sizes(scored.ids))
    return [
        (
            client,
            seen[at],
            scored.test,
            metric,
            n_train[at],
            n_test[at],
            pair.initial[at],
            pair.personalized[at],
        )
        for metric, pair in scored.pairs.items()
        for at, client in enumerate(ids)
    ]
