"""MkDocs hooks for results: pages made from results/, figures in docs/results.md, and headers of all tables."""

import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from result_pages import pages
from result_pages.judging import find_unknown_sources, judge_everything
from result_pages.placeholders import fill_placeholders

LOG = "results.md"
FRONT_MATTER = "---\nhide: [toc]\n---\n\n"  # wide tables need the room


def on_files(files, config):
    if unknown := find_unknown_sources(judge_everything().claims):
        raise PluginError(f"results/said.yaml has entries for which there is no claim: {'; '.join(unknown)}")
    for page, write in pages.PAGES.items():
        files.append(File.generated(config, page, content=FRONT_MATTER + write()))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri != LOG:
        return markdown
    try:
        return fill_placeholders(markdown)
    except ValueError as error:
        raise PluginError(f"docs/{LOG}: {error}") from error


def on_page_content(html, page, config, files):
    html = re.sub(r"<th(?: style=\"[^\"]*\")?></th>", "<td></td>", html)  # the corner of a table heads nothing
    return re.sub(r"<th(?![^>]*\bscope=)(?=[ >])", '<th scope="col"', html)
