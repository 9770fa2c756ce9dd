"""Which bodies that we override or rest on differ in another source tree of TRL?

    python -m tests.contract.drift PATH_TO_TRL     # the folder with trl/, or trl/ itself

Lists every body that has another hash than `test_trl_seams.py` accepts, or is gone, with its new hash. Nothing is
imported, so the tree needs no installation. Bodies that TRL inherits from transformers are those of transformers.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from pkgutil import resolve_name

from tests.contract.test_trl_seams import READ, hash_of

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def drift(package: Path) -> dict[str, str]:
    """Body to its new hash, or to "gone", in the folder `trl` of a source tree."""
    found = {}
    for name, accepted in READ.items():
        if not inspect.unwrap(resolve_name(name)).__module__.startswith("trl."):
            continue
        body = body_of(package, *name.split(":"))
        if (new := hash_of(body) if body else "gone") not in accepted:
            found[name] = new
    return found


def body_of(package: Path, module: str, path: str) -> str:
    """The source of a function or method, "" if the tree has none."""
    first, _, rest = path.partition(".")
    files = sorted(package.rglob("*.py")) if module == "trl" else [_file(package, module)]
    for file in (each for each in files if each.is_file()):
        text = file.read_text()
        node = _defined(ast.parse(text), first) if re.search(rf"(class|def) {first}\b", text) else None
        if isinstance(node, ast.ClassDef):
            return _method(package, text, node, rest)
        if node is not None:
            return _source(text, node)
    return ""


def _file(package: Path, module: str) -> Path:
    return package.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _method(package: Path, text: str, node: ast.ClassDef, name: str) -> str:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
            return _source(text, each)
    bases = (base.id for base in node.bases if isinstance(base, ast.Name))
    return next((body for base in bases if (body := body_of(package, "trl", f"{base}.{name}"))), "")


def _source(text: str, node: Definition) -> str:
    """With the decorators, as `inspect` has it."""
    start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(text.splitlines()[start - 1 : node.end_lineno])


def _defined(tree: ast.Module, name: str) -> Definition | None:
    return next((each for each in ast.walk(tree) if isinstance(each, Definition) and each.name == name), None)


def main(words: list[str]) -> str | None:
    """What is to be printed as an error, if anything."""
    package = Path(*words[:1])
    package = package / "trl" if (package / "trl").is_dir() else package
    if len(words) != 1 or not (package / "trainer" / "grpo_trainer.py").is_file():
        return f"{package} has no TRL: give the folder of a source tree, python -m tests.contract.drift PATH_TO_TRL"
    found = drift(package)
    for name, new in found.items():
        print(f"{name}: {new}")
    print(f"{len(found)} of {len(READ)} bodies differ.")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
