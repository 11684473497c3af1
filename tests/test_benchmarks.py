"""The benchmark of rounds still works, and its rows do the same work. No time is asserted."""

from __future__ import annotations

import importlib.util
import io
import json
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
from benchmarks import peers, rounds
from benchmarks.peers import SHAPE, Work, plain

from apiece import models
from tests.worlds import CPU

ROOT = Path(__file__).parents[1]
PAGE = "docs/performance.md"
MODELS = ("tff_cnn", "lenet")  # of the small version: the others take as long again
PACKAGES = {"pfl-research": ("pfl",), "Flower simulation": ("flwr", "ray")}


def command(*words: str) -> str:
    """What `python -m benchmarks.rounds` prints."""
    with redirect_stdout(io.StringIO()) as printed:
        rounds.main(list(words))
    return printed.getvalue()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(the file that the small version leaves, what it prints), without peers that are installed."""
    columns = (*MODELS, "power-law")
    file = tmp_path_factory.mktemp("benchmarks") / "rounds.json"
    absent = [name for name in rounds.PEERS if not installed(rounds.PEERS[name][2])]
    flags = ("--small", "--profile", "--with", ",".join(absent), "--json", str(file))
    return file, command(*flags, "--models", *columns)


def installed(peer: str) -> bool:
    return all(importlib.util.find_spec(package) for package in PACKAGES[peer])


def test_the_small_version_measures_every_row(small: tuple[Path, str]) -> None:
    file, printed = small
    facts = json.loads(file.read_text())
    assert list(facts["columns"]) == [*MODELS, "power-law"]
    for name, column in facts["columns"].items():
        needed = {"plain PyTorch", "ours"}
        if name in MODELS:
            needed |= {"ours, sequential", "ours, vectorized", "ours, ragged clients"}
            assert column["profile"][0]["ms"] > 0
        measured = {row: figures for row, figures in column["rows"].items() if "ms" in figures}
        assert needed <= set(measured)
        for figures in measured.values():
            assert figures["ms"] == median(figures["blocks_ms"]) > 0
            assert figures["moved"] > 0
        ours, loop = (column["rows"][row]["ms"] for row in ("ours", "plain PyTorch"))
        assert column["ratios"]["plain PyTorch / ours"] == loop / ours
    assert {"cpu", "cores", "gpu"} <= set(facts["machine"])
    assert facts["versions"]["torch"] == torch.__version__
    assert "| ms per round | tff_cnn | lenet | power-law |" in printed


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_peer_that_is_not_installed_is_said_to_be(peer: str, small: tuple[Path, str]) -> None:
    if installed(peer):
        pytest.skip(f"{peer} is installed")
    file, printed = small
    assert f"{peer}: not installed: {', '.join(PACKAGES[peer])}" in printed
    columns = json.loads(file.read_text())["columns"]
    assert all("missing" in columns[name]["rows"][peer] for name in MODELS)
    assert f"{peer} / ours" not in columns["lenet"]["ratios"]


def test_rows_of_a_column_do_the_same_work(small: tuple[Path, str]) -> None:
    """Where nothing is dropped, servers move alike: other batches changed it by 5 % at most in 60 draws."""
    columns = json.loads(small[0].read_text())["columns"]
    rows = columns["lenet"]["rows"]
    assert rounds.disagreements(rows) == []
    rows["plain PyTorch"]["moved"] *= 2
    assert [line.split(" moves")[0] for line in rounds.disagreements(rows)] == ["plain PyTorch"]


def test_the_page_is_filled_from_the_file(small: tuple[Path, str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- rounds -->\nwhat was here\n<!-- end -->\nafter\n")
    for _ in range(2):  # the second time it is the same
        command("--json", str(small[0]), "--page", str(page))
        text = page.read_text()
        assert text.startswith("before\n<!-- rounds -->\n**")
        assert text.endswith("<!-- end -->\nafter\n")
        assert "what was here" not in text
        assert text.count("| ms per round |") == 1


def test_the_page_has_its_marks_and_the_sizes_of_the_models() -> None:
    page = (ROOT / PAGE).read_text()
    assert page.count("<!-- rounds -->\n") == page.count("<!-- end -->") == 1
    for name in ("tff_cnn", "lenet", "mlp"):
        task = models.build(rounds.MODELS[name], peers.SHAPE, 62)
        assert f"{sum(p.numel() for p in task.module.parameters()):,}" in page


@pytest.mark.parametrize("model", ["lenet", "mlp(hidden=(7,))", "tff_cnn(dropout=False)"])
def test_the_plain_loop_is_a_run_of_apiece(model: str) -> None:
    """One batch holds all of a client's examples: the order does not matter. The clients differ in size."""
    work = Work(model, (3, 8, 5), 3, 8, epochs=2)
    plan = rounds.Plan.tiny()
    session = rounds.prepared(work, plan, "sequential")
    pairs = zip(rounds.ours("", session).rounds, plain.rounds(work, CPU), strict=False)
    for ours, theirs in islice(pairs, 2):
        assert ours.examples == theirs.examples == 16
        for name, p in theirs.params.items():
            torch.testing.assert_close(ours.params[name], p, rtol=1e-4, atol=1e-6)


def test_the_plain_loop_drops_out() -> None:
    """PyTorch's own dropout, and in training."""
    dropped = [p for name, p in Work("tff_cnn", (1,), 1, 1).network().named_modules() if "dropout" in name]
    assert [type(layer) for layer in dropped] == [torch.nn.Dropout] * 2
    assert [(layer.p, layer.training) for layer in dropped] == [(0.25, True), (0.5, True)]


