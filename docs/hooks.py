"""What the site takes from elsewhere in the repository: the help of each command, the text of each error, and the pages of the benchmarks.

mkdocs calls the functions named on_...; tests/docs/test_site.py calls the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

COMMANDS = "<!-- commands: docs/hooks.py puts the help of each command here -->"
ELSEWHERE = ("README.md", "details.md", "growth.svg")
"""Files of benchmarks/ that are part of the site."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the benchmarks."""
    from mkdocs.structure.files import File

    for name in ELSEWHERE:
        files.append(File.generated(config, f"benchmarks/{name}", abs_src_path=str(ROOT / "benchmarks" / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what comes from the code, and lead links between docs/ and benchmarks/ to the pages of the site."""
    place = page.file.src_uri
    if place.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    if place == "reference/commands.md":
        markdown = markdown.replace(COMMANDS, "\n".join(commands()))
    if place == "reference/errors.md":
        markdown = with_messages(markdown)
    if place == "index.md":
        return markdown.replace("](../benchmarks/", "](benchmarks/")
    return markdown.replace("](../../benchmarks/", "](../benchmarks/")


LONG = 40
"""Characters of a code in the first column of a table, above which it may be broken."""


def on_page_content(html: str, **_: Any) -> str:
    """Let long calls and lists of values in the first column of a table break, so that they leave room for the other columns."""
    return re.sub(r"<td><code>([^<]+)</code></td>", _broken, html)


def _broken(cell: re.Match[str]) -> str:
    if len(cell[1]) <= LONG:
        return cell[0]
    return f'<td><code class="long">{re.sub("[|(.]", lambda found: f"{found[0]}<wbr>", cell[1])}</code></td>'


def errors() -> dict[str, type[Exception]]:
    """Name -> class, of everything that dedup raises for its users, in the order of the file."""
    import checkpoint.errors as module

    found = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, module.DedupError))
    return {kind.__name__: kind for kind in found}


def with_messages(markdown: str) -> str:
    """Put the docstring of each error, which is its default message, under its heading."""
    known = errors()
    return re.sub(r"^(##+ `(\w+)`)\n", lambda m: f"{m[1]}\n\n{message(known[m[2]])}\n", markdown, flags=re.MULTILINE)


def message(kind: type[Exception]) -> str:
    """The docstring as a quotation, with the class that it is one of."""
    base = kind.__bases__[0].__name__
    of = "" if kind.__bases__[0] is Exception else f" It is a [`{base}`](#{base.lower()})."
    return f"> {' '.join((kind.__doc__ or '').split())}\n\n{of}\n"


def commands() -> Iterator[str]:
    """Lines of Markdown: for each command its usage, its help, its arguments and options."""
    import typer.main

    from dedup.cli.app import app

    group = typer.main.get_command(app)
    yield from _command(group, group.context_class(group, info_name="dedup"))


def _command(command: Any, context: Any, depth: int = 2) -> Iterator[str]:
    yield f"{'#' * depth} {context.command_path}\n"
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```\n"
    yield from (_paragraph(text) for text in (command.help or "", command.epilog or "") if text)
    yield from _options(command, context)
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _command(inner, inner.context_class(inner, info_name=name, parent=context), depth + 1 if depth > 2 else 3)


def _paragraph(text: str) -> str:
    """Paragraphs of a help text; the line after `Example: ` is a command."""
    told = []
    for part in (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)):
        before, example, line = part.partition("Example: ")
        told += [_plain(before)] * bool(before) + [f"```console\n{line}\n```"] * bool(example)
    return "\n\n".join(told) + "\n"


def _options(command: Any, context: Any) -> Iterator[str]:
    rows = [p.get_help_record(context) for p in command.get_params(context) if "--help" not in p.opts]
    shown = [row for row in rows if row]
    if shown:
        yield "| argument or option | meaning |\n|---|---|"
        yield from (f"| `{names.replace('|', chr(92) + '|')}` | {_plain(text)} |" for names, text in shown)
        yield ""


def _plain(text: str) -> str:
    """Text in which nothing is Markdown."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([|<*_\[])", r"\\\1", part) for part in parts)
