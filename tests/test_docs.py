"""The pages in docs/ are run and compared with the code, so that they cannot rot.

A block "```python fedprox.py" is written to that file; "```python" is run; each `apiece` line of "```sh" is
run with fewer rounds; "```python signatures" is compared with the source.
"""

from __future__ import annotations

import ast
import copy
import csv
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apiece
from apiece import (
    Experiment,
    Method,
    Model,
    Params,
    Recipe,
    Reply,
    Shard,
    Task,
    catalog,
    check,
    cli,
    from_arrays,
    random,
    run,
    tree,
)
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.methods.fedavg import FedAvg
from tests.broken import Averaging
from tests.worlds import CPU, federation, linear_net, servers

ROOT = Path(__file__).parents[1]
SOURCE = Path(apiece.__file__).parent
PAGES = (
    *(
        f"docs/{name}.md"
        for name in ("architecture", "add-a-method", "data", "reliability", "results", "digits")
    ),
    *(
        "docs/measures.md",
        "docs/tune.md",
        "docs/performance.md",
        "docs/scale.md",
        "docs/federation.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ),
    *(f"docs/methods/{path.name}" for path in sorted((ROOT / "docs/methods").glob("*.md"))),
)
QUICK = {"--rounds": "2", "--evaluate-every": "2", "--engine": "vectorized", "--threads": "1"}
FEW = {"--cohort": "3", "--model": "logistic"}
ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]


class Block(NamedTuple):
    kind: str
    title: str
    text: str


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> Iterator[Block]:
    for kind, title, text in re.findall(
        r"^```(\w+) ?([^\n]*)\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL
    ):
        yield Block(kind, title, text)


def section(name: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level."""
    level = heading.split(maxsplit=1)[0]
    return page(name).split(f"\n{heading}\n")[1].split(f"\n{level} ")[0]


def first_cells(text: str) -> list[str]:
    """The code in the first column of the tables in `text`."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def write_files(name: str, folder: Path) -> None:
    for block in blocks(name):
        if block.title and block.title != "signatures":
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


def with_defaults(words: list[str]) -> list[str]:
    """A command with few and fast rounds; what the page sets stays."""
    if words[0] not in ("run", "compare", "tune"):
        return words
    small = QUICK if "--data" in words else QUICK | FEW
    return words + [word for flag, value in small.items() if flag not in words for word in (flag, value)]


# Commands and code


@pytest.mark.parametrize("name", [p for p in PAGES if any(b.kind in ("sh", "python") for b in blocks(p))])
def test_what_a_page_shows_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(block.kind == "python" and "pyarrow" in block.text for block in blocks(name)):
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_files(name, tmp_path)
    for block in blocks(name):
        if block.kind == "python" and not block.title:
            exec(compile(block.text, name, "exec"), {})
        for line in block.text.splitlines() if block.kind == "sh" else ():
            program, *words = shlex.split(line)
            if program == "apiece":
                assert not cli.app(with_defaults(words), standalone_mode=False), line
            elif program == "make":
                assert re.search(rf"^{words[0]}:", page("Makefile"), re.MULTILINE), line
            else:
                assert (ROOT / program).exists(), line


def test_pages_link_to_what_exists() -> None:
    for name in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page(name)):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"


def test_pages_link_to_headings_that_exist() -> None:
    for name in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page(name)):
            text = (ROOT / name).parent.joinpath(target).read_text() if target else page(name)
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, anchor


# The worked method; that it keeps every rule is shown above, by the page's own `apiece check`


@pytest.fixture(scope="module")
def fedprox(tmp_path_factory: pytest.TempPathFactory) -> type[Method]:
    folder = tmp_path_factory.mktemp("methods")
    write_files("docs/add-a-method.md", folder)
    before = [*sys.path]
    found = catalog.lookup(f"{folder / 'fedprox.py'}:FedProx")
    sys.path[:] = before
    return found


SIZES = (7, 23, 1, 12)
RECIPE = Recipe(lr=0.2, momentum=0.5, batch_size=5, epochs=2)


