import sys
from pathlib import Path

import pytest

from apiece import Method, catalog, check_method
from apiece.check import Finding, NonConformingError, examine
from apiece.methods.fedavg import FedAvg
from tests import broken
from tests.command import SIZES, apiece

BROKEN = [
    (broken.HandWrittenLoop(), "engines agree"),
    (broken.CounterOutsideTheCarry(), "engines agree"),
    (broken.MutatedBroadcast(), "arguments stay unchanged"),
    (broken.GrowingState(), "client state keeps its shape"),
    (broken.DividesByTheSize(), "runs"),
    (broken.FieldWithoutType(), "static fields"),
    (broken.FloatInBroadcast(), "static fields"),
    (broken.RoundIndexInBroadcast(), "static fields"),
    (broken.FlatDropoutCounter(), "engines agree"),
    (broken.ReadsTheProxy(), "runs"),
    (broken.SameKeyEveryRound(), "rounds draw afresh"),
    (broken.DroppedExampleWeight(), "engines agree"),
    (broken.DroppedReplyWeight(FedAvg()), "wrappers keep the inner reply"),
    (broken.ForgetsInnerState(FedAvg()), "wrappers keep the inner reply"),
    (broken.HiddenState(), "deterministic"),
    (broken.BranchesOnATensor(), "runs"),
    (broken.RepliesWithParams(), "runs"),
]


@pytest.mark.parametrize(("method", "rule"), BROKEN, ids=[type(method).__name__ for method, _ in BROKEN])
def test_each_broken_method_is_refused_for_its_own_fault(method: Method, rule: str) -> None:
    found = {finding.rule: finding for finding in examine(method)}
    assert not found[rule].ok, f"{rule} passed"
    assert found[rule].detail
    with pytest.raises(NonConformingError, match=rule):
        check_method(method)


def test_a_client_that_reads_the_proxy_is_told_so() -> None:
    found = {finding.rule: finding.detail for finding in examine(broken.ReadsTheProxy())}
    assert "task.proxy or task.prior" in found["runs"]


def test_a_field_without_a_type_is_told_with_the_type_to_write() -> None:
    told = "step has no type, so it is no setting: write step: float, of a constant ClassVar[float]"
    assert [f for f in examine(broken.FieldWithoutType()) if not f.ok] == [("static fields", False, told)]


@pytest.mark.parametrize(
    "method",
    [broken.DroppedReplyWeight(FedAvg()), broken.ForgetsInnerState(FedAvg())],
    ids=["weight", "state"],
)
def test_a_faulty_wrapper_breaks_only_its_own_rule(method: Method) -> None:
    """The inner method is sound: whatever else fails would be a false alarm."""
    assert [f.rule for f in examine(method) if not f.ok] == ["wrappers keep the inner reply"]


# What a newcomer gets wrong first; the mistakes stand in lines 14 and 15 of the file

