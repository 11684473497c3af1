"""Apiece: personalized federated learning that ends with a good model apiece."""

from apiece.check import check_method
from apiece.data.own import from_arrays
from apiece.deploy import load
from apiece.errors import ApieceError
from apiece.experiment import Experiment
from apiece.local import grad, loop, sgd
from apiece.method import MEAN, STACK, Method, Model, Reply, Round, Wrapper
from apiece.optim import Recipe, Rule, Stepped
from apiece.params import Params
from apiece.session import resume, run
from apiece.shard import Batch, Shard
from apiece.spec import spec
from apiece.task import Dropout, Task

__version__ = "0.1.0"

__all__ = [
    "MEAN",
    "STACK",
    "ApieceError",
    "Batch",
    "Dropout",
    "Experiment",
    "Method",
    "Model",
    "Params",
    "Recipe",
    "Reply",
    "Round",
    "Rule",
    "Shard",
    "Stepped",
    "Task",
    "Wrapper",
    "check_method",
    "from_arrays",
    "grad",
    "load",
    "loop",
    "resume",
    "run",
    "sgd",
    "spec",
]
