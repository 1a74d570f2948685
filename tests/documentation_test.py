"""What the documentation says that a machine can check."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.full
def test_reference_pages_build_without_warnings(tmp_path):
    (command,) = re.findall(r"`python -m (pdoc [^`]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert " -o site " in command
    arguments = command.replace(" -o site ", f" -o {tmp_path}/site ").split()
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    assert "kernel_solve" in (tmp_path / "site" / "cubit_jax" / "ops.html").read_text()


def test_links_lead_to_files():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page, link in links
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert links and not broken, broken


def test_functions_of_the_papers_are_where_the_page_says():
    page = ROOT / "docs" / "papers_to_code.md"
    found = re.findall(r"\[(\w+)\]\((\.\./cubit_jax/[\w/]+\.py)\)", page.read_text())
    missing = [
        name
        for name, path in found
        if not re.search(rf"^(def|class) {name}\b", (page.parent / path).read_text(), re.MULTILINE)
    ]
    assert len(found) > 20 and not missing, missing
