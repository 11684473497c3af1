"""Stages against its two methods run by themselves, one from where the other ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from apiece import MEAN, STACK, Method, Params, Recipe, Reply, Round, Rule, Shard, Task, Wrapper, tree
from apiece import checkpoint as checkpoints
from apiece.check import check_method
from apiece.checkpoint import Checkpoint
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError
from apiece.evaluate import models
from apiece.method import Server
from apiece.methods.centralized import Centralized
from apiece.methods.fedavg import FedAvg
from apiece.methods.local import Local
from apiece.methods.reptile import Reptile
from apiece.store import Store
from apiece.train import Training
from apiece.tree import Tree
from apiece.wrappers.elastic import Elastic
from apiece.wrappers.stages import Stages
from tests.broken import Averaging, UpdateOf
from tests.worlds import CPU, federation

SIZES = (7, 23, 1, 12, 9)
COHORT = 2
EVERYONE = list(range(len(SIZES)))
FIRST = FedAvg(local=Recipe(batch_size=5, epochs=2), outer=Rule("sgd", lr=1.0, momentum=0.9))
THEN = Reptile(local=Recipe(batch_size=5, steps=3), outer=Rule("adam", lr=0.01))
# Cohorts are cut by one recipe for both stages: with one client a chunk, bits are those of a stage alone.
ENGINE = Sequential(CPU)


def play(method: Method, begin: int, end: int, server: Server = None) -> tuple[Training, list[Server]]:
    """Rounds begin … end − 1 from `server`, with the keys and cohorts of the whole run; nobody is met yet."""
    training, fresh = federation(method, ENGINE, SIZES, COHORT)
    with torch.no_grad():
        return training, [c.server for c in training.rounds(server or fresh, begin, end)]


def states(training: Training, server: Server, index: int) -> Tree:
    return training.federation.states(ENGINE, training.broadcast(server, index), EVERYONE)


def cohorts(training: Training, begin: int, end: int) -> set[int]:
    ids = [training.sampler(training.federation.data, training.round(i)).ids for i in range(begin, end)]
    return {client for cohort in ids for client in cohort}


def assert_equal(a: Tree, b: Tree) -> None:
    """Bit for bit."""
    left, right = tree.flatten(a), tree.flatten(b)
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        assert torch.equal(leaf, right[path]), path


class Note(NamedTuple):
    """What a client was told when its state began, and how often it took part since."""

    start: Params
    met: Params
    key: Tensor
    rounds: Tensor


class Diary(NamedTuple):
    params: Params
    index: Tensor  # of the last round
    key: Tensor


@dataclass(frozen=True)
class Remembers(Averaging):
    """FedAvg whose clients and server write down what they are given."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init(self, task: Task, params: Params, key: int) -> Any:
        return Diary(params, torch.full((), -1), torch.full((), key))

    def init_client(self, task: Task, broadcast: Diary, start: Params, key: Tensor) -> Note:
        return Note(start, broadcast.params, key, torch.zeros(()))

    def client_update(self, task: Task, broadcast: Diary, client: Note, data: Shard) -> Reply:
        reply = FedAvg(local=self.local).client_update(task, broadcast, (), data)  # type: ignore[arg-type]
        return reply._replace(state=client._replace(rounds=client.rounds + 1))

    def server_update(self, task: Task, server: Any, update: Params, round: Round) -> Any:
        return Diary(server.params + update, torch.full((), round.index), torch.full((), round.key))


# The rounds


def test_before_the_switch_it_is_the_first_method_and_after_it_the_second_from_there() -> None:
    """Rounds 0 and 1 are FedAvg's; 2 to 4 are Reptile's, begun by `init` from FedAvg's model."""
    _, staged = play(Stages(FIRST, THEN, 2), 0, 5)
    _, before = play(FIRST, 0, 2)
    for ours, alone in zip(staged[:2], before, strict=True):
        assert_equal(ours.first.server, alone)
    begun = THEN.outer.start(before[-1].params)
    assert_equal(staged[1].then.server, begun)
    assert all(not t.any() for t in tree.tensors(staged[1].then.server.state))
    _, after = play(THEN, 2, 5, begun)
    for ours, alone in zip(staged[2:], after, strict=True):
        assert_equal(ours.then.server, alone)
        assert_equal(ours.first.server, before[-1])


