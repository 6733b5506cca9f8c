"""The pages that are generated or that point somewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import checks
import pytest

from flash_cute import env
from flash_cute.features import Feature
from flash_cute.selection import KERNELS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
)

support_table = checks.load_tool("make_support_table")


def test_support_page_is_what_the_kernels_declare(capsys: pytest.CaptureFixture[str]):
    status = support_table.main(["--check"])
    assert status == 0, "run python tools/make_support_table.py\n" + capsys.readouterr().out


def test_support_page_follows_a_declaration(monkeypatch: pytest.MonkeyPatch):
    (first, *others) = KERNELS
    line = "| `softcap` | {} | {} |".format(Feature.SOFTCAP.doc, "{}")
    for features, word in ((frozenset(), "no"), (frozenset({Feature.SOFTCAP}), "yes")):
        changed = dataclasses.replace(first, features=features)
        monkeypatch.setattr(support_table, "KERNELS", (changed,))
        assert line.format(word) in support_table.page()
        assert support_table.main(["--check"]) == 1


def test_support_page_has_every_feature_and_kernel():
    text = support_table.page()
    for feature in Feature:
        assert text.count(f"| `{feature.value}` | {feature.doc} |") == 1
    for kernel in KERNELS:
        assert text.count(f"`{kernel.kernel}`") == 2


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    missing = [
        target
        for target in targets
        if "://" not in target and not ((ROOT / page).parent / target).exists()
    ]
    assert missing == []


def test_readme_names_every_variable():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^\| `(FLASH_CUTE_\w+)", text, re.M))
    assert named == {variable.name for variable in env.VARIABLES}
