"""The README against the code."""

import re
import shlex
from pathlib import Path

from apiece import catalog
from apiece.methods import VARIANTS
from apiece.traffic import traffic
from apiece.wrappers import WRAPPERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def methods_table() -> str:
    """The table as `apiece methods` knows the methods; on a failure, paste it."""
    lines = [
        "| method | kind | paper | up | down | keeps | in one line |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in catalog.names():
        described = catalog.describe(name)
        sizes = traffic(catalog.build(catalog.example(name), {}))
        page = f"docs/methods/{VARIANTS[name].method if name in VARIANTS else name}.md"
        shown = f"{name}(…)" if name in WRAPPERS else name
        link = f"[`{shown}`]({page})" if (ROOT / page).exists() else f"`{shown}`"
        cells = (link, described.kind, described.paper, f"{sizes.up:.2g}", f"{sizes.down:.2g}", sizes.memory)
        lines.append(f"| {' | '.join(cells)} | {described.what} |")
    return "\n".join(lines)


def test_the_table_of_methods_is_whole() -> None:
    assert methods_table() in README, f"the README needs this table:\n{methods_table()}"


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_command_is_one() -> None:
    """Names, flags and methods that a reader would type."""
    import typer

    from apiece.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = [
        line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
    ]
    typed = [shlex.split(line, comments=True) for line in shown if line.startswith("apiece ")]
    assert len(typed) >= 5
    for _, command, *words in typed:
        options = {option for parameter in commands[command].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, (command, words)
