import torch

from apiece import Experiment, Recipe
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.local import sgd
from apiece.methods.local import Local
from apiece.shard import Rows, Shard
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
