"""What a client does when it is asked. Its examples, its states and its model stay in its own folders."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from apiece import data as datasets
from apiece import folder as files
from apiece import random, tree
from apiece.checkpoint import sync
from apiece.data.federated import Examples, Federated, Ints, Ragged, hold_out, with_padding
from apiece.engines.base import Federation
from apiece.errors import ApieceError
from apiece.federation.wire import (
    JOIN,
    NO_START,
    SCORE,
    TRAIN,
    Message,
    Terms,
    WireError,
    pack,
    structure,
    unpack,
)
from apiece.method import Broadcast, Client, Method
from apiece.params import Params
from apiece.shard import Shard
from apiece.store import Store
from apiece.task import Task
from apiece.tree import Tree

log = logging.getLogger("apiece")


class Place(NamedTuple):
    """What a client has of its own."""

    data: Path
    state: Path  # the folder of its states and its model
    name: str = ""
    label_column: str = "label"
    device: torch.device = torch.device("cpu")

    def examples(self, label_names: tuple[str, ...] | None = None) -> Examples:
        return datasets.from_path(
            self.data, client_column=None, label_column=self.label_column, label_names=label_names
        )


def answer(place: Place, request: Message) -> Message:
    """The reply; whatever goes wrong is told the server in a few words, and here in full."""
    scalars = request.scalars
    envelope = {key: scalars[key] for key in ("run", "what", "round", "client") if key in scalars}
    try:
        work = _WORK.get(str(scalars.get("what")))
        if work is None:
            raise WireError("it does not know what it is asked for: is this another version?")
        with torch.no_grad():
            reply = work(place, request)
        return Message(reply.arrays, {**reply.scalars, **envelope})
    except WireError as refused:
        log.warning("refused: %s", refused)
        return Message({}, {**envelope, "error": str(refused)})
    except Exception as error:  # its text may show what is in the data: it stays here
        log.exception("failed")
        return Message({}, {**envelope, "error": f"it failed ({type(error).__name__}): see its own log"})


@dataclass(frozen=True)
class _Job:
    """A request understood: the method and the task, with this client's examples under its id."""

    place: Place
    request: Message

    def number(self, name: str) -> int:
        value = self.request.scalars.get(name)
        if not isinstance(value, int):
            raise WireError(f"the request has no {name}")
        return value

    @cached_property
    def terms(self) -> Terms:
        return Terms.read(self.request.scalars.get("terms", ""))

    @cached_property
    def client(self) -> int:
        return self.number("client")

    @cached_property
    def built(self) -> tuple[Method, Task]:
        return self.terms.build(self.place.device)

    @cached_property
    def task(self) -> Task:
        return self.built[1].for_clients()

    @cached_property
    def method(self) -> Method:
        return self.built[0]

    @cached_property
    def examples(self) -> Examples:
        try:
            examples = self.place.examples(self.terms.label_names)
        except ApieceError as error:
            log.error("%s", error)
            raise WireError("its data cannot be read with the labels of the run") from error
        shape = tuple(np.shape(examples.x)[1:])
        if shape != self.terms.input_shape:
            raise WireError(f"its examples have shape {shape}, the run's have {self.terms.input_shape}")
        return examples

    @cached_property
    def data(self) -> Federated:
        """This client alone, with the split into train and test that its id gives it."""
        examples, key = self.examples, random.fold(self.terms.deal, "test", self.client)
        rows: Ints = np.arange(len(examples.y))
        train, test = (Ragged.of([part]) for part in hold_out(rows, self.terms.test, key))
        return Federated(
            with_padding(examples.x),
            with_padding(examples.y),
            examples.classes,
            examples.label_names,
            (self.place.name,),
            train,
            test,
            seen=np.ones(1, dtype=bool),
            proxy=rows[:0],
        ).to(self.place.device)

    @cached_property
    def like(self) -> Params:
        """Params of the model, for their structure."""
        return self.task.init(0)

    @cached_property
    def broadcast(self) -> Broadcast:
        like = structure(self.method, self.task, self.like)
        return unpack(self.request, "broadcast", like, self.place.device)

    def shard(self, part: Ragged, key: int) -> Shard:
        """Some of its examples, with the keys that its id has below `key`."""
        nothing = Store((), 0, self.place.device, None, mapped=False)
        alone = Federation(self.method, self.task, self.like, self.data, nothing, self.terms.root)
        rows, even = alone.rows(part, [0], [self.client], key)
        return alone.shard(tree.take(rows, 0), even)

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.place.state / "runs" / self.terms.run)

    def state(self) -> Client:
        """The state of the last round that the server accepted; before any, the first."""
        if "start" in {path.partition("/")[0] for path in self.request.arrays}:
            self.memory.keep_start(unpack(self.request, "start", self.like, self.place.device))
        key = random.as_key(random.fold(self.terms.root, "client", self.client), self.place.device)
        first = self.method.init_client(self.task, self.broadcast, self.like, key)
        if not tree.leaves(first):
            return first
        accepted = self.number("ack")
        if accepted:
            return self.memory.read(accepted, first, self.place.device)
        start = self.memory.start(self.like, self.place.device)
        return self.method.init_client(self.task, self.broadcast, start, key)


