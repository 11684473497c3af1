import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from apiece import optim
from apiece.errors import ApieceError
from apiece.optim import DEFAULT, Recipe, Rule, Stepped
from apiece.params import Params

STEPS = 5

# name, the rule, PyTorch's own
TABLE = [
    ("sgd", Rule("sgd", lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    ("momentum", Rule("sgd", lr=0.3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
    (
        "decayed momentum",
        Rule("sgd", lr=0.3, momentum=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5, weight_decay=0.1),
    ),
    ("decay", Rule("sgd", lr=0.3, weight_decay=0.2), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.2)),
    ("adam", Rule("adam", lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    (
        "adam of other numbers",
        Rule("adam", lr=0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    (
        "adam without momentum",
        Rule("adam", lr=0.1, b1=0.0),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.999)),
    ),
    ("adagrad", Rule("adagrad", lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-8)),
    (
        "adagrad with decay",
        Rule("adagrad", lr=0.2, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-3, weight_decay=0.1),
    ),
]
RULES = [rule for _, rule, _ in TABLE] + [Rule("yogi", lr=0.1, eps=1e-3)]


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(rule, start, gradients):
    optimizer = rule.build()
    params = Params({"w": start})
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = optimizer.update(Params({"w": gradient}), state, params)
    return params["w"]


@pytest.mark.parametrize(("rule", "reference"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_five_steps_are_pytorchs(rule, reference):
    start, gradients = numbers(7), numbers(STEPS, 7, seed=1)
    parameter = torch.nn.Parameter(start.clone())
    theirs = reference([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        theirs.step()
    torch.testing.assert_close(run(rule, start, gradients), parameter.detach(), rtol=0, atol=1e-7)


def test_adam_in_float32_is_as_exact():
    """1 − b2^t must not be a difference of float32 numbers near 1: that is off by 3e-5 at the first step."""
    gradient = torch.tensor([1.0, -0.02, 3.0])
    moved = run(Rule("adam", lr=1.0), torch.zeros(3), [gradient])
    torch.testing.assert_close(moved, torch.tensor([-1.0, 1.0, -1.0]), rtol=0, atol=1e-6)


def test_yogi_is_its_papers_loop():
    """Zaheer et al. 2018, Algorithm 2, number by number, without bias correction."""
    lr, b1, b2, eps = 0.1, 0.9, 0.99, 1e-3
    start, gradients = numbers(7), numbers(STEPS, 7, seed=1)
    w = start.numpy().copy()
    m, v = np.zeros(7), np.zeros(7)
    for g in gradients.numpy():
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * np.sign(v - g**2) * g**2
        w = w - lr * m / (np.sqrt(v) + eps)
    got = run(Rule("yogi", lr=lr, b1=b1, b2=b2, eps=eps), start, gradients)
    np.testing.assert_allclose(got.numpy(), w, rtol=0, atol=1e-9)


def test_yogis_second_moment_falls_slowly():
    """v = 1, g = 0.5: Adam's v falls by (1 − b2)·(v − g²) = 0.075 and Yogi's by (1 − b2)·g² = 0.025."""
    params = Params({"w": torch.zeros(1)})
    gradient = Params({"w": torch.tensor([0.5])})
    before = optim.Moments(params, Params({"w": torch.ones(1)}), torch.ones(()))
    _, adam = optim.adam(0.1, b2=0.9).update(gradient, before, params)
    _, yogi = optim.yogi(0.1, b2=0.9).update(gradient, before, params)
    assert adam.second["w"].item() == pytest.approx(1 - 0.075)
    assert yogi.second["w"].item() == pytest.approx(1 - 0.025)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_clients_side_by_side_are_clients_one_by_one(rule):
    starts, gradients = numbers(3, 7), numbers(3, STEPS, 7, seed=1)
    together = vmap(lambda start, g: run(rule, start, g.unbind(0)))(starts, gradients)
    for i in range(3):
        torch.testing.assert_close(together[i], run(rule, starts[i], gradients[i]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_derivative_through_a_step_is_finite_at_a_zero_gradient(rule, dtype):
    """Meta-learning differentiates training; √v̂ has no derivative at v̂ = 0."""

    def after(g):
        return run(rule, torch.ones(2, dtype=dtype), [g, g]).sum()

    assert grad(after)(torch.zeros(2, dtype=dtype)).isfinite().all()
    assert after(torch.zeros(2, dtype=dtype)).isfinite()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_step_keeps_the_states_structure_and_types(rule):
    """`loop` chooses between the state before and after a step, leaf by leaf."""
    params = Params({"w": torch.ones(2), "b": torch.ones(())})
    optimizer = rule.build()
    before = optimizer.init(params)
    moved, after = optimizer.update(params, before, params)
    leaves = [torch.utils._pytree.tree_leaves(state) for state in ((params, before), (moved, after))]
    described = [[(leaf.shape, leaf.dtype) for leaf in row] for row in leaves]
    assert described[0] == described[1]


# Rule and Recipe


def test_sgd_with_lr_1_adds_the_update():
    rule = Rule("sgd", lr=1.0)
    at = rule.start(Params({"w": torch.tensor([1.0, 2.0])}))
    assert at.state == ()
    at = rule.step(at, Params({"w": torch.tensor([0.5, -4.0])}))
    assert isinstance(at, Stepped)
    assert at.params["w"].tolist() == [1.5, -2.0]


def test_a_rules_steps_carry_its_state():
    """Momentum 0.5 along updates 1, 1: velocities 1 and 1.5, so 0 → 1 → 2.5."""
    rule = Rule("sgd", lr=1.0, momentum=0.5)
    at = rule.start(Params({"w": torch.zeros(1)}))
    for expected in (1.0, 2.5):
        at = rule.step(at, Params({"w": torch.ones(1)}))
        assert at.params["w"].item() == expected


def test_an_unknown_optimizer_is_named_with_the_known_ones():
    with pytest.raises(ApieceError, match=r"'adan'.*did you mean 'adam'.*sgd"):
        Rule("adan").build()


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ({}, {"lr": 0.5, "steps": 7, "epochs": 2}, {"lr": 0.5, "steps": 7, "epochs": 2}),
        ({"lr": 0.01}, {"lr": 0.5, "momentum": 0.9}, {"lr": 0.01, "momentum": 0.9}),
        ({"lr": 0.0, "momentum": 0.0}, {"lr": 0.5, "momentum": 0.9}, {"lr": 0.0, "momentum": 0.0}),
        ({"epochs": 3}, {"steps": 7, "epochs": 1}, {"steps": 0, "epochs": 3}),
        ({"epochs": 3, "steps": 4}, {"steps": 7}, {"steps": 4, "epochs": 3}),
        ({"steps": 4}, {"epochs": 9, "steps": 0}, {"steps": 4, "epochs": 9}),
        ({"batch_size": 0}, {"batch_size": 32}, {"batch_size": 0}),
        ({"optimizer": "adam"}, {"optimizer": "sgd", "eps": 1e-3}, {"optimizer": "adam", "eps": 1e-3}),
    ],
)
def test_a_recipe_inherits_what_it_does_not_set(own, base, expected):
    full = Recipe(**own).over(Recipe(**base).over(DEFAULT))
    assert full._asdict() == {**DEFAULT._asdict(), **base, **expected}
    assert None not in full


def test_a_recipes_rule_has_its_numbers():
    recipe = Recipe("yogi", 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, batch_size=8).over(DEFAULT)
    assert recipe.rule == Rule("yogi", 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert Recipe().over(DEFAULT).rule == Rule("sgd", lr=0.1)


@pytest.mark.parametrize("field", ["batch_size", "epochs", "steps"])
def test_a_recipe_of_negative_length_is_refused(field):
    with pytest.raises(ApieceError, match=f"personal.{field} must not be negative"):
        Recipe(**{field: -1}).over(DEFAULT).checked("personal")
