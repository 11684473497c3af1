import torch

from apiece import Experiment, Recipe
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.local import sgd
from apiece.methods.local import Local
from apiece.shard import Rows, Shard
from apiece.wrappers.guarded import Guarded
from tests.worlds import CPU, federation, linear_net


def test_each_client_trains_alone_and_nothing_is_sent() -> None:
    method = Local(personal=Recipe(lr=0.1, batch_size=0, epochs=4))
    training, server = federation(method, Vectorized(CPU, 8), (3, 11), 2, linear_net)
    closed = list(training.rounds(server, 0, 2))
    assert [(done.bytes_up, done.bytes_down) for done in closed] == [(0, 0), (0, 0)]
    f = training.federation
    found = models(training.engine, f, training.broadcast(server, 2), [0, 1], 2)
    for client, (initial, personalized) in enumerate(found):
        index = torch.as_tensor(f.data.train[client])
        key = torch.tensor(0)
        data = Shard(f.data.x, f.data.y, Rows(index, torch.tensor(len(index)), key, key), True)
        alone = sgd(f.task.objective, f.start, data, method.personal)
        for name in alone:
            torch.testing.assert_close(initial[name], f.start[name])
            torch.testing.assert_close(personalized[name], alone[name], rtol=1e-5, atol=1e-6)


def test_it_gets_as_many_epochs_as_fedavgs_average_client() -> None:
    """30 rounds × 4 of 20 seen clients × 5 epochs = 30 epochs; what is set stays."""
    experiment = Experiment(method="local", rounds=30, cohort=4)
    assert experiment.resolved(20, "iid").build_method().personal.epochs == 30
    fixed = Experiment(method="local", settings={"personal": {"epochs": 7}})
    assert fixed.resolved(20, "iid").build_method().personal.epochs == 7


def test_so_it_does_in_wrappers() -> None:
    """The same 30 epochs; settings of the wrappers stay."""
    experiment = Experiment(
        method="guarded(guarded(local))",
        settings={"folds": 3, "inner": {"folds": 4, "inner": {"personal": {"lr": 0.3}}}},
        rounds=30,
        cohort=4,
    )
    outer = experiment.resolved(20, "iid").build_method()
    assert isinstance(outer, Guarded)
    assert isinstance(outer.inner, Guarded)
    assert (outer.folds, outer.inner.folds) == (3, 4)
    assert (outer.personal.lr, outer.personal.epochs) == (0.3, 30)
    assert "epochs" not in experiment.settings["inner"]["inner"]["personal"]
    fixed = {"inner": {"personal": {"epochs": 7}}}
    resolved = Experiment(method="guarded(local)", settings=fixed).resolved(20, "iid")
    assert resolved.build_method().personal.epochs == 7
