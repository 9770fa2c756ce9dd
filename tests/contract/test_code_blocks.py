"""Code in the documentation: Python parses and imports what exists; commands name files and options that exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from sorl_trl.cli.main import COMMANDS as COMMANDS_OF_SORL
from tests.documentation import PAGES, ROOT, code_blocks, page_name

NEEDS_LANGCHAIN = ("examples.tool_imitation",)
"""Scripts of which the default environment lacks a library."""
FOREIGN = {"pip", "curl", "export", "grep", "hf", "npm", "tensorboard", "vllm"}
"""Programs of others, whose options are theirs."""
LAUNCHER_VALUES = {
    *("--config_file", "--machine_rank", "--main_process_ip", "--main_process_port"),
    *("--num_processes", "--num_machines"),
}


def imports(block: str) -> set[tuple[str, str]]:
    """Module and name of what a block imports of this repository and of TRL."""
    ours = ("examples", "sorl_trl", "trl")
    return {
        (node.module or "", alias.name)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ours
        for alias in node.names
    }


def check_code(block: str) -> None:
    missing = [name for name in imports(block) if not hasattr(importlib.import_module(name[0]), name[1])]
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_python_parses_and_imports_what_exists(path: Path) -> None:
    for block in code_blocks(path, "python"):
        check_code(block)


def commands(block: str) -> list[list[str]]:
    """The command lines of a block in words, without comments and variables set in front of them."""
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words[next(i for i, word in enumerate(words) if "=" not in word) :] for words in lines if words]


COMMANDS = [
    (page_name(path), words) for path in PAGES for block in code_blocks(path, "bash") for words in commands(block)
]


@cache
def options(module: str) -> frozenset[str]:
    """The options of a command: those that its help lists."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help", "all"])
    return frozenset(re.findall(r"(?<![\w-])--?\w[\w-]*", shown.getvalue())) | {"--config"}


def check_script(script: str, words: list[str]) -> None:
    """A script of the repository's root or a module, with options that it has and configurations that exist."""
    named = {word.partition("=")[0] for word in words if word.startswith("-")}
    known = options(script.removesuffix(".py"))
    assert named - known == set()
    for option, value in pairwise(words):
        if option == "--config":
            assert (ROOT / value).is_file()


def check_command(words: list[str]) -> None:
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        known = re.findall(r"^([\w-]+):", makefile, re.MULTILINE) + re.findall(r"\$\((\w+)\)", makefile)
        assert {word.partition("=")[0] for word in rest} <= set(known)
    elif program == "python" and rest[0] == "-m" and rest[1] not in FOREIGN:
        spec = importlib.util.find_spec(rest[1])
        assert spec is not None
        is_package = spec.submodule_search_locations is not None
        if rest[1] in NEEDS_LANGCHAIN:
            return
        check_script(f"{rest[1]}.__main__" if is_package else rest[1], rest[2:])
    elif program == "python" and rest[0] == "-c":
        check_code(rest[1])
    elif program == "python" and rest[0] != "-m":
        assert (ROOT / rest[0]).is_file()
        if not rest[0].startswith("examples/"):  # whose options are also TRL's; tests/integration/test_examples.py
            check_script(rest[0], rest[1:])
    elif program == "sorl":
        assert rest[0] in COMMANDS_OF_SORL
    elif program == "accelerate":
        assert rest[0] == "launch"
        script = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        for option, value in zip(rest[1:script:2], rest[2:script:2], strict=True):
            assert option in LAUNCHER_VALUES
            assert option != "--config_file" or (ROOT / value).is_file()
        check_command(["python", *rest[script:]])
    else:
        assert program in FOREIGN or rest[:2] == ["-m", "pip"], f"which command is {program}?"


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_commands_exist(page: str, words: list[str]) -> None:
    check_command(words)