def test_fedprox_is_about_thirty_lines() -> None:
    (source,) = (b.text for b in blocks("docs/add-a-method.md") if b.title == "fedprox.py")
    code = ast.parse(source)
    assert isinstance(code.body[-1], ast.ClassDef)
    lines = [line for line in ast.unparse(code.body[1:]).splitlines() if line.strip()]  # type: ignore[call-overload]
    assert len(lines) <= 30


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_fedprox_without_its_term_is_fedavg(fedprox: type[Method], engine: Engine) -> None:
    """(0/2)‖w − w_t‖² has the gradient 0: the same bits."""
    ends = []
    for method in (fedprox(mu=0.0, local=RECIPE), FedAvg(local=RECIPE)):  # type: ignore[call-arg]
        training, server = federation(method, engine, SIZES, 3)
        ends.append([after.params for after in servers(training, server, 3)])
    for ours, theirs in zip(*ends, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def equals_plain_rounds(
    method: Method, engine: Engine, train: Callable[[nn.Module, list[Tensor], Tensor, Tensor], None]
) -> None:
    """Three rounds: the server has the mean of what clients `train` by hand, weighted by examples."""
    training, server = federation(method, engine, SIZES, 3, linear_net)
    data = training.federation.data
    model = linear_net()
    model.load_state_dict(dict(server.params))
    for index, ours in enumerate(servers(training, server, 3)):
        round = training.round(index)
        cohort = training.sampler(data, round)
        total = sum(len(data.train[client]) for client in cohort.ids)
        average = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
        for at, client in enumerate(cohort.ids):
            rows, even = training.federation.rows(
                cohort.train, [at], [client], random.fold(round.key, "client")
            )
            numbered = Shard(torch.arange(len(data.y)), data.y, tree.take(rows, 0), even)
            local = copy.deepcopy(model)
            with torch.enable_grad():
                train(local, [batch.x for batch in numbered.batches(5, 2)], data.x, data.y)
            for name, p in local.state_dict().items():
                average[name] += p * len(data.train[client]) / total
        model.load_state_dict(average)
        for name, p in model.state_dict().items():
            torch.testing.assert_close(ours.params[name], p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_fedprox_equals_a_plain_loop(fedprox: type[Method], engine: Engine) -> None:
    """Each local step moves by the gradient of the loss plus μ (w − w_t), the server to the weighted mean."""
    mu = 0.7

    def train(local: nn.Module, batches: list[Tensor], x: Tensor, y: Tensor) -> None:
        received = [p.detach().clone() for p in local.parameters()]
        sgd = torch.optim.SGD(local.parameters(), lr=0.2, momentum=0.5)
        for batch in batches:
            sgd.zero_grad()
            loss = F.cross_entropy(local(x[batch]), y[batch])
            for p, p_t in zip(local.parameters(), received, strict=True):
                loss = loss + mu / 2 * (p - p_t).square().sum()
            loss.backward()
            sgd.step()

    equals_plain_rounds(fedprox(mu=mu, local=RECIPE), engine, train)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Decayed(Averaging):
    """FedAvg with the page's loop in the place of `sgd`."""

    train: Callable[..., Params]
    local: Recipe = RECIPE
    personal: Recipe = RECIPE

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        w = self.train(task, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, weight=data.size)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_loop_of_ones_own_counts_the_clients_own_steps(engine: Engine) -> None:
    """Step t of a client has the rate 0.2 / t, however many steps longer clients take."""
    (source,) = (b.text for b in blocks("docs/add-a-method.md") if b.title == "decayed.py")
    page_of: dict[str, Any] = {}
    exec(source, page_of)

    def train(local: nn.Module, batches: list[Tensor], x: Tensor, y: Tensor) -> None:
        for t, batch in enumerate(batches, 1):
            gradients = torch.autograd.grad(
                F.cross_entropy(local(x[batch]), y[batch]), list(local.parameters())
            )
            with torch.no_grad():
                for p, g in zip(local.parameters(), gradients, strict=True):
                    p -= 0.2 / t * g

    equals_plain_rounds(Decayed(page_of["decayed"]), engine, train)


# The architecture page


def _described(nodes: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, signature or field as written) of functions and fields, classes opened."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from _described(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield (
                prefix + node.name,
                f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns or ast.Constant(None))}",
            )
        elif isinstance(node, ast.AnnAssign):
            yield f"{prefix}{ast.unparse(node.target)}", ast.unparse(node)


