"""CUDA graphs against the plain loop on a CPU.

Where there is a GPU, on it, and the log is under results/; elsewhere by graphs that a CPU replays.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from apiece import Dropout, Experiment, Method, Recipe, Task, catalog, descent, run, tree
from apiece.data import toy
from apiece.data.federated import Examples, Federated, federate
from apiece.descent import Linear
from apiece.engines import capture
from apiece.engines.base import Engine
from apiece.engines.capture import Captured
from apiece.engines.sequential import Sequential
from apiece.evaluate import evaluate, models
from apiece.methods.admm_fedmeta import ADMMFedMeta
from apiece.methods.apfl_ewc import ApflEwc
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedec import FedEC
from apiece.methods.ifca import IFCA
from apiece.methods.l2gd import L2GD
from apiece.methods.maml import MAML
from apiece.methods.reptile import Reptile
from apiece.methods.scaffold import Scaffold
from apiece.prepare import prepare
from apiece.sample import uniform
from apiece.store import Store
from apiece.train import Training, assemble
from apiece.tree import Tree
from apiece.wrappers.stages import Stages
from tests import graphs
from tests.worlds import CPU, dropout_net

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

both_ways = pytest.mark.parametrize("long", [1000, 6], ids=["whole programs", "single steps"])

NAMES = catalog.names()
SIZES = (0, 1, 4, 9, 17, 25, 25, 40, 12, 3)
LOCAL = Recipe(batch_size=5, epochs=2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if torch.cuda.is_available():
        return torch.device("cuda")
    graphs.pretend(monkeypatch)
    return CPU


def layers_of_a_step() -> nn.Module:
    return nn.Sequential(Linear(5, 7), nn.GroupNorm(1, 7), nn.ReLU(), Dropout(0.3), Linear(7, 3))


@cache
def world(device: torch.device, test: float, net: Callable[[], nn.Module]) -> tuple[Task, Tree, Federated]:
    """Ragged clients, and a model with dropout: the same for all methods, whose graphs must be told apart."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(SIZES), 5)).astype(np.float32)
    y = (x @ draw.normal(size=(5, 3))).argmax(1)
    parts = [np.arange(a, b) for a, b in pairwise(np.cumsum((0, *SIZES)))]
    names = [str(i) for i in range(len(SIZES))]
    data = federate(Examples(x, y, 3, ("a", "b", "c")), parts, names, key=0, test=test, unseen=0.0)
    return Task(net, device=device), tree.to(Task(net).init(1), device), data.to(device)


def begun(
    method: Method, engine: Engine, test: float = 0.0, net: Callable[[], nn.Module] = dropout_net
) -> tuple[Training, Tree]:
    """Six of ten take part, so chunks have other shapes in every round."""
    task, start, data = world(engine.device, test, net)

    def store(state: Tree) -> Store:
        return Store(state, len(SIZES), engine.device, None, mapped=False)

    return assemble(engine, method, task, start, data, 6, 123, uniform, store)


def left(method: Method, engine: Engine, rounds: int = 8, net: Callable[[], nn.Module] = dropout_net) -> Tree:
    """The server after each round, and everybody's models at the end."""
    training, server = begun(method, engine, net=net)
    with torch.no_grad():
        servers = [closed.server for closed in training.rounds(server, 0, rounds)]
        broadcast = training.broadcast(servers[-1], rounds)
        everyone = list(range(len(SIZES)))
        return tree.to((servers, models(engine, training.federation, broadcast, everyone, rounds)), "cpu")


def agree(ours: Tree, theirs: Tree, within: float, what: object) -> None:
    for path, a in tree.flatten(ours).items():
        b = tree.flatten(theirs)[path]
        if isinstance(b, torch.Tensor) and b.is_floating_point() and b.numel():
            assert (a - b).abs().max() <= within * b.abs().max().clamp(min=1.0), (what, path)


METHODS: list[Method] = [
    FedAvg(local=LOCAL._replace(lr=0.1)),
    FedAvg(local=LOCAL._replace(lr=0.3)),  # the same program but for one number
    FedAvg(local=LOCAL._replace(lr=0.3, momentum=0.5)),
    ADMMFedMeta(local=Recipe(lr=0.1, batch_size=0, steps=1)),  # δ changes with every round
    Stages(FedAvg(local=LOCAL), Reptile(local=Recipe(batch_size=5, steps=4)), switch=4),
    ApflEwc(local=LOCAL, z=1, preset=(0, 3)),  # clients are asked for gradients now and then
    L2GD(local=LOCAL, p=0.5),  # a coin decides what a round does
    FedEC(local=LOCAL),
    Scaffold(local=LOCAL),
    IFCA(local=LOCAL),
    MAML(),
]


