"""FOMAML against a plain loop that takes the query's gradient at the adapted model."""

import pytest
import torch

from apiece import Model, Recipe, Rule
from apiece.engines.base import Engine
from apiece.methods.fomaml import FOMAML
from tests.methods.test_maml import (
    ENGINES,
    SIZES,
    Plain,
    assert_same,
    location,
    net,
    one_client,
    personalized,
)
from tests.worlds import federation, servers


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("batch_size", [0, 4])
def test_equals_a_plain_loop(engine: Engine, batch_size: int) -> None:
    """Three rounds of four of six clients, of which two have no query and do not count; SGD, momentum."""
    local = Recipe(lr=0.3, batch_size=batch_size, epochs=2)
    outer = Rule("sgd", lr=0.4, momentum=0.5)
    method = FOMAML(local, Recipe(batch_size=0, steps=4), outer=outer, support=0.6)
    training, start = federation(method, engine, SIZES, 4, net)
    plain = Plain(training, dict(start.params), method.local, 0.6)
    sgd = torch.optim.SGD(plain.theta.values(), lr=0.4, momentum=0.5)
    server = start
    for index, after in enumerate(servers(training, start, 3)):
        plain.set_gradients(index, through=False)
        sgd.step()
        assert_same(after.params, plain.theta)
        server = after
    assert min(plain.counted) < 4
    for client, ours in enumerate(personalized(training, engine, server, 3)):
        assert_same(ours, plain.personalized(client, 4))


@pytest.mark.parametrize("size", [0, 1])
def test_a_client_without_a_query_has_no_weight(size: int) -> None:
    task = location()
    reply = FOMAML().client_update(task, Model(task.init(0)), (), one_client(size))
    assert float(reply.weight) == 0.0
    assert bool(reply.update["theta"].isfinite().all())