def test_what_is_sent_is_the_active_stages() -> None:
    """Also in an evaluation, which sends what the next round would: after 2 rounds, the second's."""
    method = Stages(FIRST, THEN, 2)
    training, staged = play(method, 0, 3)
    for done, server in enumerate(staged, 1):
        broadcast = training.broadcast(server, done)
        assert broadcast.second is (done >= 2)
        stage = server.then if done >= 2 else server.first
        assert_equal(broadcast.active.params, stage.server.params)


def test_a_switch_beyond_the_run_is_the_first_method_bit_for_bit() -> None:
    training, staged = play(Stages(FIRST, THEN, 4), 0, 3)
    alone, servers = play(FIRST, 0, 3)
    assert_equal(staged[-1].first.server, servers[-1])
    pairs = [
        models(ENGINE, t.federation, t.broadcast(s[-1], 3), EVERYONE, 3)
        for t, s in ((training, staged), (alone, servers))
    ]
    assert_equal(*pairs)


def test_the_second_counts_its_own_rounds_and_keeps_their_keys() -> None:
    training, staged = play(Stages(FIRST, Remembers(), 2), 0, 4)
    assert [int(s.then.server.index) for s in staged] == [-1, -1, 0, 1]
    assert [int(s.then.server.key) for s in staged[2:]] == [training.round(i).key for i in (2, 3)]


def test_a_last_round_without_replies_does_not_cost_the_second_stage_its_start() -> None:
    """Client 1 has no examples: a round with it alone has weight 0 and leaves the server as it was."""
    probe, _ = federation(FIRST, ENGINE, (12, 0), 1)
    alone = [
        cohort == (1,)
        for cohort in (probe.sampler(probe.federation.data, probe.round(i)).ids for i in range(40))
    ]
    last = next(i for i in range(1, 40) if alone[i] and not alone[i - 1])
    training, server = federation(Stages(FIRST, THEN, last + 1), ENGINE, (12, 0), 1)
    start = server.first.server.params
    with torch.no_grad():
        ends = [c.server for c in training.rounds(server, 0, last + 1)]
    assert_equal(ends[-1], ends[-2])
    broadcast = training.broadcast(ends[-1], last + 1)
    assert broadcast.second
    assert_equal(broadcast.active.params, ends[-1].first.server.params)
    assert any(not torch.equal(broadcast.active.params[name], start[name]) for name in start)


# The clients


@pytest.mark.parametrize("first", [FIRST, Elastic(FIRST)], ids=["stateless", "stateful"])
def test_each_stage_keeps_its_own_client_states(first: Method) -> None:
    """After the switch it is Elastic(Reptile) that has met nobody: server, states and models bit for bit."""
    second = Elastic(THEN)
    training, staged = play(Stages(first, second, 2), 0, 4)
    alone, before = play(first, 0, 2)
    begun = second.init(training.federation.task, before[-1].params, 0)
    fresh, after = play(second, 2, 4, begun)
    assert_equal(staged[-1].then.server, after[-1])

    ours, theirs = states(training, staged[-1], 4), states(fresh, after[-1], 4)
    joined = cohorts(training, 2, 4)
    newly = joined - cohorts(training, 0, 2)
    left = cohorts(training, 0, 2) - joined
    assert newly
    assert left
    assert joined & cohorts(training, 0, 2)
    assert {i for i in EVERYONE if ours.joined[i]} == joined
    for client in joined:
        assert_equal(tree.take(ours.then, client), tree.take(theirs, client))
    kept = states(alone, before[-1], 2)
    for client in cohorts(training, 0, 2):
        assert_equal(tree.take(ours.first, client), tree.take(kept, client))
    assert_equal(
        models(ENGINE, training.federation, training.broadcast(staged[-1], 4), EVERYONE, 4),
        models(ENGINE, fresh.federation, fresh.broadcast(after[-1], 4), EVERYONE, 4),
    )


def test_a_second_stage_without_client_state_leaves_the_firsts_as_they_were() -> None:
    training, staged = play(Stages(Elastic(FIRST), THEN, 2), 0, 4)
    alone, before = play(Elastic(FIRST), 0, 2)
    ours, kept = states(training, staged[-1], 4), states(alone, before[-1], 2)
    for client in cohorts(training, 0, 2):
        assert_equal(tree.take(ours.first, client), tree.take(kept, client))
    assert ours.joined == ours.key == ours.then == ()


