"""MkDocs hooks: pages made from code, pages from outside docs/, and links that leave the site."""

import re
from pathlib import Path

import reference
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Page -> its source outside docs/.
OUTSIDE = {
    "index.md": ROOT / "README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}


def relink(markdown: str, source: Path, page: str) -> str:
    """Rewrite the links of a page for the site. A file that the site does not have is named without a link.

    MkDocs reports what leads nowhere, but in the changelog, which names pages that were.
    """
    addresses = {path: name for name, path in OUTSIDE.items()}
    is_history = page == "changelog.md"

    def replace(match: re.Match[str]) -> str:
        text, (target, hash_, anchor) = match[1], match[2].partition("#")
        path = (source.parent / target).resolve()
        if "://" in target or not target:
            return match[0]
        if is_history and (anchor or not path.exists()):
            return text
        if path in addresses or (path.is_relative_to(DOCS) and not path.is_dir()):
            address = addresses.get(path) or path.relative_to(DOCS).as_posix()
            return f"[{text}]({'../' * page.count('/')}{address}{hash_}{anchor})"
        return text if path.exists() else match[0]

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", replace, part) for part in parts[::2]]
    return "".join(parts)


def on_files(files, config):
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=source.read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]  # which would be a link to itself
    source = OUTSIDE.get(uri, DOCS / uri)
    markdown = relink(markdown, source, uri) if source.exists() else markdown
    return f"{markdown.rstrip()}\n\n{reference.build_page(uri)}" if uri in reference.PAGES else markdown
