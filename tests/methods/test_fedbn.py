"""FedBN against Algorithm 1 in plain PyTorch, with GroupNorm for BatchNorm."""

import pytest
from torch import nn

from apiece import ApieceError
from apiece.engines.base import Engine
from apiece.methods.fedbn import FedBN
from apiece.methods.reptile import Reptile
from apiece.models import build
from tests.methods.test_fedper import (
    BODY,
    ENGINES,
    EPOCHS,
    HEAD,
    LOCAL,
    NORM,
    PERSONAL,
    PERSONAL_EPOCHS,
    assert_equals_plain,
    assert_same_run,
)
from tests.worlds import federation


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """All layers are trained, normalization stays; 1/K for each client that has examples, of any size."""
    assert_equals_plain(
        FedBN(local=LOCAL, personal=PERSONAL),
        engine,
        private=NORM,
        trains=lambda client: client.train(BODY | HEAD, EPOCHS),
        counts=lambda n: float(n > 0),
        personalizes=lambda client: client.train(BODY | HEAD, PERSONAL_EPOCHS, lr=0.1),
    )


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_with_nothing_private_it_is_the_plain_mean_of_models(engine: Engine) -> None:
    """FedAvg without its weights, which is Reptile with epochs and an outer step of 1."""
    assert_same_run(FedBN(private=(), local=LOCAL), Reptile(local=LOCAL), engine, sizes=(23, 9, 12, 7, 1, 16))


def test_a_model_without_normalization_is_refused_with_one_that_has_it() -> None:
    task = build("mlp", (64,), 10)
    with pytest.raises(ApieceError, match=r'no normalization layers.*--model "mlp\(norm=True\)"'):
        FedBN().init(task, task.init(0), 0)
    task = build("mlp(norm=True)", (64,), 10)
    shared = FedBN().init(task, task.init(0), 0).params
    assert set(shared) == {"hidden1.weight", "hidden1.bias", "head.weight", "head.bias"}


def test_layers_without_scale_and_shift_leave_nothing_to_keep() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3))

    with pytest.raises(ApieceError, match="no normalization layers"):
        federation(FedBN(), ENGINES[0], (3, 4), 2, plain)
