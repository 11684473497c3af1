"""LearnedAggregation and FedPA against the naive form of Eqs. 4 to 7 in plain PyTorch."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from apiece import (
    ApieceError,
    Method,
    Model,
    Params,
    Recipe,
    Reply,
    Round,
    Rule,
    Shard,
    Task,
    Wrapper,
    check_method,
    random,
    sgd,
    tree,
)
from apiece.data.federated import Federated
from apiece.engines.base import Engine, Member, client_phase
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.method import STACK, Stacked
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedper import FedPer
from apiece.methods.local import Local
from apiece.sample import uniform
from apiece.shard import Batch, Rows
from apiece.store import Store
from apiece.train import Training, assemble
from apiece.wrappers.elastic import Elastic
from apiece.wrappers.fedpa import FedPA
from apiece.wrappers.learned_aggregation import LearnedAggregation, aggr, init_phi
from tests.methods.test_fedavg import cohort_batches
from tests.worlds import CPU, ROOT, dropout_net, linear_net, ragged, servers

SIZES = (7, 23, 1, 12)
CLIENTS = Recipe(lr=0.2, batch_size=5, epochs=2)
SHORT = Recipe("adam", lr=0.05, batch_size=8, epochs=2)  # of the aggregator
UNTRAINED = SHORT._replace(epochs=0)
FORMS = pytest.mark.parametrize("additive", [False, True], ids=["multiplicative", "additive"])


def proxy(features: int = 5, poison: float = 0.0) -> Shard:
    """20 examples of the server's own."""
    draw = np.random.default_rng(1)
    x = torch.from_numpy(draw.normal(size=(21, features)).astype(np.float32)) + poison
    y = torch.from_numpy(draw.integers(0, 3, 21))
    key = random.as_key(9)
    return Shard(x, y, Rows(torch.arange(20), torch.tensor(20), key, key), True)


def world(
    method: Method,
    engine: Engine | None = None,
    cohort: int = 3,
    net: Callable[[], nn.Module] = dropout_net,
    data: Federated | None = None,
    of_server: Shard | None = None,
) -> tuple[Training, Any]:
    data = data or ragged(SIZES)
    task = Task(net, proxy=of_server or proxy())

    def store(state: Any) -> Store:
        return Store(state, len(SIZES), CPU, None, mapped=False)

    parts = (method, task, task.init(1), data, cohort, ROOT, uniform, store)
    return assemble(engine or Sequential(CPU), *parts)


def close(a: Params, b: Params, tolerance: float) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def drawn(w: Params) -> Params:
    """ϕ for `w` with every layer drawn: u_k is far from 0."""
    generator = torch.Generator().manual_seed(2)
    return init_phi(w, 4).map(lambda t: torch.randn(t.shape, generator=generator) / 4)


# The naive form


