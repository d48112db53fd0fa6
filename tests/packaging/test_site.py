"""The pages of the site (docs/): each public name is in the reference once, each error and each alert has an answer."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Final

import yaml

import anabranch
import anabranch.aio
import anabranch.worker
from anabranch.policies import errors

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"


def names_of_host(module: Path) -> set[str]:
    """What a module of anabranch.hosts offers; its program need not be there."""
    tree = ast.parse(module.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {*ast.literal_eval(node.value)}
    defined = (node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {name for name in defined if not name.startswith("_")}


def test_each_public_name_is_in_the_reference_once() -> None:
    shown = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in DOCS.glob("reference/*.md")), re.M)
    public = {f"anabranch.{name}" for name in (*anabranch.__all__, "open", "DataManager")}
    public |= {f"anabranch.aio.{name}" for name in anabranch.aio.__all__}
    public |= {f"anabranch.worker.{name}" for name in anabranch.worker.__all__}
    hosts = ROOT / "src/anabranch/hosts"
    for module in (*hosts.glob("[!_]*.py"), *hosts.glob("*/__init__.py")):
        host = module.parent.name if module.name == "__init__.py" else module.stem
        public |= {f"anabranch.hosts.{host}.{name}" for name in names_of_host(module)}
    assert Counter(shown) == Counter(public), "a line `::: name` in docs/reference/"


def test_the_operators_page_answers_each_error_and_each_alert() -> None:
    page = (DOCS / "operating.md").read_text()
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == raised - {"AnabranchError"}
    groups = yaml.safe_load((ROOT / "examples/prometheus/alerts.yaml").read_text())["groups"]
    assert re.findall(r"^### (Anabranch\w+)$", page, re.M) == [rule["alert"] for one in groups for rule in one["rules"]]