def test_the_protocol_is_the_codes() -> None:
    code = {pair for path in SOURCE.rglob("*.py") for pair in _described(ast.parse(path.read_text()).body)}
    shown = [b.text for b in blocks("docs/architecture.md") if b.title == "signatures"]
    told = [pair for text in shown for pair in _described(ast.parse(text).body)]
    assert len(told) > 40
    assert [pair for pair in told if pair not in code] == []
    names = {name for name, _ in told}
    for whole in ("Round", "Reply", "Batch"):
        assert {name for name, _ in code if name.startswith(f"{whole}.")} <= names


def test_the_table_of_files_is_whole_and_in_order() -> None:
    listed = first_cells(section("docs/architecture.md", "## Layers"))
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
    assert sorted(listed) == sorted({re.sub(r"^(methods|wrappers)/.*", r"\1/", path) for path in files})
    (contract,) = (
        c["layers"]
        for c in tomllib.loads(page("pyproject.toml"))["tool"]["importlinter"]["contracts"]
        if c["type"] == "layers"
    )
    layer = {
        name.strip().removeprefix("apiece."): height
        for height, names in enumerate(reversed(contract))
        for name in re.split(r"[|:]", names)
    }
    order = [layer[top] for path in listed if (top := path.split("/")[0].removesuffix(".py")) in layer]
    assert order == sorted(order)
    assert set(layer) <= {path.split("/")[0].removesuffix(".py") for path in listed}


def test_the_run_folder_is_as_described(tmp_path: Path) -> None:
    """Of a run with client states, two checkpoints and data given as arrays."""
    y = [i % 2 for i in range(60)]
    examples = from_arrays([[label, i / 60] for i, label in enumerate(y)], y, [i // 12 for i in range(60)])
    experiment = Experiment(
        method="elastic(fedavg)",
        model="logistic",
        cohort=2,
        rounds=2,
        checkpoint_every=1,
        engine="vectorized",
        threads=1,
    )
    run(experiment, tmp_path, data=examples)
    text = section("docs/architecture.md", "## The run folder")
    files, _, columns = text.partition("**`rounds.csv`**")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {re.sub(r"round-\d+", "round-000040", name) for name in found} == set(first_cells(files))

    def header(name: str) -> list[str]:
        with (tmp_path / name).open() as file:
            return next(csv.reader(file))

    table = first_cells(columns.partition("**`cohorts.csv`**")[0])
    assert [name for name in table if not name.startswith("client_")] == header("rounds.csv")
    for name in ("cohorts.csv", "clients.csv", "partition.csv"):
        assert _words(columns, name)[: len(header(name))] != []
        assert [word for word in _words(columns, name) if word in header(name)] == header(name)
    for name in ("engine.json", "summary.json"):
        keys = json.loads((tmp_path / name).read_text())
        assert [
            word for word in _words(columns, name) if word in keys and word not in keys.get("seen", {})
        ] == list(keys)
        if name == "summary.json":
            assert [word for word in _words(columns, name) if word in keys["seen"]] == list(keys["seen"])


def _words(text: str, name: str) -> list[str]:
    """The code words of the paragraph about a file, in order, each once."""
    (paragraph,) = re.findall(
        rf"^\*\*`{re.escape(name)}`\*\*:(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return list(dict.fromkeys(re.findall(r"`([^`]+)`", paragraph)))


# The rules


def _messages(node: ast.AST) -> Iterator[str]:
    """Every text in the source; what is filled in is an ellipsis."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in part.values)


def test_rules_and_messages_are_those_of_the_suite() -> None:
    table = section("docs/add-a-method.md", "## What the rules forbid")
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("|")
    ][2:]
    assert list(dict.fromkeys(rule for rule, _, _ in rows if rule)) == list(check._RULES)
    known = [
        t for t in _messages(ast.parse((SOURCE / "check.py").read_text())) if len(t.replace("…", "")) > 9
    ]
    told = [message.strip("`") for _, message, _ in rows]
    assert [m for m in told if not any(re.fullmatch(re.escape(t).replace("…", ".+"), m) for t in known)] == []
    assert ", ".join(map(str, check.SIZES[:-1])) + f" and {check.SIZES[-1]}" in table


# The words


def test_pages_keep_to_the_words() -> None:
    banned = r"\b(workers?|nodes?|users?|payloads?|strateg(y|ies)|trainers?|args|global model|iterations?)\b"
    for name in PAGES:
        assert re.findall(banned, page(name), re.IGNORECASE) == [], name