FILE = """from dataclasses import dataclass
from apiece import Method, Model, Recipe, Reply, loop, sgd


@dataclass(frozen=True)
class W(Method):
    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init(self, task, params, key):
        return Model(params)

    def client_update(self, task, broadcast, client, data):
        {first}
        {second}

    def broadcast(self, server, round):
        return server

    def server_update(self, task, server, update, round):
        return Model(server.params + update)

    def personalize(self, task, broadcast, client, data):
        {personal}
"""
TRAINED = "w = sgd(task.objective, broadcast.params, data, self.local)"
SENT = "return Reply(w - broadcast.params, weight=data.size)"
BY_VALUE = (
    "method {}: a Python `if`, float() or .item() on a tensor: it differs by client; "
    "use tree.where, or keep it a tensor (my_method.py:{} in client_update)"
)
NO_REPLY = "method W: client_update must return a Reply, not {}"
MISTAKES = {
    "if": (TRAINED, f"if w.sqnorm() > 1.0: w = 0.5 * w; {SENT}", BY_VALUE.format("W", 15)),
    "item": ("n = data.size.item()", "return Reply(broadcast.params, weight=n)", BY_VALUE.format("W", 14)),
    "float": (TRAINED, SENT.replace("data.size", "float(data.size)"), BY_VALUE.format("W", 15)),
    "params": (TRAINED, "return w - broadcast.params", NO_REPLY.format("Params")),
    "tuple": (TRAINED, "return w, data.size", NO_REPLY.format("tuple")),
    "nothing": (TRAINED, "", NO_REPLY.format("None")),
    "state": (
        TRAINED,
        "return Reply(w - broadcast.params, {'n': data.size})",
        "method W: a client's state keeps its form: init_client makes (), the state in client_update's Reply "
        "is a dict of n",
    ),
}
RECIPE = "w = loop(lambda w, b: w, broadcast.params, data.batches(self.local))"
NOT_A_NUMBER = (
    "TypeError: '<' not supported between instances of 'int' and 'Recipe' (my_method.py:14 in client_update; "
    "while the shape of W's reply was worked out on fake tensors)"
)


STAYS = "return broadcast.params"
DIVIDED = "return Reply({} * (w - broadcast.params), weight=data.size)"
LOST = f"{STAYS} * float('nan')"
ALL = "0, 1, 4, 9, 14, 17, 21, 25"
# client_update's last line, personalize's, what is told and of whom; of the eight six take part in round 0
NOT_FINITE = {
    "update": (DIVIDED.format("(1.0 / data.size)"), STAYS, "the update", "0"),
    "root": (DIVIDED.format("(data.size - 9.0).sqrt()"), STAYS, "the update", "0, 4"),
    "every update": (DIVIDED.format("float('nan')"), STAYS, "the update", "0, 4, 9, 14, 21, 25"),
    "weight": (SENT.replace("=data.size", "=1.0 / data.size"), STAYS, "the weight", "0"),
    "model": (SENT, f"{STAYS} * (1.0 / data.size)", "the model that personalize returns", "0"),
    "every model": (SENT, LOST, "the model that personalize returns", ALL),
    "initial": (
        SENT,
        f"{STAYS}\n\n    def initial(self, task, broadcast, client): {LOST}",
        "the model that initial returns",
        ALL,
    ),
}
REMEDY = "guard divisions by data.size; eps goes inside square roots"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "my_method.py"


def written(path: Path, first: str, second: str, personal: str = "return broadcast.params") -> str:
    path.write_text(FILE.format(first=first, second=second, personal=personal))
    return f"{path}:W"