@pytest.mark.slow
@both_ways
def test_replays_never_use_a_stale_number(
    long: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine for all methods in turn, twice: graphs of one must not serve another."""
    monkeypatch.setattr(capture, "LONG", long)
    engine = Captured(device, 64)
    for method in METHODS + METHODS[:3]:
        agree(left(method, engine), left(method, Sequential(CPU)), 1e-5, method)
    assert engine.captures >= (len(METHODS) if long > 6 else 1)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("name", [n for n in NAMES if not catalog.build(catalog.example(n), {}).needs_proxy])
def test_every_method_is_recorded_whole(
    name: str, long: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that know of a step of plain SGD, however small, among them. No other engine is asked to be."""
    monkeypatch.setattr(capture, "LONG", long)
    monkeypatch.setattr(descent, "SMALL", 1)
    method = catalog.build(catalog.example(name), {})
    engine = Captured(device, 64)
    ours = left(method, engine, 4, layers_of_a_step)
    assert engine.captures > 0
    agree(ours, left(method, Sequential(CPU), 4, layers_of_a_step), 1e-4, name)


@on_a_gpu
@pytest.mark.parametrize("name", ["fedpa", "feddf", "fedmeta_proxy"])
def test_what_a_server_trains_is_replayed(name: str) -> None:
    """Five passes over the proxy in batches of 20; the CPU's server to 1e-4.

    Adam's large eps: divided by roots of second moments near zero, a round-off would be as large as a step.
    """
    slot = {"feddf": "distill", "fedmeta_proxy": "meta"}.get(name, "aggregator")
    settings = {slot: {"batch_size": 20, "epochs": 5, "steps": 0, "eps": 1e-3}}
    ends = []
    for device in ("cuda", "cpu"):
        described = Experiment(method=name, settings=settings, proxy=0.1, device=device, precision="fp32")
        session = prepare(replace(described, engine="vectorized", rounds=3), None, None)
        with torch.no_grad():
            *_, last = session.training.rounds(session.server, 0, 3)
        ends.append(tree.to(session.training.broadcast(last.server, 3).params, "cpu"))
    for path, ours in ends[0].items():
        torch.testing.assert_close(ours, ends[1][path], rtol=1e-4, atol=1e-4)


def test_graphs_are_reused_over_rounds(device: torch.device) -> None:
    engine = Captured(device, 64)
    method = FedAvg(local=LOCAL)
    training, server = begun(method, engine)
    with torch.no_grad():
        for _ in training.rounds(server, 0, 30):
            pass
        after = engine.captures
        for _ in training.rounds(server, 0, 30):
            pass
    # The same cohorts again: only what was met for the first time then is recorded now.
    assert 0 < engine.captures - after + 1 <= after
    assert after < 30


@both_ways
def test_lanes_do_not_disturb_each_other(
    long: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody is scored in chunks of two, three at once, twenty times: the CPU's scores every time."""
    monkeypatch.setattr(capture, "LONG", long)
    found = []
    for engine in (Captured(device, 2), Sequential(CPU)):
        training, server = begun(FedEC(local=LOCAL), engine, test=0.4)
        broadcast = training.broadcast(server, 0)
        with torch.no_grad():
            found.append(
                [evaluate(engine, training.federation, broadcast, range(10), 1)["loss"] for _ in range(20)]
            )
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_poisoned_client_disturbs_nobody_in_a_replay(device: torch.device) -> None:
    engine = Captured(device, 64)
    training, server = begun(FedAvg(local=LOCAL), engine)
    x = training.federation.data.x.clone()
    x[training.federation.data.train[7]] = torch.nan  # type: ignore[attr-defined]
    bad = replace(
        training, federation=replace(training.federation, data=replace(training.federation.data, x=x))
    )
    with torch.no_grad():
        closed = list(bad.rounds(server, 0, 8))
    assert any(7 in one.ids for one in closed)
    for one in closed:
        assert [client for client, fine in zip(one.ids, one.finite.tolist(), strict=True) if not fine] == [
            client for client in one.ids if client == 7
        ]
        assert all(bool(p.isfinite().all()) for p in one.server.params.values())


@on_a_gpu
@pytest.mark.parametrize(("data", "model"), [("movielens", "din"), ("shakespeare", "lstm(hidden=8)")])
def test_inputs_of_other_kinds(data: str, model: str, tmp_path: Path) -> None:
    """Categories, histories and texts: embeddings, ranks and loops over places, recorded."""
    experiment = Experiment(
        data=data,
        data_dir=str(toy.folder(tmp_path / "toy")),
        model=model,
        settings={"local": {"lr": 0.5, "batch_size": 20}},
        test=0.0,
        rounds=4,
        cohort=4,
        evaluate_every=1,
        precision="fp32",
        threads=1,
    )
    plain = run(replace(experiment, device="cpu", engine="sequential"))
    recorded = run(replace(experiment, device="cuda", engine="vectorized"))
    engine = recorded.session.engine
    assert isinstance(engine, Captured)
    assert engine.captures > 1
    for name, pair in plain.pairs.items():
        # A rank may change where two scores are nearly equal: one pair of 99.
        np.testing.assert_allclose(recorded.pairs[name], pair, atol=1e-4 if name == "loss" else 0.02)
