"""FedPer against Algorithms 1 and 2 in plain PyTorch, which shares nothing with our code but the batch order.

The other methods that keep a part of the model with the client are compared by the same plain federation:
what a client trains, what it keeps and what it counts in the mean are each test's own.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Method, Recipe, Shard, Task, random, tree
from apiece.data.federated import Federated
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.layers import PartlyShared
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedbabu import FedBABU
from apiece.methods.fedper import FedPer
from apiece.methods.fedrep import FedRep
from apiece.train import Training
from tests.worlds import CPU, cohort_shards, dropout_net, federation, linear_net, servers

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (0, 23, 9, 12, 7, 1, 16)
COHORT, ROUNDS, BATCH, EPOCHS, PERSONAL_EPOCHS = 3, 3, 5, 2, 1
LOCAL = Recipe(lr=0.2, momentum=0.5, batch_size=BATCH, epochs=EPOCHS)
PERSONAL = Recipe(lr=0.1, epochs=PERSONAL_EPOCHS)

Values = dict[str, Tensor]


def net() -> nn.Module:
    layers = {"first": nn.Linear(5, 6), "norm": nn.GroupNorm(1, 6), "tanh": nn.Tanh(), "out": nn.Linear(6, 3)}
    return nn.Sequential(OrderedDict(layers))


BODY = {"first.weight", "first.bias", "norm.weight", "norm.bias"}
HEAD = {"out.weight", "out.bias"}
NORM = {"norm.weight", "norm.bias"}


class Client:
    """A model, and where its examples lie."""

    def __init__(self, values: Values, shard: Shard, x: Tensor, y: Tensor) -> None:
        self.net, self.shard, self.x, self.y = net(), shard, x, y
        self.net.load_state_dict(values)

    def train(
        self, names: set[str], epochs: int, lr: float = 0.2, shard: Shard | None = None, steps: int = 0
    ) -> None:
        """SGD on the parameters called `names`; the others stay as they are."""
        chosen = [p for name, p in self.net.named_parameters() if name in names]
        sgd = torch.optim.SGD(chosen, lr=lr, momentum=0.5)
        for batch in (shard or self.shard).batches(BATCH, epochs, steps):
            self.net.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(self.net(self.x[batch.x]), self.y[batch.x]).backward()
            sgd.step()

    def values(self) -> Values:
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}


class Plain(NamedTuple):
    """After a round."""

    shared: Values
    private: dict[int, Values]  # of the clients met


def plain_federation(
    training: Training,
    start: Values,
    private: set[str],
    trains: Callable[[Client], None],
    counts: Callable[[int], float],
) -> Iterator[Plain]:
    """Rounds in which a client `trains`, keeps what is `private` and `counts` by its size in the mean."""
    data = training.federation.data
    shared = {name: p for name, p in start.items() if name not in private}
    kept: dict[int, Values] = {}
    for t in range(ROUNDS):
        cohort = cohort_shards(training, t)
        total = sum(counts(SIZES[i]) for i, _ in cohort)
        mean = {name: torch.zeros_like(p) for name, p in shared.items()}
        for i, shard in cohort:
            client = Client(start | shared | kept.get(i, {}), shard, data.x, data.y)
            trains(client)
            values = client.values()
            kept[i] = {name: values[name] for name in private}
            for name in mean:
                mean[name] += counts(SIZES[i]) / total * values[name]
        shared = mean
        yield Plain(dict(shared), dict(kept))


def assert_close(ours: Any, theirs: Values, at: int | None = None) -> None:
    assert set(ours) == set(theirs)
    for name, p in theirs.items():
        mine = ours[name] if at is None else ours[name][at]
        torch.testing.assert_close(mine, p, rtol=1e-5, atol=1e-5)


def assert_equals_plain(
    method: PartlyShared,
    engine: Engine,
    private: set[str],
    trains: Callable[[Client], None],
    counts: Callable[[int], float],
    personalizes: Callable[[Client], None],
) -> None:
    """Shared and private layers round by round; then every client's initial and personalized model.

    Three of seven clients take part at a time: three come back, one has no examples, one never comes.
    """
    training, server = federation(method, engine, SIZES, COHORT, net)
    f, everyone = training.federation, list(range(len(SIZES)))
    assert isinstance(f.data, Federated)
    met = [[i for i, _ in cohort_shards(training, t)] for t in range(ROUNDS)]
    assert met == [[0, 4, 6], [1, 4, 5], [1, 3, 6]]
    start = dict(f.start)
    expected = list(plain_federation(training, start, private, trains, counts))

    for plain, after in zip(expected, servers(training, server, ROUNDS), strict=True):
        assert_close(after.params, plain.shared)
        broadcast = training.broadcast(after, ROUNDS)
        states = f.states(engine, broadcast, everyone)
        for i in everyone:
            assert_close(states.private, plain.private.get(i, {n: start[n] for n in private}), i)

    key = random.fold(f.root, "personalize", ROUNDS)
    for i, (initial, personalized) in enumerate(models(engine, f, broadcast, everyone, ROUNDS)):
        rows, even = f.rows(f.data.train, [i], [i], key)
        shard = Shard(torch.arange(len(f.data.y)), f.data.y, tree.take(rows, 0), even)
        client = Client(start | plain.shared | plain.private.get(i, {}), shard, f.data.x, f.data.y)
        assert_close(initial, client.values())
        personalizes(client)
        assert_close(personalized, client.values())


def assert_same_run(
    a: Method,
    b: Method,
    engine: Engine,
    sizes: tuple[int, ...] = SIZES,
    net: Callable[[], nn.Module] = dropout_net,
) -> None:
    """Bit for bit: the server in every round, and everybody's initial and personalized models at the end."""
    ends = []
    for method in (a, b):
        training, server = federation(method, engine, sizes, COHORT, net)
        played = list(servers(training, server, ROUNDS))
        broadcast = training.broadcast(played[-1], ROUNDS)
        found = models(engine, training.federation, broadcast, list(range(len(sizes))), ROUNDS)
        ends.append(([after.params for after in played], found))
    assert tree.same_structure(*ends)
    assert all(torch.equal(x, y) for x, y in zip(*map(tree.leaves, ends), strict=True))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithms_1_and_2(engine: Engine) -> None:
    """Both parts take each step together; γ_j = n_j / Σ n."""
    assert_equals_plain(
        FedPer(local=LOCAL, personal=PERSONAL),
        engine,
        private=HEAD,
        trains=lambda client: client.train(BODY | HEAD, EPOCHS),
        counts=lambda n: n,
        personalizes=lambda client: client.train(BODY | HEAD, PERSONAL_EPOCHS, lr=0.1),
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_a_head_it_is_fedavg(engine: Engine) -> None:
    assert_same_run(FedPer(head=(), local=LOCAL), FedAvg(local=LOCAL), engine)


def test_the_head_may_be_more_than_the_last_layer() -> None:
    """The two personalization layers of the paper's K_P = 2."""
    method = FedPer(head=("norm", "out"))
    private, shared = method.split(Task(net), Task(net).init(0))
    assert (set(private), set(shared)) == (NORM | HEAD, {"first.weight", "first.bias"})


@pytest.mark.parametrize("method", [FedPer(), FedRep(), FedBABU()], ids=lambda m: type(m).__name__)
def test_a_model_without_a_body_is_refused(method: Method) -> None:
    task = Task(lambda: nn.Sequential(OrderedDict(head=linear_net())))
    with pytest.raises(ApieceError, match=r"share nothing.*--model mlp.*out of head"):
        method.init(task, task.init(0), 0)


@pytest.mark.parametrize("method", [FedPer, FedRep, FedBABU])
def test_a_head_that_is_not_there_is_refused(method: Any) -> None:
    task = Task(net)
    with pytest.raises(ApieceError, match=r"unknown layer 'fc3'.*first, .*out"):
        method(head=("fc3",)).init(task, task.init(0), 0)
