"""The README against the code."""

import re
import shlex
from pathlib import Path

from apiece import catalog
from apiece.methods import METHODS
from apiece.wrappers import WRAPPERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def methods_table() -> str:
    """The table as `apiece methods` knows the methods; on a failure, paste it."""
    lines = ["| method | kind | paper | in one line |", "|---|---|---|---|"]
    for name in [*sorted(METHODS), *sorted(WRAPPERS)]:
        cls = catalog.lookup(name)
        page = f"docs/methods/{name}.md"
        shown = f"{name}(…)" if name in WRAPPERS else name
        link = f"[`{shown}`]({page})" if (ROOT / page).exists() else f"`{shown}`"
        lines.append(f"| {link} | {cls.kind} | {cls.paper} | {(cls.__doc__ or '').splitlines()[0]} |")
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
