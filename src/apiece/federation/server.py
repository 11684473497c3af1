"""The server of a federation: rounds with clients that may be slow, lost, broken or hostile.

Only what was asked for is accepted: from a client that was asked, in time, with the names, shapes and types
of the method's spec, finite, and within the norm bound if there is one. Every request names the last round
whose reply the server accepted from that client, and the client starts from its state of that round: a reply
that is lost, late or refused leaves no trace in either. Each round ends with a checkpoint, before the next
requests are sent.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apiece import experiment as experiments
from apiece import folder as files
from apiece import random, tree
from apiece.choice import pick_device
from apiece.engines.base import Outcome
from apiece.engines.sequential import Sequential
from apiece.errors import ApieceError
from apiece.evaluate import Pair
from apiece.experiment import Experiment
from apiece.federation import population as populations
from apiece.federation.calls import Calls, Network
from apiece.federation.population import Population
from apiece.federation.wire import (
    JOIN,
    NO_START,
    SCORE,
    TRAIN,
    Message,
    Scalar,
    Terms,
    WireError,
    pack,
    unpack,
)
from apiece.method import MEAN, Broadcast, Reduce, Server, Stacked, newcomer
from apiece.models.validate import validate
from apiece.prepare import load_params
from apiece.record import Record, Scored, summaries
from apiece.sample import uniform
from apiece.spec import Spec
from apiece.store import Store
from apiece.train import Closed, assemble
from apiece.tree import Tree

log = logging.getLogger("apiece")

PLAN, POPULATION = "federation.json", "population.json"  # in the run's folder
WAITING = 30.0  # seconds between two lines in the log that say who is missing


class Rules(NamedTuple):
    """When a round closes, and what is too much."""

    min_replies: float = 0.5  # share of the cohort without which a round is void
    deadline: float = 600.0  # seconds a round waits for its clients
    max_norm: float = math.inf  # of an update, over all its floating leaves

    def check(self) -> None:
        if not 0 < self.min_replies <= 1:
            raise ApieceError(f"--min-replies is a share of the cohort in (0, 1], got {self.min_replies}")
        if not 0 < self.deadline < math.inf:
            raise ApieceError(f"--deadline is a number of seconds above 0, got {self.deadline}")
        if not self.max_norm > 0:
            raise ApieceError(f"--max-norm must be above 0, got {self.max_norm}")


class Plan(NamedTuple):
    """A federation as it was asked for."""

    experiment: Experiment
    rules: Rules
    clients: int  # that must have joined before round 0; they train
    input_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    run: str  # tells this run from all others: clients keep its states apart

    def check(self) -> None:
        self.rules.check()
        e, method = self.experiment, self.experiment.build_method()
        if self.clients < 1 or e.cohort > self.clients:
            raise ApieceError(
                f"a cohort of {e.cohort} cannot be drawn from {self.clients} clients: lower --cohort"
            )
        if method.pooled:
            raise ApieceError(f"--method {e.method} trains on everybody's examples: it is no federation")
        if method.needs_proxy:
            raise ApieceError(f"--method {e.method} trains on data of the server's own, which has none here")
        if e.sampler != "uniform" or e.also or e.proxy:
            raise ApieceError("in a real federation there is no --sampler, --also or --proxy: leave them out")
        _, task = _terms(self).build(torch.device("cpu"))
        validate(task, "sequential", self.input_shape, len(self.label_names))

    def write(self, folder: Path) -> None:
        parts = {"experiment": asdict(self.experiment), "rules": self.rules._asdict()}
        files.write_json(folder / PLAN, {**self._asdict(), **parts})

    @staticmethod
    def read(folder: Path) -> Plan:
        try:
            table = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            rules = {name: value for name, value in table["rules"].items() if value is not None}
            return Plan(
                experiments.from_table(table["experiment"]),
                Rules(**rules),
                table["clients"],
                tuple(table["input_shape"]),
                tuple(table["label_names"]),
                table["run"],
            )
        except OSError as error:
            raise ApieceError(f"{folder} holds no federation: there is no {PLAN} in it") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ApieceError(f"{folder / PLAN} is damaged: {error}") from error


def federated(experiment: Experiment, clients: int, cohort: int) -> Experiment:
    """An experiment as a federation carries it out: its clients bring their data, and all of them train."""
    return replace(
        experiment,
        data="federation",
        partition="natural",
        clients=clients,
        cohort=cohort,
        unseen=0.0,
        engine="sequential",
        checkpoint_every=1,
        on_nan="skip",
    )


def new_run(experiment: Experiment) -> str:
    """An id that no other run has, not even one of the same experiment."""
    return f"{experiment.id}-{os.urandom(4).hex()}"


class Kept(NamedTuple):
    """What a checkpoint holds."""

    server: Server
    accepted: Tensor  # per client that trains: the last round whose reply was accepted, 0 none
    refused: Tensor  # how many replies were not what was asked for


class Accepted(NamedTuple):
    """A reply that passed, decoded."""

    update: Tree
    weight: Tensor
    metrics: Tree


def host(folder: Path, network: Network) -> dict[str, Any]:
    """Carry out the federation that is planned in `folder`, from its last checkpoint on; the summary."""
    plan = Plan.read(folder)
    calls = Calls(network, plan.rules.deadline)
    empty = Population((), (), 0, plan.experiment.test, plan.input_shape, plan.label_names)
    if (folder / "experiment.toml").exists():
        population = populations.read(folder / POPULATION, empty)
    else:
        population = _gathered(plan, calls, empty)
        population.write(folder / POPULATION)
        resolved = plan.experiment.resolved(population.trained, population.partition)
        files.write_text(folder / "experiment.toml", resolved.to_toml())
    with torch.no_grad():
        return Host(folder, plan, calls, population).run()


def _terms(plan: Plan) -> Terms:
    e = plan.experiment
    return Terms(
        plan.run,
        e.method,
        e.settings,
        e.model,
        e.augment,
        plan.input_shape,
        plan.label_names,
        e.test,
        random.fold(e.partition_seed, "partition"),
        random.fold(e.seed, "apiece"),
    )


def _hello(terms: Terms) -> Message:
    return Message({}, {"run": terms.run, "what": JOIN, "terms": terms.text()})


def _gathered(plan: Plan, calls: Calls, empty: Population) -> Population:
    """Wait until as many clients as are to train have joined; their names give the order."""
    hello, joined, told = _hello(_terms(plan)), dict[str, int](), -math.inf
    while len(joined) < plan.clients:
        joined |= calls.greet(hello, joined)
        if time.monotonic() - told > WAITING and len(joined) < plan.clients:
            told = time.monotonic()
            log.info("%d of %d clients have joined: %s", len(joined), plan.clients, ", ".join(joined))
        if len(joined) < plan.clients:
            calls.wait()
    numbers = all(re.fullmatch(r"0|[1-9]\d{0,17}", name) for name in joined)
    names = sorted(joined, key=int if numbers else str)
    log.info("%d clients train: %s", plan.clients, ", ".join(names[: plan.clients]))
    population = replace(empty, trained=plan.clients)
    for name in names:
        population = population.joined(name, joined[name])
    return population


class Host:
    """The rounds of one federation."""

    def __init__(self, folder: Path, plan: Plan, calls: Calls, population: Population) -> None:
        self.folder, self.rules, self.calls = folder, plan.rules, calls
        self.device = pick_device(plan.experiment.device)
        self.population = population.to(self.device)
        self.experiment = e = plan.experiment.resolved(population.trained, population.partition)
        self.terms = _terms(plan._replace(experiment=e))
        method, task = self.terms.build(self.device)
        start = task.init(random.fold(self.terms.root, "params"))
        if e.prior:
            task = replace(task, prior=load_params(e.prior, start))
        if e.start:
            start = load_params(e.start, start)
        engine, nothing = Sequential(self.device), Store((), 0, self.device, None, mapped=False)
        self.training, server = assemble(
            engine,
            method,
            task,
            start,
            self.population,
            e.cohort,
            self.terms.root,
            uniform,
            lambda state: nothing,
        )
        metrics = tuple(self._spec(self.training.broadcast(server, 0)).metrics)
        self.record = Record(folder, e.id, metrics, (), e.target)
        zeros = torch.zeros(population.trained, dtype=torch.int64, device=self.device)
        self.kept = Kept(server, zeros, zeros.sum())
        self._started: set[int] = set()  # clients that have the start params

    def run(self) -> dict[str, Any]:
        e, record = self.experiment, self.record
        done, self.kept = record.open(self.kept, self.device)
        scored: list[Scored] = []
        for index in range(done, e.rounds):
            closed = self._round(index)
            done = index + 1
            scored = self._scores(done) if done % e.evaluate_every == 0 or done == e.rounds else []
            up, down = self.calls.traffic()
            record.rounds([closed._replace(bytes_up=up, bytes_down=down)], scored)
            record.checkpoint(done, self.kept, self.training.federation.store)
        return self._end(scored or self._scores(e.rounds))

    def _end(self, scored: list[Scored]) -> dict[str, Any]:
        e, f, data = self.experiment, self.training.federation, self.population
        broadcast = self.training.broadcast(self.kept.server, e.rounds)
        key = random.as_key(random.fold(f.root, "newcomer"), self.device)
        model = newcomer(f.method, f.task, broadcast, f.start, key)
        files.write_tensors(self.folder / "model" / "initial.safetensors", dict(model))
        card = {"model": e.model, "input_shape": data.shape, "classes": data.classes}
        files.write_json(self.folder / "model" / "model.json", {**card, "label_names": data.label_names})
        facts = {
            "method": e.method,
            "seed": e.seed,
            "engine": "flower",
            "device": str(self.device),
            "rounds": e.rounds,
            "metric": f.task.headline,
            "id": e.id,
            "refused": int(self.kept.refused),
        }
        return self.record.summary(facts, scored)

    def _spec(self, broadcast: Broadcast) -> Spec:
        return self.training.shapes.of(broadcast)

    def _round(self, index: int) -> Closed:
        member = self.training.open(self.kept.server, index)
        broadcast, ids, method = member.broadcast, member.cohort.ids, self.training.federation.method
        needed = max(1, math.ceil(self.rules.min_replies * len(ids)))
        self._wait_for(ids, needed, index)
        fine: dict[int, Accepted] = {}
        for client, reply in self._ask(TRAIN, ids, index + 1, broadcast, key=member.round.key):
            try:
                fine[client] = self._accepted(reply, broadcast)
            except WireError as why:
                self._refuse(TRAIN, client, index + 1, why)
        if len(fine) < needed:
            log.warning("round %d is void: %d replies, %d needed", index + 1, len(fine), needed)
            labels = np.zeros(self.population.classes, dtype=np.int64)
            nobody = torch.zeros(len(ids), dtype=torch.bool)
            return Closed(member.round, ids, self.kept.server, 0, 0, nobody, {}, labels)
        finite = torch.tensor([client in fine for client in ids])
        outcome = _reduced([fine[client] for client in sorted(fine)], method.reduce(broadcast), finite)
        closed = self.training.close(self.kept.server, member, outcome)
        accepted = self.kept.accepted.clone()
        accepted[sorted(fine)] = index + 1
        self.kept = self.kept._replace(server=closed.server, accepted=accepted)
        return closed

    def _accepted(self, reply: Message, broadcast: Broadcast) -> Accepted:
        f, spec = self.training.federation, self._spec(broadcast)
        update = unpack(reply, "update", spec.update, self.device)
        weight = unpack(reply, "weight", torch.zeros(()), self.device)
        metrics = unpack(reply, "metrics", spec.metrics, self.device)
        if not tree.finite((update, weight), self.device) or weight < 0:
            raise WireError("its update is not finite, or its weight is negative")
        squares = [leaf.double().square().sum() for leaf in tree.leaves(update) if leaf.is_floating_point()]
        norm = math.sqrt(sum(map(float, squares)))
        if norm > self.rules.max_norm:
            raise WireError(f"the norm of its update, {norm:.4g}, is above {self.rules.max_norm:.4g}")
        try:
            decoded = f.method.decode(f.task, broadcast, update)
        except Exception as error:  # whatever the numbers in it lead to
            raise WireError(f"its update cannot be decoded ({type(error).__name__})") from error
        if not tree.finite(decoded, self.device):
            raise WireError("its decoded update is not finite")
        return Accepted(decoded, weight, metrics)

    def _scores(self, round: int, ids: Sequence[int] | None = None) -> list[Scored]:
        """The clients' scores after so many rounds; each keeps its personalized model. Without ids, all's."""
        if ids is None:
            self._admit()
        some = list(range(self.population.population)) if ids is None else ids
        task = self.training.federation.task
        like = dict.fromkeys((*task.measures, "loss"), torch.zeros((), dtype=torch.float64))
        pairs = {name: Pair(*np.full((2, len(some)), np.nan)) for name in like}
        broadcast = self.training.broadcast(self.kept.server, round)
        for client, reply in self._ask(SCORE, some, round, broadcast):
            try:
                found = [unpack(reply, name, like, self.device) for name in Pair._fields]
            except WireError as why:
                self._refuse(SCORE, client, round, why)
                continue
            for name, pair in pairs.items():
                for which, values in zip(pair, found, strict=True):
                    which[some.index(client)] = float(values[name])
        places = np.array(some, dtype=np.int64)
        groups = summaries(pairs[task.headline], self.population, places)
        scored = [Scored("test", self.population, places, pairs, groups, pooled={})]
        if ids is None:
            self.record.clients(scored)
        return scored

    def _admit(self) -> list[int]:
        """Clients that came later are unseen ones; their ids."""
        new = self.calls.greet(_hello(self.terms), self.population.names)
        for name, examples in new.items():
            log.info("%s joins as an unseen client", name)
            self.population = self.population.joined(name, examples)
        if new:
            self.population.write(self.folder / POPULATION)
        count = self.population.population
        return list(range(count - len(new), count))

    def _wait_for(self, ids: Sequence[int], needed: int, index: int) -> None:
        """Until enough of these clients are connected. Who is new gets a model from the current broadcast."""
        told = time.monotonic() - WAITING / 2
        names = [self.population.names[i] for i in ids]
        while True:
            if new := self._admit():
                self._scores(index, new)
            absent = sorted(set(names) - self.calls.addresses().keys())
            if len(ids) - len(absent) >= needed:
                return
            if time.monotonic() - told > WAITING:
                told = time.monotonic()
                log.info("round %d waits for %s", index + 1, ", ".join(absent))
            self.calls.wait()

    def _ask(
        self, what: str, ids: Sequence[int], round: int, broadcast: Broadcast, **more: Scalar
    ) -> Iterator[tuple[int, Message]]:
        """(client, reply) as they come in; of clients that fail or are late, a line in the log."""
        sent, stateful = pack(broadcast=broadcast), bool(tree.leaves(self._spec(broadcast).state))
        numbers = {self.population.names[i]: i for i in ids}
        silent = set(numbers)

        def request(name: str) -> Message:
            client = numbers[name]
            ack = int(self.kept.accepted[client]) if client < self.population.trained else 0
            envelope = {"run": self.terms.run, "what": what, "round": round, "client": client, "ack": ack}
            arrays = dict(sent.arrays)
            if stateful and ack == 0 and client not in self._started:
                arrays |= pack(start=self.training.federation.start).arrays
            scalars: dict[str, Any] = {**sent.scalars, **envelope, **more, "terms": self.terms.text()}
            return Message(arrays, scalars)

        for name, reply in self.calls.ask(numbers, request):
            silent.discard(name)
            try:
                yield numbers[name], self._opened(reply, what, round, numbers[name])
            except WireError as why:
                self._refuse(what, numbers[name], round, why)
        for name in sorted(silent):
            log.warning("%s %d: no reply from %s in time", what, round, name)

    def _opened(self, reply: Message, what: str, round: int, client: int) -> Message:
        """A reply that says it is the one that was asked for."""
        asked = {"run": self.terms.run, "what": what, "round": round, "client": client}
        if any(reply.scalars.get(key) != value for key, value in asked.items()):
            raise WireError("it cannot be read, or answers something else")
        error = reply.scalars.get("error")
        if error != NO_START:
            self._started.add(client)
        else:
            self._started.discard(client)
        if error is not None:
            raise WireError(str(error)[:200])
        return reply

    def _refuse(self, what: str, client: int, round: int, why: WireError) -> None:
        self.kept = self.kept._replace(refused=self.kept.refused + 1)
        log.warning("%s %d: refused the reply of %s: %s", what, round, self.population.names[client], why)


def _reduced(replies: list[Accepted], reduce: Reduce, finite: Tensor) -> Outcome:
    """The replies, in the order of their clients, as one."""
    weights = torch.stack([reply.weight for reply in replies])
    total = weights.sum()
    updates = tree.stack([reply.update for reply in replies])
    update: Tree = Stacked(updates, weights)
    if reduce is MEAN:
        divisor = torch.where(total > 0, total, 1.0)
        update = tree.map(lambda leaf: torch.tensordot(weights, leaf.to(weights.dtype), 1) / divisor, updates)
    metrics = tree.map(lambda *values: torch.stack(values).float().mean(), *(r.metrics for r in replies))
    return Outcome(update, total, finite, metrics)
