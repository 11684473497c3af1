"""FedBABU against Algorithm 1 in plain PyTorch."""

import pytest
import torch

from apiece.engines.base import Engine
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedbabu import FedBABU
from tests.methods.test_fedper import (
    BODY,
    COHORT,
    ENGINES,
    EPOCHS,
    HEAD,
    LOCAL,
    PERSONAL,
    PERSONAL_EPOCHS,
    ROUNDS,
    SIZES,
    assert_equals_plain,
    assert_same_run,
)
from tests.worlds import federation, servers


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """The body alone is trained, and averaged with n_i / n; fine-tuning trains head and body."""
    assert_equals_plain(
        FedBABU(local=LOCAL, personal=PERSONAL),
        engine,
        private=HEAD,
        trains=lambda client: client.train(BODY, EPOCHS),
        counts=lambda n: n,
        personalizes=lambda client: client.train(BODY | HEAD, PERSONAL_EPOCHS, lr=0.1),
    )


def test_the_head_stays_as_it_was_drawn() -> None:
    """With weight decay, which a head that is only left out of the gradient would feel: the same bits."""
    training, server = federation(FedBABU(local=LOCAL._replace(weight_decay=0.1)), ENGINES[1], SIZES, COHORT)
    (*_, after) = servers(training, server, ROUNDS)
    f = training.federation
    states = f.states(ENGINES[1], training.broadcast(after, ROUNDS), range(len(SIZES)))
    for name in ("3.weight", "3.bias"):
        assert name not in after.params
        assert all(torch.equal(head, f.start[name]) for head in states.private[name])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_a_head_it_is_fedavg(engine: Engine) -> None:
    fedbabu = FedBABU(head=(), local=LOCAL, personal=PERSONAL)
    assert_same_run(fedbabu, FedAvg(local=LOCAL, personal=PERSONAL), engine)
