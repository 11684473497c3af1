"""LG-FedAvg against Algorithm 1 in plain PyTorch."""

from collections import OrderedDict

import pytest
from torch import nn

from apiece import ApieceError, Task
from apiece.engines.base import Engine
from apiece.methods.fedavg import FedAvg
from apiece.methods.lg_fedavg import LGFedAvg
from tests.methods.test_fedper import (
    BODY,
    ENGINES,
    EPOCHS,
    HEAD,
    LOCAL,
    PERSONAL,
    PERSONAL_EPOCHS,
    assert_equals_plain,
    assert_same_run,
    net,
)
from tests.worlds import linear_net


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """The body stays, the head is averaged with N_m / N; both take each step together."""
    assert_equals_plain(
        LGFedAvg(local=LOCAL, personal=PERSONAL),
        engine,
        private=BODY,
        trains=lambda client: client.train(BODY | HEAD, EPOCHS),
        counts=lambda n: n,
        personalizes=lambda client: client.train(BODY | HEAD, PERSONAL_EPOCHS, lr=0.1),
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_where_everything_is_head_it_is_fedavg(engine: Engine) -> None:
    def all_head() -> nn.Module:
        return nn.Sequential(OrderedDict(head=linear_net()))

    assert_same_run(LGFedAvg(local=LOCAL), FedAvg(local=LOCAL), engine, net=all_head)


def test_without_a_head_nothing_is_shared() -> None:
    task = Task(net)
    with pytest.raises(ApieceError, match=r"LGFedAvg would share nothing.*out of first, norm, out"):
        LGFedAvg(head=()).init(task, task.init(0), 0)