def refused(expression: str) -> list[Finding]:
    return [finding for finding in examine(catalog.build(expression, {})) if not finding.ok]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_common_mistake_is_told_once_with_its_remedy(mistake: str, file: Path) -> None:
    first, second, told = MISTAKES[mistake]
    assert refused(written(file, first, second)) == [("runs", False, told)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_tells_a_common_mistake_without_a_traceback(mistake: str, file: Path) -> None:
    first, second, told = MISTAKES[mistake]
    method = written(file, first, second)
    outcome = apiece("run", *SIZES, "--rounds", "1", "--method", method, "--out", str(file.parent / "run"))
    assert outcome == (2, "", f"error: {told}\n")


def test_an_error_in_a_method_is_told_once_with_its_line(file: Path) -> None:
    """`data.batches` is a generator: it raises below `loop`, whose line is the method's deepest."""
    assert refused(written(file, RECIPE, SENT)) == [("runs", False, NOT_A_NUMBER)]


@pytest.mark.parametrize("mistake", NOT_FINITE)
def test_what_is_not_finite_is_told_with_whose_it_is(mistake: str, file: Path) -> None:
    """The engines leave such replies out, so states alone do not show it."""
    second, personal, what, sizes = NOT_FINITE[mistake]
    told = f"{what} is NaN or infinite where data.size is {sizes}: {REMEDY}"
    assert refused(written(file, TRAINED, second, personal)) == [("runs", False, told)]


def test_of_a_refused_reply_the_state_is_told() -> None:
    found = {finding.rule: finding.detail for finding in examine(broken.DividesByTheSize())}
    told = "the state in client_update's Reply is NaN or infinite where data.size is 0"
    assert found == {"client state keeps its shape": "", "runs": f"{told}: {REMEDY}"}


def test_a_state_rule_that_cannot_be_examined_is_left_out_if_the_method_does_not_run(file: Path) -> None:
    expression = written(file, "raise KeyError('a')", "")
    note = "while the shape of W's reply was worked out on fake tensors"
    assert examine(catalog.build(expression, {})) == [
        ("runs", False, f"KeyError: 'a' (my_method.py:14 in client_update; {note})")
    ]


def test_the_line_is_told_whichever_rule_meets_the_error(file: Path) -> None:
    """`if` in personalize fails under the vectorized engine alone: line 24 of the file."""
    found = refused(written(file, TRAINED, SENT, "return broadcast.params * (2 if data.size > 3 else 1)"))
    assert [finding.rule for finding in found] == ["engines agree"]
    assert "(my_method.py:24 in personalize; in personalize of W, clients [" in found[0].detail


def test_in_a_wrapper_the_line_is_the_inner_methods(file: Path) -> None:
    first, second, _ = MISTAKES["if"]
    told = BY_VALUE.format("Elastic", 15)
    assert refused(f"elastic({written(file, first, second)})") == [("runs", False, told)]


NET = """from torch import nn
{imported}

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        {forward}
"""
HELPER = """def scaled(h):
    return 2 * h if h.sum() > 0 else h
"""
FORWARDS = {
    "own": ("", "h = self.head(x.flatten(1)); return 2 * h if h.sum() > 0 else h", "net.py:10 in forward"),
    "helper's": (
        "from helping_net import scaled",
        "return scaled(self.head(x.flatten(1)))",
        "helping_net.py:2 in scaled",
    ),
}


@pytest.mark.parametrize("whose", FORWARDS)
def test_an_if_in_the_model_is_told_of_the_model(whose: str, file: Path) -> None:
    imported, forward, where = FORWARDS[whose]
    (file.parent / "helping_net.py").write_text(HELPER)
    net = file.parent / "net.py"
    net.write_text(NET.format(imported=imported, forward=forward))
    run = ("run", *SIZES, "--engine", "sequential", "--rounds", "1", "--out", str(file.parent / "run"))
    outcome = apiece(*run, "--model", f"{net}:Net")
    told = BY_VALUE.replace("tree.", "torch.").replace("method {}", "model Net").split(" (")[0]
    assert outcome == (2, "", f"error: {told} ({where})\n")


def test_a_shape_that_a_model_refuses_is_told_with_the_methods_line(file: Path) -> None:
    """None of the frames below is anybody's own: the model's are PyTorch's."""
    wrong = "task.predict(broadcast.params, data.all().x[:, :1])"
    (finding,) = refused(written(file, wrong, SENT))
    assert "(my_method.py:14 in client_update; " in finding.detail


def test_a_run_tells_the_lines_of_the_file(file: Path) -> None:
    method = written(file, RECIPE, SENT)
    outcome = apiece("run", *SIZES, "--rounds", "1", "--method", method, "--out", str(file.parent / "run"))
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    told = outcome.err.splitlines()
    assert told[0].startswith("error: TypeError: '<' not supported")
    assert f"  my_method.py:14 in client_update: {RECIPE}" in told
    assert told[-1] == "  For the whole traceback: APIECE_TRACEBACK=1"


def test_the_whole_traceback_may_be_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APIECE_TRACEBACK", "1")
    method = written(file, RECIPE, SENT)
    with pytest.raises(TypeError, match="not supported"):
        apiece("run", *SIZES, "--rounds", "1", "--method", method, "--out", str(file.parent / "run"))
