import pytest

from apiece import Method, check_method
from apiece.check import NonConformingError, examine
from apiece.methods.fedavg import FedAvg
from tests import broken

BROKEN = [
    (broken.HandWrittenLoop(), "engines agree"),
    (broken.CounterOutsideTheCarry(), "engines agree"),
    (broken.MutatedBroadcast(), "arguments stay unchanged"),
    (broken.GrowingState(), "client state keeps its shape"),
    (broken.FloatInBroadcast(), "static fields"),
    (broken.RoundIndexInBroadcast(), "static fields"),
    (broken.FlatDropoutCounter(), "engines agree"),
    (broken.ReadsTheProxy(), "runs"),
    (broken.SameKeyEveryRound(), "rounds draw afresh"),
    (broken.DroppedExampleWeight(), "engines agree"),
    (broken.DroppedReplyWeight(FedAvg()), "wrappers keep the inner reply"),
    (broken.ForgetsInnerState(FedAvg()), "wrappers keep the inner reply"),
    (broken.HiddenState(), "deterministic"),
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


@pytest.mark.parametrize(
    "method",
    [broken.DroppedReplyWeight(FedAvg()), broken.ForgetsInnerState(FedAvg())],
    ids=["weight", "state"],
)
def test_a_faulty_wrapper_breaks_only_its_own_rule(method: Method) -> None:
    """The inner method is sound: whatever else fails would be a false alarm."""
    assert [f.rule for f in examine(method) if not f.ok] == ["wrappers keep the inner reply"]
