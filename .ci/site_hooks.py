"""What mkdocs.yml adds to the pages of docs/: the command line's reference, and files of the repository.

A page links to a file of the repository by its relative path, as on a code host. In the site the link leads to a page
that shows the file (Markdown and notebooks are rendered, a picture is copied), so the site is whole without any other
host. What those files link to is followed in turn.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SHOWN = "files/"  # where the site shows files of the repository
COMMANDS_PAGE = "reference/commands.md"
NAMED_AS_FILE = re.compile(r"\[[\w./-]+\.md\](?=\(([^)#\s]+))")
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:|data:)([^)#\s]+)")
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".proto": "protobuf"}
FROM_ELSEWHERE = re.compile(
    r'<(?:script|img|iframe|source|link(?! rel="canonical"))\b[^>]*\b(?:src|href)="(?:https?:)?//[^>]*>|class="mermaid"'
)
COMMANDS_START = """# Command line

`diloco COMMAND --help` says the same in a terminal. Exit codes: 0 done, 1 failure, with one sentence on standard error,
2 wrong use, 130 interrupted, 143 stopped by a signal under `diloco train --supervised`.
"""
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository that pyproject.toml names, where it names one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command line's reference, and every file of the repository that a page or the navigation leads to."""
    files.append(File.generated(config, COMMANDS_PAGE, content=commands_page()))
    pages = [file.src_uri for file in files if file.src_uri.endswith(".md") and file.src_uri != COMMANDS_PAGE]
    to_do = [path for page in pages for path in links_out(Path("docs", page).as_posix())]
    to_do += [file_of(entry) for entry in entries(config.nav) if entry.startswith(SHOWN)]
    shown = set[str]()
    while to_do:
        path = to_do.pop()
        if path in shown:
            continue
        shown.add(path)
        files.append(shown_file(path, config))
        if path.endswith((".md", ".ipynb")):
            to_do += links_out(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to the site's pages of those files, and call pages by their titles."""
    source = page.file.src_uri
    path = file_of(source)

    def target(found: re.Match[str]) -> str:
        leads_to = resolved(path, found[1])
        # Otherwise a page that is generated, or a mistake, which mkdocs reports.
        return found[0] if leads_to is None else relpath(uri(leads_to), dirname(source) or ".")

    def title(found: re.Match[str]) -> str:
        leads_to = resolved(path, found[1])
        heading = leads_to and re.search(r"^# (.+)$", text_of(leads_to), re.MULTILINE)
        return f"[{heading[1]}]" if heading else found[0]

    return LINK.sub(target, NAMED_AS_FILE.sub(title, markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a page that a browser could show only by asking another host. The theme fetches Mermaid from one."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        if found := FROM_ELSEWHERE.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(config.site_dir)} loads something from elsewhere: {found[0]}")


def entries(nav: Any) -> Iterator[str]:
    """The pages of a navigation, whatever its sections."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def links_out(path: str) -> list[str]:
    """The files of the repository outside of docs/ that one of them links to."""
    linked = {resolved(path, target) for target in LINK.findall(text_of(path))}
    return sorted(each for each in linked if each is not None and not each.startswith("docs/"))


def resolved(path: str, target: str) -> str | None:
    """The file that a link in a file leads to; of a directory its README.md, there or not. None: there is none."""
    leads_to = normpath(f"{dirname(path)}/{target}")
    if (ROOT / leads_to).is_dir():
        return f"{leads_to}/README.md"
    return leads_to if (ROOT / leads_to).is_file() else None


def text_of(path: str) -> str:
    """The text of a file of the repository; a list of the files, where a directory has no README.md."""
    if (ROOT / path).is_file() or not path.endswith("README.md"):
        text = (ROOT / path).read_text(encoding="utf-8")
        return notebook(text) if path.endswith(".ipynb") else text
    directory = dirname(path)
    names = sorted(each.name for each in (ROOT / directory).iterdir() if each.is_file())
    return f"# {directory}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def uri(path: str) -> str:
    """Where the site has a file of the repository, as mkdocs counts: from docs/."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return SHOWN + path + ("" if path.endswith((".md", *PICTURES)) else ".md")


def file_of(uri: str) -> str:
    """The file of the repository that a page of the site is, or shows."""
    if not uri.startswith(SHOWN):
        return f"docs/{uri}"
    path = uri.removeprefix(SHOWN)
    shown = path.removesuffix(".md")
    return shown if (ROOT / shown).is_file() else path


def shown_file(path: str, config: MkDocsConfig) -> File:
    """The page of a file of the repository; of a picture, the picture."""
    if path.endswith(PICTURES):
        return File.generated(config, uri(path), abs_src_path=str(ROOT / path))
    text = text_of(path)
    if not path.endswith((".md", ".ipynb")):
        text = f"# {Path(path).name}\n\n`{path}`\n\n{fenced(text, LANGUAGES.get(Path(path).suffix, 'text'))}"
    return File.generated(config, uri(path), content=NOT_SEARCHED + text)


def fenced(text: str, language: str) -> str:
    """A block of code, whatever is in it."""
    return f"````````{language}\n{text.rstrip()}\n````````\n"


def notebook(text: str) -> str:
    """A notebook as Markdown, with what its cells printed and drew."""
    parts = []
    for each in json.loads(text)["cells"]:
        source = "".join(each["source"])
        parts.append(source if each["cell_type"] == "markdown" else fenced(source, "python"))
        for output in each.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(''.join(data['image/png']).split())})")
            elif printed := "".join(output.get("text", data.get("text/plain", ()))):
                parts.append(fenced(printed, "text"))
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------------- command line


def commands_page() -> str:
    """Every command of `diloco` with its arguments and options, from the command line itself."""
    from diloco.cli import COMMANDS, _load

    lines = [COMMANDS_START]
    for name in COMMANDS:
        lines += command_section(_load(name), f"diloco {name}", level=2)
    return "\n".join(lines) + "\n"


def command_section(command: Any, name: str, level: int) -> Iterator[str]:
    """A command as its help shows it, and its subcommands one level below."""
    context = command.context_class(command, info_name=name)
    yield from (f"{'#' * level} {name}", "", plain(command.help), "")
    yield from ("```text", command.get_usage(context).removeprefix("Usage: "), "```", "")
    for kind in ("argument", "option"):
        records = [
            parameter.get_help_record(context)
            for parameter in command.get_params(context)
            if parameter.param_type_name == kind and not parameter.hidden and parameter.name != "help"
        ]
        if records:
            yield from (f"| {kind} | |", "|---|---|")
            yield from (f"| {code(usage)} | {cell(text)} |" for usage, text in records)
            yield ""
    for below, subcommand in getattr(command, "commands", {}).items():
        yield from command_section(subcommand, f"{name} {below}", level + 1)


def plain(text: str) -> str:
    """A help text without the escapes of the terminal's markup."""
    return text.replace("\\[", "[")


def code(text: str) -> str:
    """Code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def cell(text: str) -> str:
    """Prose in a cell of a table: brackets and angles are meant, code is code."""
    parts = re.split(r"(`[^`]+`)", " ".join(plain(text).split()))
    escaped = [each if each.startswith("`") else re.sub(r"([\\\[\]<>*_{}])", r"\\\1", each) for each in parts]
    return "".join(escaped).replace("|", "\\|")
