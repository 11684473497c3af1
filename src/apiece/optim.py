"""Optimizers as pairs of pure functions, for clients and for the server.

optimizer = sgd(0.1, momentum=0.9)
state = optimizer.init(params)
params, state = optimizer.update(gradient, state, params)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apiece.errors import ApieceError, unknown
from apiece.params import Params
from apiece.tree import Tree

# Inside the square root, so that its derivative is finite where a second moment is zero.
_TINY = 1e-24


class Optimizer(NamedTuple):
    init: Callable[[Params], Tree]
    update: Callable[[Params, Any, Params], tuple[Params, Any]]


class Moments(NamedTuple):
    first: Params
    second: Params
    steps: Tensor


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """v ← momentum·v + g + weight_decay·w;  w ← w − lr·v."""

    def init(params: Params) -> Tree:
        return params.zeros() if momentum else ()

    def update(gradient: Params, velocity: Tree, params: Params) -> tuple[Params, Tree]:
        if weight_decay:
            gradient = gradient + weight_decay * params
        if momentum:
            velocity = gradient = momentum * velocity + gradient
        return params.map(lambda w, v: torch.sub(w, v, alpha=lr), gradient), velocity

    return Optimizer(init, update)


def _unbias(b: float, count: Tensor) -> Tensor:
    """1 − b^count by expm1: in float32 the plain difference loses four digits where b is near 1."""
    return -torch.expm1(count * (math.log(b) if b else -math.inf))


def _moments(
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    second: Callable[[Tensor, Tensor], Tensor],
    corrected: bool,
) -> Optimizer:
    """w ← w − lr·m̂ / (√v̂ + eps), with `second(v, g²)` the rule of the second moment."""

    def init(params: Params) -> Moments:
        count = torch.zeros((), device=next(iter(params.values())).device)
        return Moments(params.zeros(), params.zeros(), count)

    def update(gradient: Params, state: Moments, params: Params) -> tuple[Params, Moments]:
        if weight_decay:
            gradient = gradient + weight_decay * params
        count = state.steps + 1
        m = b1 * state.first + (1 - b1) * gradient
        v = state.second.map(second, gradient * gradient)
        m_hat, v_hat = (m / _unbias(b1, count), v / _unbias(b2, count)) if corrected else (m, v)
        step = m_hat / v_hat.map(lambda t: (t + _TINY).sqrt() + eps)
        return params - lr * step, Moments(m, v, count)

    return Optimizer(init, update)


def adam(
    lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Kingma and Ba 2015, with bias correction; v ← b2·v + (1 − b2)·g²."""
    return _moments(lr, b1, b2, eps, weight_decay, lambda v, g2: b2 * v + (1 - b2) * g2, True)


def yogi(
    lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-3, weight_decay: float = 0.0
) -> Optimizer:
    """Zaheer et al. 2018, without bias correction; v ← v − (1 − b2)·g²·sign(v − g²)."""
    return _moments(
        lr, b1, b2, eps, weight_decay, lambda v, g2: v - (1 - b2) * g2 * torch.sign(v - g2), False
    )


def adagrad(lr: float, eps: float = 1e-10, weight_decay: float = 0.0) -> Optimizer:
    """Duchi et al. 2011; v ← v + g²."""
    return _moments(lr, 0.0, 0.0, eps, weight_decay, lambda v, g2: v + g2, False)


class Stepped(NamedTuple):
    """Params that an optimizer moves, with the optimizer's state: the server of many methods."""

    params: Params
    state: Tree


class Rule(NamedTuple):
    """An optimizer by name, with its numbers: `Rule("adam", lr=0.01).build()`."""

    optimizer: str = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def build(self) -> Optimizer:
        if self.optimizer == "sgd":
            return sgd(self.lr, self.momentum, self.weight_decay)
        if self.optimizer == "adam":
            return adam(self.lr, self.b1, self.b2, self.eps, self.weight_decay)
        if self.optimizer == "yogi":
            return yogi(self.lr, self.b1, self.b2, self.eps, self.weight_decay)
        if self.optimizer == "adagrad":
            return adagrad(self.lr, self.eps, self.weight_decay)
        raise unknown("optimizer", self.optimizer, ("sgd", "adam", "yogi", "adagrad"))

    def start(self, params: Params) -> Stepped:
        return Stepped(params, self.build().init(params))

    def step(self, at: Stepped, update: Params) -> Stepped:
        """One step along `update`, read as a negative gradient; sgd with lr 1 adds it."""
        return Stepped(*self.build().update(-update, at.state, at.params))


# Typed Any so that an unset field reads as a value of its type: it is one in every finished method.
INHERIT: Any = None


class Recipe(NamedTuple):
    """How to train. What is not set is inherited: `personal` from `local`, `local` from the defaults.

    batch_size 0 is the whole shard in one batch; steps > 0 replaces epochs: that many batches
    whatever the client's size.
    """

    optimizer: str = INHERIT
    lr: float = INHERIT
    momentum: float = INHERIT
    weight_decay: float = INHERIT
    b1: float = INHERIT
    b2: float = INHERIT
    eps: float = INHERIT
    batch_size: int = INHERIT
    epochs: int = INHERIT
    steps: int = INHERIT

    def over(self, base: Recipe) -> Recipe:
        """This recipe where it is set, `base` elsewhere. Setting epochs alone drops inherited steps."""
        mine = self._replace(steps=0) if self.epochs is not INHERIT and self.steps is INHERIT else self
        values: list[Any] = [b if a is INHERIT else a for a, b in zip(mine, base, strict=True)]
        return Recipe(*values)

    @property
    def rule(self) -> Rule:
        values: dict[str, Any] = {name: getattr(self, name) for name in Rule._fields}
        return Rule(**values)

    def checked(self, name: str) -> Recipe:
        """This recipe if it can be followed; `name` says whose it is."""
        self.rule.build()
        for field in ("lr", "batch_size", "epochs", "steps"):
            if getattr(self, field) < 0:
                raise ApieceError(f"{name}.{field} must not be negative, got {getattr(self, field)}")
        return self


DEFAULT = Recipe(**Rule(lr=0.1)._asdict(), batch_size=10, epochs=1, steps=0)
