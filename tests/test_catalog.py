from pathlib import Path

import pytest

from apiece import ApieceError, Method, Recipe, Rule
from apiece.catalog import build, describe, lookup, settings_of
from apiece.importing import anchored
from apiece.methods.fedavg import FedAvg
from apiece.wrappers.elastic import Elastic

OWN = '''
from dataclasses import dataclass
from apiece import Method, Model, Recipe, Reply, sgd

@dataclass(frozen=True)
class Mine(Method):
    """FedAvg without weights, and a step size that must be given."""
    step: float
    local: Recipe = Recipe(epochs=1)
    personal: Recipe = Recipe()

    def __post_init__(self):
        super().__post_init__()
        if self.step <= 0:
            raise ValueError(f"step must be positive, got {self.step}")

    def init(self, task, params, key):
        return Model(params)

    def broadcast(self, server, round):
        return server

    def client_update(self, task, broadcast, client, data):
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, model=w)

    def server_update(self, task, server, update, round):
        return Model(server.params + self.step * update)

    def personalize(self, task, broadcast, client, data):
        return sgd(task.objective, broadcast.params, data, self.personal)

class NoDataclass(Method):
    pass
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "own.py"


def test_a_name_a_wrapper_and_a_wrapper_of_a_wrapper() -> None:
    assert isinstance(build("fedavg", {}), FedAvg)
    twice = build(
        " elastic( elastic(fedavg) ) ", {"alpha": 0.1, "inner": {"alpha": 0.2, "inner": {"lr": 0.3}}}
    )
    assert isinstance(twice, Elastic)
    assert isinstance(twice.inner, Elastic)
    assert (twice.alpha, twice.inner.alpha, twice.inner.inner.local.lr) == (0.1, 0.2, 0.3)


def test_lr_is_short_for_that_of_local_and_personal_inherits_it() -> None:
    method = build(
        "fedavg", {"lr": 0.03, "local": {"epochs": 2}, "personal": {"epochs": 7}, "outer": {"lr": 0.5}}
    )
    assert isinstance(method, FedAvg)
    assert (method.local.lr, method.local.epochs) == (0.03, 2)
    assert (method.personal.lr, method.personal.epochs) == (0.03, 7)
    assert method.outer.lr == 0.5


@pytest.mark.parametrize("expression", ["local", "fedavg", "reptile", "centralized", "elastic(reptile)"])
def test_settings_written_out_give_the_method_back(expression: str) -> None:
    method = build(expression, {})
    assert build(expression, settings_of(method)) == method


def test_a_method_of_ones_own(own: str) -> None:
    method = build(f"{own}:Mine", {"step": 2})
    assert isinstance(method, Method)
    assert method.step == 2.0  # type: ignore[attr-defined]
    assert build(f"elastic({own}:Mine)", {"inner": {"step": 0.5}}).inner.step == 0.5  # type: ignore[attr-defined]


def test_a_path_can_be_read_from_anywhere(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = anchored(f"elastic({own}:Mine)")
    assert spread == f"elastic({tmp_path.resolve()}/own.py:Mine)"
    assert anchored("elastic(fedavg)") == "elastic(fedavg)"
    assert anchored("mlp(hidden=(64, 32))") == "mlp(hidden=(64, 32))"
    assert anchored("package.module:name") == "package.module:name"
    monkeypatch.chdir("/")
    assert lookup(spread[len("elastic(") : -1]).__name__ == "Mine"


def test_a_folder_may_have_parentheses_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "copy (2)"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    assert build(f"elastic({folder}/own.py:Mine)", {"inner": {"step": 1}})


@pytest.mark.parametrize(
    ("expression", "settings", "message"),
    [
        ("fedavgg", {}, r"unknown method 'fedavgg': did you mean 'fedavg'\? known: .*reptile"),
        ("elastic", {}, r"elastic wraps another method: write elastic\(fedavg\)"),
        ("elastic()", {}, r"elastic wraps another method: write elastic\(fedavg\)"),
        ("elastic(fedavgg)", {}, r"unknown method 'fedavgg'"),
        ("fedavg(local)", {}, "fedavg is not a wrapper: write fedavg without parentheses"),
        ("elastic(fedavg", {}, r"parentheses are opened or closed too often"),
        ("", {}, "unknown method ''"),
        ("fedavg", {"lrr": 1.0}, r"unknown setting of fedavg 'lrr': did you mean 'lr'\?"),
        ("fedavg", {"local": {"lrr": 1.0}}, r"unknown setting of local 'lrr': did you mean 'lr'\?"),
        ("fedavg", {"local": 3}, "local is a table"),
        ("fedavg", {"optimizer": "adm"}, r"unknown optimizer 'adm': did you mean 'adam'\?"),
        ("fedavg", {"epochs": -1}, "local.epochs must not be negative, got -1"),
        ("fedavg", {"personal": {"batch_size": -1}}, "personal.batch_size must not be negative, got -1"),
        ("fedavg", {"lr": "high"}, "local.lr must be of type float, got 'high'"),
        ("elastic(fedavg)", {"lr": 0.1}, "lr is a setting of the method inside elastic: write inner.lr"),
        ("elastic(fedavg)", {"alfa": 0.1}, r"unknown setting of elastic 'alfa': did you mean 'alpha'\?"),
        ("elastic(fedavg)", {"inner": 3}, "inner is a table: set its entries, for example inner.lr"),
        ("own.py:Mine", {}, "own.py:Mine: .*missing 1 required positional argument: 'step'"),
        ("own.py:Mine", {"step": -1}, "own.py:Mine: step must be positive, got -1.0"),
        ("own.py:NoDataclass", {}, "it must be a frozen dataclass that subclasses apiece.Method"),
        ("own.py:Min", {}, "unknown method in own.py 'Min': did you mean 'Mine'"),
        ("nowhere.py:Mine", {}, "cannot import 'nowhere.py' for the method 'nowhere.py:Mine'"),
    ],
)
@pytest.mark.usefixtures("own")
def test_mistakes(expression: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ApieceError, match=message):
        build(expression, settings)


def test_a_variant_is_its_method_with_other_settings() -> None:
    assert build("fedavgm", {}) == FedAvg(outer=Rule("sgd", lr=1.0, momentum=0.9))
    assert build("fedavgm", {"outer": {"lr": 0.5}}) == FedAvg(outer=Rule("sgd", lr=0.5, momentum=0.9))
    assert build("fedsgd", {"lr": 0.3}) == FedAvg(local=Recipe(lr=0.3, batch_size=0, steps=1, epochs=5))


def test_a_variants_settings_can_be_taken_back() -> None:
    method = build("fedsgd", {"steps": 4, "outer": {"lr": 2.0}})
    assert build("fedsgd", settings_of(method)) == method
    assert build("elastic(fedsgd)", {"inner": {"lr": 0.3}}).inner == build("fedsgd", {"lr": 0.3})  # type: ignore[attr-defined]
    assert describe("fedavgm") == (
        "global",
        "Hsu et al. 2019",
        "FedAvg whose server steps with momentum.",
    )