def test_a_client_begins_the_second_stage_when_it_first_takes_part_in_it() -> None:
    """It is told the stage's start, whenever it joins, the model that is sent just then, and its own key."""
    training, staged = play(Stages(Remembers(), Remembers(), 2), 0, 5)
    start = staged[1].first.server.params
    ours = states(training, staged[-1], 5)
    joins = {
        client: min(i for i in range(2, 5) if client in cohorts(training, i, i + 1))
        for client in cohorts(training, 2, 5)
    }
    assert len(set(joins.values())) > 1
    keys = set()
    for client, index in joins.items():
        note = tree.take(ours.then, client)
        assert_equal(note.start, start)
        assert_equal(note.met, start if index == 2 else staged[index - 1].then.server.params)
        assert int(note.rounds) == sum(client in cohorts(training, i, i + 1) for i in range(2, 5))
        keys |= {int(note.key), int(ours.first.key[client])} - {0}
    met_before = cohorts(training, 0, 2)
    assert len(keys) == len(joins) + len(met_before & set(joins))


def test_the_states_of_a_client_that_was_refused_stay_as_they_were() -> None:
    """A reply that is not finite leaves the client outside the stage: it joins the next time."""
    training, staged = play(Stages(FIRST, Elastic(THEN), 1), 0, 1)
    round = training.round(1)
    cohort = training.sampler(training.federation.data, round)
    x = training.federation.data.x.clone()
    x[training.federation.data.train[cohort.ids[0]]] = torch.nan
    poisoned = replace(
        training, federation=replace(training.federation, data=replace(training.federation.data, x=x))
    )
    with torch.no_grad():
        list(poisoned.rounds(staged[-1], 1, 2))
    joined = states(training, staged[-1], 1).joined
    assert [bool(joined[i]) for i in cohort.ids] == [False, True]


def test_local_training_can_follow() -> None:
    """Local keeps its start and sends nothing: the initial model of every client is FedAvg's last."""
    training, staged = play(Stages(FIRST, Local(), 2), 0, 3)
    last = staged[1].first.server.params
    pairs = models(ENGINE, training.federation, training.broadcast(staged[-1], 3), EVERYONE, 3)
    for initial, _ in pairs:
        assert_equal(initial, last)


# Nesting and composition


def test_three_stages_nest_either_way() -> None:
    """a in rounds 0 and 1, b in 2, c in 3 and 4; b and c keep client states."""
    a, b, c = FIRST, Elastic(THEN), Elastic(FIRST, alpha=0.2)
    right, left = Stages(a, Stages(b, c, 1), 2), Stages(Stages(a, b, 2), c, 3)
    pairs = []
    for method in (right, left):
        training, staged = play(method, 0, 5)
        pairs.append(
            [
                models(ENGINE, training.federation, training.broadcast(server, done), EVERYONE, done)
                for done, server in enumerate(staged, 1)
            ]
        )
    assert_equal(*pairs)
    _, one = play(a, 0, 2)
    _, two = play(b, 2, 3, b.init(Task(torch.nn.Identity), one[-1].params, 0))
    _, three = play(c, 3, 5, c.init(Task(torch.nn.Identity), two[-1].params, 0))
    _, staged = play(right, 0, 5)
    assert_equal(staged[-1].then.server.then.server, three[-1])


@dataclass(frozen=True)
class Doubled(Wrapper):
    """Sends half of its update; the server doubles it twice."""

    inner: Method

    def client_update(self, task: Task, broadcast: Any, client: Any, data: Shard) -> Reply:
        reply = self.inner.client_update(task, broadcast, client, data)
        return reply._replace(update=0.5 * reply.update)

    def decode(self, task: Task, broadcast: Any, update: Params) -> Params:
        return 4.0 * update


