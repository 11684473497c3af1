import numpy as np
import pytest

from apiece import Experiment, Recipe, run
from apiece.adaptation import curves, with_personal_epochs
from apiece.methods.fedavg import FedAvg
from apiece.methods.reptile import Reptile
from apiece.session import Result
from apiece.wrappers.elastic import Elastic


@pytest.fixture(scope="module")
def result() -> Result:
    return run(Experiment(rounds=4, clients=15, cohort=5, evaluate_every=4, engine="vectorized", threads=1))


def test_the_curves_pass_through_what_the_run_measured(result: Result) -> None:
    """No epoch is the initial score; the method's five epochs, and all examples, are the personalized one."""
    points = {
        (p.along, p.amount): p
        for p in curves(result.session, result.server, 4, epochs=(0, 5), examples=(1, 9999))
    }
    unseen = result.summary["unseen"]
    assert points["epochs", 0].mean == pytest.approx(unseen["initial"])
    assert points["epochs", 5].mean == pytest.approx(unseen["personalized"])
    assert points["epochs", 5].worst10 == pytest.approx(unseen["personalized_worst10"])
    assert points["examples", 9999].mean == pytest.approx(unseen["personalized"])
    assert points["examples", 1].mean != pytest.approx(unseen["personalized"])
    assert all(p.clients == 3 for p in points.values())


def test_only_some_of_a_clients_own_examples_are_used(result: Result) -> None:
    from apiece.adaptation import _few

    data = result.session.federation.data
    few = _few(data, 7, key=3)
    for client in range(data.population):
        assert set(few.train[client]) <= set(data.train[client])
        assert len(few.train[client]) == min(7, len(data.train[client]))
    assert few.test is data.test
    assert any(few.train[c].tolist() != data.train[c][:7].tolist() for c in range(data.population))
    assert np.array_equal(_few(data, 7, key=3).train.rows, few.train.rows)


def test_wrapped_methods_and_steps_are_reached() -> None:
    method = with_personal_epochs(Elastic(Reptile(local=Recipe(steps=9))), 3)
    assert (method.personal.epochs, method.personal.steps) == (3, 0)
    assert method.local.steps == 9
    assert with_personal_epochs(FedAvg(), 2).personal.epochs == 2
