"""A step against w − r·∇ by plain autograd, whatever the objective makes of the weights."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap

from apiece import tree
from apiece.descent import SMALL_ALONE, Descent, Linear
from apiece.local import sgd
from apiece.optim import Recipe
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Rows, Shard

WIDE, CLIENTS, ROWS, RATE = 384, 3, 5, 0.3
assert WIDE * WIDE >= SMALL_ALONE


class Net(nn.Module):
    """`first` and `last` large and small, `twice` used twice, `idle` never."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.first, self.twice = linear(WIDE, WIDE), linear(WIDE, WIDE)
        self.last, self.idle = linear(WIDE, 2), linear(WIDE, WIDE)
        self.bare = linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.twice(torch.tanh(self.first(x))).relu())
        return self.bare(self.last(hidden))


torch.manual_seed(0)
NET = Net(nn.Linear)
START = Params({name: p.detach() for name, p in NET.named_parameters()})
X = torch.randn(CLIENTS, ROWS, WIDE)
SEQUENCES = torch.randn(CLIENTS, ROWS, 4, WIDE)

Objective = Callable[[nn.Module, Params, Tensor], Tensor]


def outputs(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    result: Tensor = functional_call(net, dict(w), (x,))
    return result


def plain(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    return outputs(net, w, x).square().mean()


def penalized(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    return plain(net, w, x) + 0.1 * (w["first.weight"] ** 3).sum() + 0.01 * w.sqnorm()


def read_elsewhere(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """The layer's weights in a product that is not the layer's."""
    return plain(net, w, x) + (x @ w["first.weight"]).tanh().mean()


def another_model(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """Two models of one step, the second of changed weights."""
    return plain(net, w, x) + plain(net, w.map(torch.sin), x)


def sensitive(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """A gradient inside the objective: by the inputs, of the same layers."""
    return torch.func.grad(lambda x: outputs(net, w, x).sum())(x).square().sum() + plain(net, w, x)


def changed_in_place(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """What a layer gives is written over before it is used."""
    hidden = functional_call(net.first, {"weight": w["first.weight"], "bias": w["first.bias"]}, (x,))  # type: ignore[arg-type]
    return hidden.relu_().square().mean()


def gated(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """By a layer that this is not to be a gradient of."""
    with torch.no_grad():
        gate = functional_call(net.twice, {"weight": w["twice.weight"], "bias": w["twice.bias"]}, (x,))  # type: ignore[arg-type]
    return (
        functional_call(net.first, {"weight": w["first.weight"], "bias": w["first.bias"]}, (x,)) * gate
    ).mean()  # type: ignore[arg-type]


def bias_elsewhere(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """Of one layer the weights alone are trained."""
    fixed = {"weight": w["first.weight"], "bias": START["first.bias"]}
    return functional_call(net.first, fixed, (x,)).square().mean()  # type: ignore[arg-type]


def steep(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """By plain autograd inside the objective: the second derivatives by the weights count."""
    loss = plain(net, w, x)
    (slope,) = torch.autograd.grad(loss, [w["first.bias"]], create_graph=True)
    return loss + slope.square().sum()


def steep_by_weights(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    loss = plain(net, w, x)
    slopes = torch.autograd.grad(loss, [w["first.weight"], w["last.weight"]], create_graph=True)
    return loss + sum((slope.square().sum() for slope in slopes), torch.zeros(()))


def steep_in_all(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """No slope is missing, for the weights are used elsewhere, too."""
    loss = plain(net, w, x) + 0.01 * w.sqnorm()
    slopes = torch.autograd.grad(loss, list(w.values()), create_graph=True)
    return loss + sum((slope.square().sum() for slope in slopes), torch.zeros(()))


def scaled_by_a_slope(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """The last layer's alone, which nothing else hangs on; where it is missing it counts as zero."""
    loss = functional_call(net.first, {n: w[f"first.{n}"] for n in ("weight", "bias")}, (x,)).square().mean()  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(loss, [w["first.weight"]], retain_graph=True, materialize_grads=True)
    return loss * slope.square().sum()


def hooked(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """The weights' gradient is changed when it is there."""
    w["first.weight"].register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return plain(net, w, x)


def tangent(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """A derivative forwards, by the inputs."""
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(outputs(net, w, forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert found is not None
        return found.square().mean()


def a_param_for_input(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """As learned tokens are; and the other way round, a param that an output's gradient is."""
    keys = functional_call(
        net.first, {"weight": w["first.weight"], "bias": w["first.bias"]}, (w["twice.weight"],)
    )
    last = functional_call(net.twice, {"weight": w["twice.weight"], "bias": w["twice.bias"]}, (x,))
    return ((x @ keys.mT).softmax(-1) @ keys).square().mean() + (last.sum(0) * w["twice.bias"]).mean()


def clipped(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """Gradients are changed on their way down, by more than a factor."""
    return _Clipped.apply(outputs(net, w, x)).square().mean()


class _Clipped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


OBJECTIVES = [
    plain,
    penalized,
    read_elsewhere,
    another_model,
    sensitive,
    changed_in_place,
    gated,
    bias_elsewhere,
    steep,
    steep_by_weights,
    steep_in_all,
    scaled_by_a_slope,
    hooked,
    tangent,
    a_param_for_input,
    clipped,
]


def descend(
    objective: Callable[[Params], Tensor], w: Params, rate: float, start: Params, live: Tensor | None = None
) -> Params:
    return Descent(rate, start).step(objective, w, live)


def by_autograd(objective: Objective, w: Params, x: Tensor) -> Params:
    leaves = w.map(lambda p: p.clone().requires_grad_())
    found = torch.autograd.grad(objective(NET, leaves, x), list(leaves.values()), allow_unused=True)
    return Params(
        {name: w[name] if g is None else w[name] - RATE * g for name, g in zip(w, found, strict=True)}
    )


def close(ours: Params, theirs: Params) -> None:
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.fixture
def net() -> nn.Module:
    return Net(Linear)


@pytest.mark.parametrize("x", [X, SEQUENCES], ids=["rows", "sequences"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_of_a_client_alone(objective: Objective, x: Tensor, net: nn.Module) -> None:
    before = START.map(torch.clone)
    with torch.no_grad():
        ours = descend(lambda w: objective(net, w, x[0]), before, RATE, before)
    close(ours, by_autograd(objective, START, x[0]))
    close(before, START)


@pytest.mark.parametrize("own", [False, True], ids=["shared start", "starts of their own"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_of_many_clients(objective: Objective, own: bool, net: nn.Module) -> None:
    starts = [START.map(lambda p, k=k: p * (1 + 0.1 * k * own)) for k in range(CLIENTS)]
    stacked = tree.stack(starts) if own else START

    def step(w: Params, x: Tensor) -> Params:
        return descend(lambda w: objective(net, w, x), w, RATE, w)

    with torch.no_grad():
        ours = vmap(step, in_dims=(0 if own else None, 0))(stacked, X)
    for k, start in enumerate(starts):
        close(tree.take(ours, k), by_autograd(objective, start, X[k]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_written_over(objective: Objective, net: nn.Module) -> None:
    """The same numbers where nobody else reads the params; and nothing but params is written over."""
    x = X.clone()

    def steps(x: Tensor) -> Params:
        w = descend(lambda w: objective(net, w, x), START, RATE, START)
        return descend(lambda w: objective(net, w, x), w, RATE / 10, START)

    def plainly(x: Tensor) -> Params:
        w = by_autograd(objective, START, x)
        return w + (by_autograd(objective, w, x) - w) / 10

    with torch.no_grad():
        together = vmap(steps)(x)
        alone = [steps(x[k]) for k in range(CLIENTS)]
    for k in range(CLIENTS):
        close(tree.take(together, k), plainly(X[k]))
        close(alone[k], plainly(X[k]))
    assert torch.equal(x, X)


def test_whoever_differentiates_a_step_gets_its_derivative(net: nn.Module) -> None:
    def after(w: Params) -> Tensor:
        return plain(net, descend(lambda w: plain(net, w, X[0]), w, RATE, w), X[1])

    def plainly(w: Params) -> Tensor:
        g = torch.autograd.grad(plain(NET, w, X[0]), list(w.values()), create_graph=True, allow_unused=True)
        moved = {n: p if d is None else p - RATE * d for (n, p), d in zip(w.items(), g, strict=True)}
        return plain(NET, Params(moved), X[1])

    leaves = START.map(lambda p: p.clone().requires_grad_())
    found = torch.autograd.grad(plainly(leaves), list(leaves.values()), allow_unused=True)
    expected = Params(
        {n: p.new_zeros(p.shape) if g is None else g for (n, p), g in zip(START.items(), found, strict=True)}
    )
    with torch.no_grad():
        close(torch.func.grad(after)(START), expected)


def test_an_objective_of_no_param_moves_nothing(net: nn.Module) -> None:
    with torch.no_grad():
        alone = descend(lambda w: X.sum(), START, RATE, START)
        together = vmap(lambda x: descend(lambda w: x.sum(), START, RATE, START), out_dims=None)(X)
    close(alone, START)
    close(together, START)


def test_a_gradient_inside_the_objective_of_a_client_alone(net: nn.Module) -> None:
    """By plain autograd, as force matching has it: its second derivatives by the weights count."""

    def steep(net: nn.Module, w: Params, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(outputs(net, w, x).sum(), x, create_graph=True)
        return slope.square().sum()

    with torch.no_grad():
        ours = descend(lambda w: steep(net, w, X[0]), START, RATE, START)
    close(ours, by_autograd(steep, START, X[0]))


def by_unused_too(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """A penalty on gradients, which need not all be there: as it is often written."""
    loss = outputs(net, w, x).square().mean()
    used = [p for name, p in w.items() if not name.startswith("idle")]
    slopes = torch.autograd.grad(loss, used, create_graph=True, allow_unused=True)
    return loss + torch.stack([slope.square().sum() for slope in slopes]).sum()


def by_what_is_left_in_grad(net: nn.Module, w: Params, x: Tensor) -> Tensor:
    """As `torch.autograd.backward` leaves it, which no mode is told of."""
    loss = outputs(net, w, x).square().mean() + 0.01 * w.sqnorm()
    torch.autograd.backward(loss, inputs=list(w.values()), create_graph=True)
    slopes = [p.grad for p in w.values()]
    return loss + torch.stack([slope.square().sum() for slope in slopes if slope is not None]).sum()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("objective", [by_unused_too, by_what_is_left_in_grad])
def test_penalties_on_gradients_of_a_client_alone(objective: Objective, net: nn.Module) -> None:
    with torch.no_grad():
        ours = descend(lambda w: objective(net, w, X[0]), START, RATE, START)
    close(ours, by_autograd(objective, START, X[0]))


@pytest.mark.parametrize("together", [False, True])
def test_an_input_written_over_before_its_gradient_is_taken_is_refused(
    together: bool, net: nn.Module
) -> None:
    """As PyTorch does: the gradient by the weights needs the input as it was."""

    def step(x: Tensor) -> Params:
        def objective(w: Params) -> Tensor:
            hidden = x * w["first.bias"].sum()
            out = functional_call(
                net.first, {"weight": w["first.weight"], "bias": w["first.bias"]}, (hidden,)
            )
            hidden += 1.0
            return (out * hidden).mean()

        return descend(objective, START, RATE, START)

    with torch.no_grad(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vmap(step)(X) if together else step(X[0])


def test_a_param_that_only_later_steps_use_is_not_written_over(net: nn.Module) -> None:
    before = START.map(torch.clone)

    def twice(w: Params) -> Tensor:
        w = w | START.split(("first", "last"))[0]
        return functional_call(
            net.twice, {"weight": w["twice.weight"], "bias": w["twice.bias"]}, (X[0],)
        ).mean()

    def idle(w: Params) -> Tensor:
        return functional_call(net.idle, {"weight": w["idle.weight"], "bias": w["idle.bias"]}, (X[0],)).mean()

    with torch.no_grad():
        w = START
        for objective in (twice, idle, idle):
            w = descend(objective, w, RATE, START)
    assert all(torch.equal(START[name], before[name]) for name in before)
    assert not torch.equal(w["idle.weight"], before["idle.weight"])


@pytest.mark.parametrize("where", ["loss", "inputs"])
@pytest.mark.parametrize("together", [False, True])
def test_a_batch_of_padding_goes_nowhere_even_if_nothing_in_it_is_finite(
    together: bool, where: str, net: nn.Module
) -> None:
    live = torch.tensor([True, False, True])

    def step(x: Tensor, live: Tensor) -> Params:
        def objective(w: Params) -> Tensor:
            fine = torch.where(live, 1.0, 0.0)
            return plain(net, w, x) / fine if where == "loss" else plain(net, w, x / fine)

        return descend(objective, START, RATE, START, live)

    with torch.no_grad():
        found = vmap(step)(X, live) if together else tree.stack([step(X[k], live[k]) for k in range(CLIENTS)])
    for k in range(CLIENTS):
        close(tree.take(found, k), by_autograd(plain, START, X[k]) if live[k] else START)


@pytest.mark.parametrize("together", [False, True])
def test_autocast(together: bool, net: nn.Module) -> None:
    """A model that computes its layers in bfloat16 is trained as by autograd."""

    def brief(net: nn.Module, w: Params, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return outputs(net, w, x).float().square().mean()

    def step(x: Tensor) -> Params:
        return descend(lambda w: brief(net, w, x), START, RATE, START)

    with torch.no_grad():
        found = vmap(step)(X) if together else tree.stack([step(X[k]) for k in range(CLIENTS)])
    for k in range(CLIENTS):
        for name, p in by_autograd(brief, START, X[k]).items():
            torch.testing.assert_close(tree.take(found, k)[name], p, rtol=0.02, atol=1e-3)


def test_an_objective_that_differentiates_does_so_in_later_steps(net: nn.Module) -> None:
    """It is watched in the first step alone."""
    descent = Descent(RATE, START)
    ours = theirs = START
    for x in X:
        with torch.no_grad():
            ours = descent.step(lambda w, x=x: steep_in_all(net, w, x), ours)  # type: ignore[misc]
        theirs = by_autograd(steep_in_all, theirs, x)
    close(ours, theirs)


@pytest.mark.parametrize("together", [False, True])
def test_complex_weights(together: bool) -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.complex64)

    layer, x = Linear(WIDE, WIDE, dtype=torch.complex64), drawn(CLIENTS, ROWS, WIDE)
    start = Params({"weight": drawn(WIDE, WIDE) / WIDE, "bias": drawn(WIDE)})

    def loss(w: Params, x: Tensor) -> Tensor:
        found: Tensor = functional_call(layer, dict(w), (x,))
        return found.abs().square().mean()

    def step(x: Tensor) -> Params:
        return descend(lambda w: loss(w, x), start, RATE, start)

    with torch.no_grad():
        found = vmap(step)(x) if together else tree.stack([step(each) for each in x])
    for k in range(CLIENTS):
        leaves = start.map(lambda p: p.clone().requires_grad_())
        slopes = torch.autograd.grad(loss(leaves, x[k]), list(leaves.values()))
        for (name, p), slope in zip(start.items(), slopes, strict=True):
            torch.testing.assert_close(tree.take(found, k)[name], p - RATE * slope)


def test_the_params_that_training_starts_from_stay() -> None:
    """Later steps write over what the first one made, and nothing else."""
    x, y = torch.randn(7, WIDE), torch.zeros(7, dtype=torch.long)
    w = Params({"weight": torch.randn(WIDE, WIDE), "bias": torch.randn(WIDE)})
    layer, before = Linear(WIDE, WIDE), w.map(torch.clone)
    key = as_key(1)
    shard = Shard(x, y, Rows(torch.arange(7), torch.tensor(7), key, key), True)
    with torch.no_grad():
        sgd(
            lambda w, batch: F.mse_loss(functional_call(layer, dict(w), (batch.x,)), batch.x),
            w,
            shard,
            Recipe("sgd", 0.1, 0.0, 0.0, 0.9, 0.999, 1e-8, 2, 3, 0),
        )
    assert all(torch.equal(w[name], before[name]) for name in w)


@pytest.mark.parametrize("together", [False, True])
def test_nothing_of_a_step_outlives_it(together: bool, net: nn.Module) -> None:
    """A cycle of references would keep every step's memory until Python happens to look for cycles."""
    left: list[weakref.ref[Tensor]] = []

    def step(x: Tensor) -> Params:
        def objective(w: Params) -> Tensor:
            hidden = x + 1.0
            left.append(weakref.ref(hidden))
            return plain(net, w, hidden)

        return descend(objective, START, RATE, START)

    gc.disable()
    try:
        with torch.no_grad():
            vmap(step)(X) if together else step(X[0])
        assert left
        assert all(ref() is None for ref in left)
    finally:
        gc.enable()
