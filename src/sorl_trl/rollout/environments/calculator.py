"""A calculator for policies: an expression in, its value or what is wrong with it out. Nothing is ever executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

MAX_CHARACTERS = 500
MAX_BITS = 4096
"""Of a whole number: about 1,200 digits. Larger ones would take time and memory without end."""
MAX_DECIMALS = 100

Value: TypeAlias = "int | float"


class _Refused(Exception):
    """What is to be said to the policy."""


def calculate(expression: str) -> str:
    """
    Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, round and max.

    Returns:
        Whole numbers exactly, up to `MAX_BITS` bits, others with 12 digits; or what is wrong with the expression. It
        raises nothing, whatever it reads.
    """
    try:
        if len(expression) > MAX_CHARACTERS:
            raise _Refused(f"it has more than {MAX_CHARACTERS} characters")
        return _shown(_value(ast.parse(expression.strip(), mode="eval").body))
    except _Refused as error:
        return f"error: {error}"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: the number is too large"
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return "error: this is no arithmetic expression that has a value"


def _value(node: ast.expr) -> Value:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        if node.keywords:
            raise _Refused(f"{node.func.id} takes no names")
        return _bounded(FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise _Refused(_why(node))


def _why(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        return "a power is written with **"
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(name, ast.Name):
        return f"{name.id!r} is unknown: there are {', '.join([*CONSTANTS, *FUNCTIONS])}"
    return f"only numbers, + - * / // % **, parentheses, {', '.join([*CONSTANTS, *FUNCTIONS])} can be used"


def _bounded(value: Any) -> Value:
    if isinstance(value, complex):
        raise _Refused("it is no real number")
    is_too_large = value.bit_length() > MAX_BITS if isinstance(value, int) else not math.isfinite(value)
    if is_too_large:
        raise OverflowError
    return value  # type: ignore[no-any-return]


def _power(base: Value, exponent: Value) -> Any:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    # Before it is computed: a tower of powers would never end. The base is at least 2 to the power of its bits less 1.
    if is_whole and abs(base) > 1 and (base.bit_length() - 1) * exponent > MAX_BITS:  # type: ignore[union-attr]
        raise OverflowError
    return base**exponent


def _round(value: Value, decimals: Value = 0) -> Value:
    if not isinstance(decimals, int) or abs(decimals) > MAX_DECIMALS:
        raise _Refused(f"round takes up to {MAX_DECIMALS} decimals")
    return round(value, decimals) if decimals else round(value)


def _shown(value: Value) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": _round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