def test_replies_are_decoded_and_reduced_by_the_active_stage() -> None:
    plain = FedAvg(local=Recipe(batch_size=5))
    _, doubled = play(Stages(plain, Doubled(plain), 1), 0, 2)
    _, twice = play(Stages(plain, plain, 1), 0, 2)
    w = doubled[0].first.server.params
    assert_equal(w, twice[0].first.server.params)
    moved, step = doubled[1].then.server.params - w, twice[1].then.server.params - w
    for name in w:
        torch.testing.assert_close(moved[name], 2 * step[name], rtol=1e-5, atol=1e-7)

    method = Stages(UpdateOf(MEAN), UpdateOf(STACK), 1)
    training, server = federation(method, ENGINE, SIZES, COHORT)
    assert [method.reduce(training.broadcast(server, i)) for i in (0, 1)] == [MEAN, STACK]


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        (Stages(FIRST, THEN, 1), (1, 1), (1, 1)),
        (Stages(Elastic(FIRST), THEN, 1), (1, 1), (1, 1)),
        (Stages(FIRST, Elastic(THEN), 1), (1, 1), (1, 2)),
        (Stages(FIRST, Local(), 1), (1, 0), (1, 1)),
        (Stages(Local(), FIRST, 1), (0, 1), (0, 1)),
    ],
    ids=["stateless", "stateful first", "stateful second", "local second", "local first"],
)
def test_only_the_active_stage_is_sent(method: Method, up: tuple[int, int], down: tuple[int, int]) -> None:
    """In models per client; a second stage with client state also sends its start, for those who join."""
    training, server = federation(method, ENGINE, SIZES, COHORT)
    model = tree.nbytes(training.federation.start) * COHORT
    with torch.no_grad():
        closed = list(training.rounds(server, 0, 2))
    assert [c.bytes_up for c in closed] == [n * model for n in up]
    assert [c.bytes_down for c in closed] == [n * model for n in down]


def test_stages_without_client_state_keep_none() -> None:
    training, _ = federation(Stages(FIRST, Stages(THEN, FIRST, 1), 1), ENGINE, SIZES, COHORT)
    assert not training.federation.store.stateful


# Rules


@pytest.mark.parametrize("done", [1, 2, 3], ids=["first stage", "at the switch", "second stage"])
def test_resumed_from_disk_it_goes_on_bit_for_bit(tmp_path: Path, done: int) -> None:
    method = Stages(Elastic(FIRST), Elastic(THEN), 2)

    def begin(where: str) -> tuple[Training, Server]:
        training, server = federation(method, ENGINE, SIZES, COHORT)
        template = training.federation.store.template
        store = Store(template, len(SIZES), CPU, tmp_path / where, mapped=True)
        return replace(training, federation=replace(training.federation, store=store)), server

    def go(training: Training, server: Server, first: int, last: int) -> Server:
        training.federation.store.open(first)
        with torch.no_grad():
            server = [c.server for c in training.rounds(server, first, last)][-1]
        training.federation.store.commit(last)
        return server

    training, server = begin("whole")
    whole = go(training, server, 0, 5)
    kept = states(training, whole, 5)

    training, server = begin("cut")
    checkpoints.write(tmp_path / "cut", "id", Checkpoint(done, go(training, server, 0, done), {}))
    again, template = begin("cut")
    found = checkpoints.read(tmp_path / "cut", "id", template, CPU)
    assert found is not None
    end = go(again, found.server, done, 5)
    assert_equal(end, whole)
    assert_equal(states(again, end, 5), kept)


@pytest.mark.parametrize(
    "method",
    [
        Stages(Elastic(FedAvg()), Stages(FedAvg(), Elastic(THEN), 1), 1),
        Stages(FedAvg(), Local(), 2),
    ],
    ids=["three", "local"],
)
def test_keeps_every_rule(method: Method) -> None:
    """The suite plays 4 rounds, so that every stage has its turn, and restores after 2."""
    check_method(method)


def test_engines_agree_on_clients_who_join_late() -> None:
    ends = []
    for engine in (ENGINE, Vectorized(CPU, 8)):
        training, server = federation(Stages(Elastic(FIRST), Elastic(THEN), 2), engine, SIZES, COHORT)
        with torch.no_grad():
            *_, closed = training.rounds(server, 0, 4)
        ends.append(closed.server.then.server.params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-5, atol=1e-6)


def test_cohorts_are_cut_by_the_recipe_that_depends_on_sizes() -> None:
    for method in (Stages(FIRST, THEN, 1), Stages(THEN, FIRST, 1)):
        assert method.local == FIRST.local
        assert method.personal == FIRST.personal


def test_refused() -> None:
    with pytest.raises(ApieceError, match="at least 1, got 0"):
        Stages(FIRST, THEN, 0)
    with pytest.raises(ApieceError, match="Centralized trains on pooled data"):
        Stages(Centralized(), THEN, 5)
    with pytest.raises(TypeError, match="runs methods one after another"):
        Stages(FIRST, "reptile", 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="methods are final"):

        @dataclass(frozen=True)
        class Better(Stages):
            pass
