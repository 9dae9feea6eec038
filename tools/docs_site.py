"""MkDocs hooks: add pages from outside docs/ to the site, and fix their links."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "specdec/bench/LOG.md": "log.md",
    "tools/bench/README.md": "developer-benchmarks.md",
    "tools/train_tiny/README.md": "train_tiny.md",
}
"""Files of the repository, with their names on the site."""
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository; keep only the text of links to files without a page."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        text, url, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), url))
        if name := PAGES.get(path):
            return f"[{text}]({name}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        return text if (ROOT / path).exists() else link[0]

    return LINK.sub(rewritten, markdown)
