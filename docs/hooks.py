"""MkDocs hooks: pages from outside docs/ join the site, and links that leave it lose their address."""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "recipes/README.md": "shipped-recipes.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PAGES = {ROOT / source: page for source, page in OUTSIDE.items()}
PAGES |= {path: path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def relinked(markdown: str, source: Path, page: str) -> str:
    """The page with its links as the site needs them: what lies outside the site is named without a link.

    Those that lead nowhere are errors.
    """

    def replace(match: re.Match) -> str:
        target, hash_, anchor = match[2].partition("#")
        if "://" in target or not target:
            return match[0]
        path = (source.parent / target).resolve()
        if not path.exists() and not path.is_relative_to(ROOT / "docs"):  # mkdocs checks links to generated pages
            raise PluginError(f"{source.relative_to(ROOT)} links to {match[2]}, which does not exist")
        up = "../" * page.count("/")
        if path in PAGES:
            return f"[{match[1]}]({up}{PAGES[path]}{hash_}{anchor})"
        if path.is_relative_to(ROOT / "docs") and not path.is_dir():
            return f"[{match[1]}]({up}{path.relative_to(ROOT / 'docs')}{hash_}{anchor})"
        return match[1]

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", replace, part) for part in parts[::2]]
    return "".join(parts)


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == uri), None)
    return markdown if source is None else relinked(markdown, source, uri)
