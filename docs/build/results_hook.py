"""MkDocs hooks for results: pages made from results/, a check of docs/results.md, and headers of all tables."""

import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from result_pages import pages
from result_pages.judging import find_unknown_sources, judge_everything
from result_pages.placeholders import PAGE, SUMMARY, fill_placeholders

FRONT_MATTER = "---\nhide: [toc]\n---\n\n"  # wide tables need the room


def on_files(files, config):
    if unknown := find_unknown_sources(judge_everything().claims):
        raise PluginError(f"results/said.yaml has entries for which there is no claim: {'; '.join(unknown)}")
    if fill_placeholders(SUMMARY.read_text()) != PAGE.read_text():
        raise PluginError("docs/results.md is not what results/summary.md says of the stored runs; run `make results`.")
    for page, write in pages.PAGES.items():
        files.append(File.generated(config, page, content=FRONT_MATTER + write()))
    return files


def on_page_content(html, page, config, files):
    html = re.sub(r"<th(?: style=\"[^\"]*\")?></th>", "<td></td>", html)  # the corner of a table heads nothing
    return re.sub(r"<th(?![^>]*\bscope=)(?=[ >])", '<th scope="col"', html)