class Memory:
    """A client's states in one run: that of the last round the server accepted, and the newest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def read(self, round: int, template: Client, device: torch.device) -> Client:
        try:
            return tree.restore(template, _read(self._path(round), device))
        except (OSError, KeyError) as error:
            log.error("the state of round %d is not in %s: restore the folder", round, self.folder)
            raise WireError(f"it has lost its state of round {round}") from error

    def write(self, round: int, state: Client, accepted: int) -> None:
        """Keep a new state beside the accepted one; it is on disk when this returns."""
        if not tree.leaves(state):
            return
        _write(self._path(round), tree.flatten(state))
        for path in self.folder.glob("round-*.safetensors"):
            if path not in (self._path(round), self._path(accepted)):
                path.unlink()

    def keep_start(self, start: Params) -> None:
        _write(self.folder / "start.safetensors", dict(start))

    def start(self, like: Params, device: torch.device) -> Params:
        try:
            return Params(tree.restore(dict(like), _read(self.folder / "start.safetensors", device)))
        except (OSError, KeyError) as error:
            raise WireError(NO_START) from error


def _read(path: Path, device: torch.device) -> dict[str, Tensor]:
    return load_file(path, device=str(device))


def _write(path: Path, tensors: dict[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """Copies, for leaves may share memory; the folder too is flushed, so that the new name stands."""
    files.write_tensors(path, {name: t.clone() for name, t in tensors.items()}, facts)
    sync(path.parent)


def _join(place: Place, request: Message) -> Message:
    job = _Job(place, request)
    return Message({}, {"examples": len(job.examples.y), "name": place.name})


def _train(place: Place, request: Message) -> Message:
    job = _Job(place, request)
    round = job.number("round")
    shard = job.shard(job.data.train, random.fold(job.number("key"), "client"))
    reply = job.method.client_update(job.task, job.broadcast, job.state(), shard)
    weight = torch.as_tensor(reply.weight, dtype=torch.float32)
    if not tree.finite((reply.update, reply.state, weight), place.device):
        raise WireError("its update is not finite")
    job.memory.write(round, reply.state, job.number("ack"))
    return pack(update=reply.update, weight=weight, metrics=dict(reply.metrics))


def _score(place: Place, request: Message) -> Message:
    job = _Job(place, request)
    round, data, state = job.number("round"), job.data, job.state()
    key = random.fold(job.terms.root, "personalize", round)
    initial = job.method.initial(job.task, job.broadcast, state)
    personalized = job.method.personalize(job.task, job.broadcast, state, job.shard(data.train, key))
    examples = job.shard(data.test, key).all()

    def scores(params: Params) -> Tree:
        fine = tree.finite(params, place.device)
        found = job.task.metrics(job.task.predict(params, examples.x), examples)
        return {name: torch.where(fine, value, torch.nan).double() for name, value in found.items()}

    facts = {
        "run": job.terms.run,
        "method": job.terms.method,
        "client": place.name,
        "round": str(round),
        "model": job.terms.model,
        "input_shape": json.dumps(data.input_shape),
        "classes": str(data.classes),
        "label_names": json.dumps(data.label_names),
    }
    for folder in (job.memory.folder, place.state):  # of this run, and the latest of all
        _write(folder / "personalized.safetensors", dict(personalized), facts)
    return pack(initial=scores(initial), personalized=scores(personalized))


_WORK: dict[str, Callable[[Place, Message], Message]] = {JOIN: _join, TRAIN: _train, SCORE: _score}