def test_ratios_by_hand() -> None:
    """Every other row over ours; half the examples' even share of 10 ms is 5 ms."""
    rows: dict[str, dict[str, Any]] = {
        "plain PyTorch": {"ms": 50.0},
        "plain PyTorch, 1 thread": {"ms": 40.0},
        "ours": {"ms": 10.0, "examples": [200.0, 200.0]},
        "ours, vectorized": {"ms": 8.0},
        "ours, ragged clients": {"ms": 6.0, "examples": [90.0, 110.0]},
        "pfl-research": {"ms": 300.0},
        "Flower simulation": {"missing": "not installed"},
    }
    assert rounds.ratios(rows) == {
        "plain PyTorch / ours": 5.0,
        "plain PyTorch, 1 thread / ours": 4.0,
        "pfl-research / ours": 30.0,
        "ours / fastest engine": 1.25,
        "ours, ragged clients / even share": pytest.approx(1.2),
    }


def test_clients_with_a_heavy_tail() -> None:
    """P5's MNIST: 1000 clients, 69,035 examples, mean 69, standard deviation 106."""
    work = rounds.Plan.full(CPU, 1).power()
    assert (len(work.sizes), sum(work.sizes)) == (1000, 69_035)
    mean = fmean(work.sizes)
    spread = fmean((size - mean) ** 2 for size in work.sizes) ** 0.5
    assert spread == pytest.approx(106, rel=0.02)


@pytest.mark.parametrize("model", ["lenet", "tff_cnn(dropout=False)", "cnn"])
def test_relu_behind_the_pooling_gives_the_same_bits(model: str) -> None:
    """Outputs and gradients; a third of the pixels are zero, so that windows have several largest entries."""
    work = Work(model, (2,), 1, 1)
    usual, ours = work.network(), models.build(model, SHAPE, work.classes).factory()
    ours.load_state_dict(usual.state_dict())
    assert [name for name, _ in usual.named_children()] != [name for name, _ in ours.named_children()]
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0)) * (torch.arange(28) % 3 > 0)
    for network in (usual, ours):
        network(x).square().sum().backward()
    for a, b in zip(usual.parameters(), ours.parameters(), strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_waste_of_even_clients_is_none() -> None:
    work = rounds.Plan.full(CPU, 1).work("lenet")
    session = rounds.prepared(rounds.Plan.tiny().work("logistic"), rounds.Plan.tiny(), "vectorized")
    figures = rounds.waste(work, session.engine, cohorts=2)
    assert set(figures.values()) == {1.0}


def test_waste_by_hand() -> None:
    """Batches of 4: steps 1 and 4. Together 8 for 5 real ones, more than the 1.5 allowed: two chunks."""
    session = rounds.prepared(rounds.Plan.tiny().work("logistic"), rounds.Plan.tiny(), "vectorized")
    figures = rounds.waste(Work("logistic", (3, 16), 2, 4), session.engine, cohorts=1)
    assert figures == {
        "chunks": 2.0,
        "computed": 1.0,
        "most_computed": 1.0,
        "read": 1.0,
        "in_one_rectangle": 1.6,
    }


def test_steps_of_a_chunk_are_those_of_who_has_a_batch() -> None:
    """1, 4 and 4 steps: two clients stay for all four, so 9 are computed and 12 read, of 9 real ones."""
    session = rounds.prepared(rounds.Plan.tiny().work("logistic"), rounds.Plan.tiny(), "vectorized")
    figures = rounds.waste(Work("logistic", (3, 16, 16), 3, 4), session.engine, cohorts=1)
    assert (figures["chunks"], figures["computed"], figures["read"]) == (1.0, 1.0, 12 / 9)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PACKAGES)
def test_a_peer_moves_the_server_as_ours_does(peer: str) -> None:
    """In its own process, where it is installed."""
    if not installed(peer):
        pytest.skip(f"{peer} is not installed")
    plan = rounds.Plan.tiny()
    work = Work("lenet", (8,) * 3, 3, 8)
    (key,) = (key for key, (_, _, name) in rounds.PEERS.items() if name == peer)
    figures = rounds.beside(key, work, plan, 1)
    first = next(plain.rounds(work, CPU))
    assert len(figures["blocks_ms"]) == plan.blocks
    assert figures["moved"] == pytest.approx(
        peers.distance(work.network().state_dict(), first.params), rel=1e-4
    )


def test_the_plain_loop_in_a_process_of_its_own_is_the_same_loop() -> None:
    """Two rounds, the second of two clients alone."""
    work = Work("logistic", (8,) * 3, 3, 4)
    cohort = [range(3), (0, 2)].__getitem__
    apart, here = plain.rounds_apart(work, 1, cohort), plain.rounds(work, CPU, cohort)
    (first, second), (expected, other) = ([next(loop) for _ in range(2)] for loop in (apart, here))
    for name, p in expected.params.items():
        assert torch.equal(first.params[name], p)
    assert (first.examples, second.examples) == (expected.examples, other.examples) == (24, 16)


def test_plain_loops_side_by_side_share_the_clients() -> None:
    """The first round is the mean of what each makes of its share, by numbers of examples."""
    work = Work("logistic", (8, 4, 8), 3, 4)
    done = next(plain.rounds_apart(work, 1, processes=2))
    shares = [next(plain.rounds(work, CPU, lambda _, ids=ids: ids)) for ids in ((0, 2), (1,))]
    assert done.examples == 20
    for name, p in done.params.items():
        torch.testing.assert_close(p, (16 * shares[0].params[name] + 4 * shares[1].params[name]) / 20)


def test_cohorts_of_the_power_law_are_those_of_apiece() -> None:
    """Every block sees the same examples in both rows."""
    column = rounds.power_column(rounds.Plan.tiny())
    ours, loop = (column["rows"][name]["examples"] for name in ("ours", "plain PyTorch"))
    assert ours == loop
    assert min(ours) > 0