class Naive(nn.Module):
    """h, layer by layer, with u_k and w_t − Δ_k written out for every client."""

    def __init__(self, phi: Params, like: Mapping[str, Tensor], additive: bool) -> None:
        super().__init__()
        self.additive = additive
        self.layers = nn.ModuleDict()
        for name, t in like.items():
            d = t.numel()
            p = int(math.log2(d) + 1)
            w_in, delta_in = nn.Linear(d, p, bias=False), nn.Linear(d, p, bias=False)
            out = nn.Linear(2 * p, d, bias=False)
            w_in.weight.data, delta_in.weight.data = phi[name + ".A1"].clone(), phi[name + ".A2"].clone()
            out.weight.data = torch.cat([phi[name + ".B1"], phi[name + ".B2"]], 1)
            self.layers[name.replace(".", "-")] = nn.ModuleList([w_in, delta_in, out])

    def forward(self, w_t: dict[str, Tensor], deltas: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        after = {}
        for name, t in w_t.items():
            w_in, delta_in, out = self.layers[name.replace(".", "-")]
            w, calibrated = t.flatten(), []
            for delta_k in deltas:
                delta = delta_k[name].flatten()
                u = out(torch.cat([torch.tanh(w_in(w)), torch.tanh(delta_in(delta))]))
                calibrated.append(w - delta + u if self.additive else w - delta * (1 - u))
            after[name] = torch.stack(calibrated).mean(0).reshape(t.shape)
        return after


@FORMS
def test_the_sums_are_the_naive_form(additive: bool) -> None:
    """Tensors of 1, 2, 12 and 105 entries; seven replies of which two were refused."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": (), "b.bias": (2,), "b.weight": (3, 4), "c": (5, 7, 3)}
    w = Params({name: torch.randn(size, generator=generator) for name, size in sizes.items()})
    stack = w.map(lambda t: torch.randn((7, *t.shape), generator=generator) / 3)
    stack = stack.map(lambda t: t.index_fill(0, torch.tensor([1, 6]), 0.0))
    phi = drawn(w)
    deltas = [{name: -t[k] for name, t in stack.items()} for k in (0, 2, 3, 4, 5)]
    with torch.no_grad():
        naive = Params(Naive(phi, w, additive)(dict(w), deltas))
    ours = w + aggr(w, stack, 5, phi, additive)
    plain = w + stack.map(lambda t: t.sum(0) / 5)
    assert float((naive - plain).sqnorm()) > 0.1
    close(ours, naive, 1e-6)


@FORMS
@pytest.mark.parametrize("meantime", [False, True], ids=["this round's updates", "the last round's"])
def test_three_rounds_equal_a_plain_program(additive: bool, meantime: bool) -> None:
    """Clients, aggregator and its training with modules, autograd and torch.optim; only orders are shared."""
    method = LearnedAggregation(FedAvg(CLIENTS), SHORT, additive, meantime)
    training, server = world(method, Vectorized(CPU, 8), net=linear_net)
    data, of_server = training.federation.data, training.federation.task.proxy
    assert of_server is not None
    model = linear_net()
    model.load_state_dict(dict(server.inner.params))
    naive = Naive(server.phi.params, model.state_dict(), additive)
    adam = torch.optim.Adam(naive.parameters(), lr=0.05)
    orders = []
    for index, ours in enumerate(servers(training, server, 3)):
        w_t = {name: p.detach().clone() for name, p in model.named_parameters()}
        deltas = []
        for _, batches in cohort_batches(training, index, 2):
            local = copy.deepcopy(model)
            descent = torch.optim.SGD(local.parameters(), lr=0.2)
            for rows in batches:
                descent.zero_grad()
                with torch.enable_grad():
                    F.cross_entropy(local(data.x[rows]), data.y[rows]).backward()
                descent.step()
            deltas.append({name: w_t[name] - p.detach() for name, p in local.named_parameters()})
        untrained = {name: t.detach() for name, t in naive(w_t, deltas).items()}
        batches = list(of_server.at(training.round(index).key).batches(8, 2))
        orders.append([b.y.tolist() for b in batches])
        for batch in batches:
            adam.zero_grad()
            with torch.enable_grad():
                outputs = functional_call(model, naive(w_t, deltas), (batch.x,))
                F.cross_entropy(outputs, batch.y).backward()
            adam.step()
        trained = {name: t.detach() for name, t in naive(w_t, deltas).items()}
        model.load_state_dict(untrained if meantime else trained)
        close(ours.inner.params, Params(model.state_dict()), 1e-5)
        assert index or meantime or any(not torch.allclose(trained[n], untrained[n], atol=1e-3) for n in w_t)
    assert len(orders[0]) == 6
    assert orders[0] != orders[1]


# Limits


@dataclass(frozen=True)
class Unweighted(Wrapper):
    """Every reply counts alike."""

    inner: Method

    def client_update(self, task: Task, broadcast: Any, client: Any, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)._replace(weight=1.0)


@FORMS
@pytest.mark.parametrize("outer", [Rule(), Rule("sgd", lr=0.5, momentum=0.9)], ids=["average", "momentum"])
def test_an_untrained_aggregator_is_unweighted_fedavg(additive: bool, outer: Rule) -> None:
    fedavg = FedAvg(CLIENTS, outer=outer)
    learned, plain = (
        list(servers(*world(method), 3))
        for method in (LearnedAggregation(fedavg, UNTRAINED, additive), Unweighted(fedavg))
    )
    for ours, theirs in zip(learned, plain, strict=True):
        close(ours.inner.params, theirs.params, 1e-6)


def test_output_layers_learn_first_then_input_layers() -> None:
    """B = 0 stops the gradient of A1 and A2 at the first step only."""

    def moved(steps: int) -> set[str]:
        method = LearnedAggregation(FedAvg(CLIENTS), SHORT._replace(epochs=1, steps=steps))
        training, server = world(method)
        (after,) = servers(training, server, 1)
        before = server.phi.params
        return {n.rpartition(".")[2] for n, t in after.phi.params.items() if not torch.equal(t, before[n])}

    assert moved(1) == {"B1", "B2"}
    assert moved(2) == {"A1", "A2", "B1", "B2"}


def test_fedpa_is_learned_aggregation_of_fedavg() -> None:
    composed = FedPA(CLIENTS, aggregator=SHORT, additive=True, meantime=True)
    wrapped = LearnedAggregation(FedAvg(CLIENTS), SHORT, additive=True, meantime=True)
    one, two = (list(servers(*world(method), 2))[-1] for method in (composed, wrapped))
    for path, leaf in tree.flatten(one).items():
        assert torch.equal(leaf, tree.flatten(two)[path]), path


def test_fedpa_has_the_settings_of_the_paper() -> None:
    method = FedPA()
    assert method.local[:2] == method.personal[:2] == ("adam", 0.01)
    assert (method.local.epochs, method.aggregator.epochs) == (5, 30)
    assert method.aggregator[:2] == ("adam", 0.001)


# Replies


@FORMS
def test_a_refused_reply_does_not_count(additive: bool) -> None:
    """Client 1 sees NaN: the server ends as if three clients had answered."""
    method = LearnedAggregation(FedAvg(CLIENTS), SHORT, additive)
    data = ragged(SIZES)
    training, server = world(method, cohort=4, data=data)
    round = training.round(0)
    cohort = uniform(data, round)
    with torch.no_grad():
        broadcast = training.broadcast(server, 0)
        member = Member(training.federation, broadcast, cohort, round)
        stack = client_phase(training.engine, member)[0].update
        others = tree.take(stack, torch.tensor([0, 2, 3]))
        wanted = method.server_update(training.federation.task, server, others, round._replace(replies=3))
    poisoned = data.x.clone()
    poisoned[data.train[1]] = torch.nan
    training, server = world(method, cohort=4, data=dataclasses.replace(data, x=poisoned))
    (after,) = servers(training, server, 1)
    close(after.inner.params, wanted.inner.params, 1e-6)
    close_to_mean = (
        wanted.inner.params - server.inner.params - stack.updates.map(lambda t: t[[0, 2, 3]].mean(0))
    )
    assert float(close_to_mean.sqnorm()) > 1e-4


def test_a_round_without_replies_leaves_the_server() -> None:
    data = ragged(SIZES)
    training, server = world(FedPA(CLIENTS), data=dataclasses.replace(data, x=data.x * torch.nan))
    (after,) = servers(training, server, 1)
    for path, leaf in tree.flatten(server).items():
        assert torch.equal(leaf, tree.flatten(after)[path]), path


def test_clients_do_not_see_the_proxy() -> None:
    method = FedPA(CLIENTS)
    answers = []
    for of_server in (proxy(), proxy(poison=math.nan)):
        training, server = world(method, Vectorized(CPU, 8), of_server=of_server)
        f, round = training.federation, training.round(0)
        with torch.no_grad():
            broadcast = training.broadcast(server, 0)
            member = Member(f, broadcast, uniform(f.data, round), round)
            (outcome,) = client_phase(training.engine, member)
            answers.append((outcome, models(training.engine, f, broadcast, list(range(len(SIZES))), 0)))
    one, two = (tree.flatten(answer) for answer in answers)
    assert all(torch.equal(one[path], two[path]) for path in one)


class Largest(TorchDispatchMode):
    """The most entries of a tensor that an operator makes; views of `known` tensors are not made."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in tree.tensors(known)}
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree.tensors(out):
            if t.untyped_storage().data_ptr() not in self.known:
                self.entries = max(self.entries, t.numel())
        return out


@FORMS
def test_no_tensor_as_large_as_the_stack_is_made(additive: bool) -> None:
    """50 replies of d = 1000: the largest are A1, A2, B1 and B2 and their like, p·d = 10·1000 entries."""
    K, d, p = 50, 1000, 10
    task = Task(lambda: nn.Linear(40, 25), proxy=proxy(features=40))
    method = LearnedAggregation(FedAvg(), SHORT, additive)
    w = task.init(0)
    server = method.init(task, w, 0)
    stack = Stacked(w.map(lambda t: torch.randn(K, *t.shape)), torch.ones(K))
    with torch.no_grad(), Largest(stack) as largest:
        after = method.server_update(task, server, stack, Round(0, 1, K, K, K, K))
    assert any(not torch.equal(after.phi.params[n], t) for n, t in server.phi.params.items())
    assert largest.entries == p * d


def test_number_of_weights() -> None:
    """Σ 4·p·d; here d = 15, 3 with p = 4, 2."""
    phi = init_phi(Task(linear_net).init(0), 0)
    assert sum(t.numel() for t in phi.values()) == 4 * (4 * 15 + 2 * 3)
    for d in (1, 2, 3, 4, 1023, 1024, 1025):
        p = int(math.log2(d) + 1)
        assert init_phi(Params({"w": torch.zeros(d)}), 0)["w.A1"].shape == (p, d)


# Conformance


@dataclass(frozen=True)
class Prox(Wrapper):
    """FedProx's penalty around a method."""

    inner: Method

    def client_update(self, task: Task, broadcast: Any, client: Any, data: Shard) -> Reply:
        def proximal(w: Params, batch: Batch, outputs: Tensor) -> Tensor:
            return 0.05 * (w - broadcast.params).sqnorm()

        return self.inner.client_update(task.penalized(proximal), broadcast, client, data)


class Own(NamedTuple):
    v: Params


@dataclass(frozen=True)
class Stateful(Method):
    """A model per client beside the shared one."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Own:
        return Own(start)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        v = self.personalize(task, broadcast, client, data)
        return Reply(w - broadcast.params, Own(v), weight=data.size, model=v)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def initial(self, task: Task, broadcast: Model, client: Own) -> Params:
        return client.v

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return sgd(task.objective, client.v, data, self.personal)


# Adam divides each entry of the gradient by its own size, so one in which the replies all but cancel shows
# the engines' round-off; eps bounds that.
STEADY = SHORT._replace(eps=1e-4)
AROUND = {
    "prox": LearnedAggregation(Prox(FedAvg()), STEADY),
    "stateful": LearnedAggregation(Stateful(), STEADY, additive=True),
    "inside": Elastic(LearnedAggregation(FedAvg(outer=Rule("adam", lr=0.01)), STEADY, meantime=True)),
}


@pytest.mark.parametrize("method", AROUND.values(), ids=AROUND)
def test_around_other_methods_every_rule_is_kept(method: Method) -> None:
    check_method(method)


# Errors


def test_without_a_proxy_it_says_how_to_give_one() -> None:
    task = Task(linear_net)
    with pytest.raises(ApieceError, match="--proxy"):
        FedPA().init(task, task.init(0), 0)


def test_an_update_that_is_no_difference_of_params_is_refused() -> None:
    training, server = world(LearnedAggregation(Local(), SHORT))
    with pytest.raises(ApieceError, match="update of Local is not a difference of params"):
        list(servers(training, server, 1))


def test_a_part_of_the_model_cannot_be_judged() -> None:
    """FedPer's heads stay with the clients: the server has no model whose loss on the proxy it could take."""
    training, server = world(LearnedAggregation(FedPer(), SHORT))
    with pytest.raises(ApieceError, match="all of its params"):
        list(servers(training, server, 1))


def test_a_method_that_does_not_average_is_refused() -> None:
    nested = LearnedAggregation(LearnedAggregation(FedAvg(), SHORT), SHORT)
    assert nested.inner.reduce(None) is STACK
    with pytest.raises(ApieceError, match="does not average"):
        list(servers(*world(nested), 1))


def test_a_recipe_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ApieceError, match=r"aggregator\.epochs"):
        FedPA(aggregator=Recipe(epochs=-1))
