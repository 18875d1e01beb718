"""MkDocs hooks: pages from outside docs/ join the site, and links that leave the site lead to the repository."""

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


def relinked(markdown: str, source: Path, page: str, repository: str) -> str:
    """The page with its links as the site needs them. Those that lead nowhere are errors."""

    def replace(match: re.Match) -> str:
        target, hash_, anchor = match[1].partition("#")
        target = re.sub(rf"^{repository}/(?:blob|tree)/main/", f"{ROOT}/", target)
        target = re.sub(r"^https://raw.githubusercontent.com/[^/]+/[^/]+/main/", f"{ROOT}/", target)
        if "://" in target or not target:
            return match[0]
        path = (source.parent / target).resolve()
        if not path.exists():
            raise PluginError(f"{source.relative_to(ROOT)} links to {match[1]}, which does not exist")
        up = "../" * page.count("/")
        if path in PAGES:
            return f"]({up}{PAGES[path]}{hash_}{anchor})"
        if path.is_relative_to(ROOT / "docs") and path.is_file():
            return f"]({up}{path.relative_to(ROOT / 'docs')}{hash_}{anchor})"
        kind = "tree" if path.is_dir() else "blob"
        return f"]({repository}/{kind}/main/{path.relative_to(ROOT)}{hash_}{anchor})"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\]\(([^)\s]+)\)", replace, part) for part in parts[::2]]
    return "".join(parts)


def on_files(files, config):
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    source = next(path for path, name in PAGES.items() if name == uri)
    return relinked(markdown, source, uri, config.repo_url.rstrip("/"))
