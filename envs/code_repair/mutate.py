"""Single edits that put one bug into a function, by operator, as replacements of source text.

An edit replaces characters `start` to `end` of a source by `new`. Edits are of the function's body
only: its docstring, its signature and the helpers above it stay. What one edit does to a program
is for a sandbox to find out; here it is held only that the result is another valid program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
}
ARITHMETIC = {
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "//": ("*",),
    "/": ("//",),
    "%": ("//",),
    "**": ("*",),
}
CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "lower": "upper",
    "upper": "lower",
    "islower": "isupper",
    "isupper": "islower",
    "startswith": "endswith",
    "endswith": "startswith",
    "floor": "ceil",
    "ceil": "floor",
    "isalpha": "isalnum",
    "isdigit": "isalpha",
}
_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.And: "and",
    ast.Or: "or",
}


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """One replacement in a source."""

    start: int
    end: int
    operator: str
    """Which kind of mistake it makes."""
    new: str

    def apply(self, source: str) -> str:
        """The source with the bug."""
        return source[: self.start] + self.new + source[self.end :]


class _Text:
    """A source with the places of its nodes as character offsets."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Start and end of a node; what the parser counts is UTF-8 bytes of a line."""
        place = node.__dict__
        start = self._offset(place["lineno"], place["col_offset"])
        return start, self._offset(place["end_lineno"], place["end_col_offset"])

    def _offset(self, line: int, column: int) -> int:
        before = self.lines[line - 1].encode()[:column] if line <= len(self.lines) else b""
        return self.starts[line - 1] + len(before.decode())

    def of(self, node: ast.AST) -> str:
        """A node's source."""
        start, end = self.span(node)
        return self.source[start:end]

    def symbol(self, left: ast.AST, symbol: str, right: ast.AST) -> tuple[int, int]:
        """Where the operator between two nodes stands."""
        start = self.source.index(symbol, self.span(left)[1], self.span(right)[0])
        return start, start + len(symbol)


Found = Iterator[tuple[tuple[int, int], str]]


def _comparisons(node: ast.AST, text: _Text) -> Found:
    if not isinstance(node, ast.Compare):
        return
    operands = [node.left, *node.comparators]
    for left, operator, right in zip(operands, node.ops, node.comparators, strict=False):
        symbol = _SYMBOLS.get(type(operator), "")
        for new in COMPARISONS.get(symbol, ()):
            yield text.symbol(left, symbol, right), new


def _arithmetic(node: ast.AST, text: _Text) -> Found:
    if isinstance(node, ast.BinOp):
        left, right = node.left, node.right
    elif isinstance(node, ast.AugAssign):
        left, right = node.target, node.value
    else:
        return
    symbol = _SYMBOLS.get(type(node.op), "")
    for new in ARITHMETIC.get(symbol, ()):
        yield text.symbol(left, symbol, right), new


def _booleans(node: ast.AST, text: _Text) -> Found:
    if isinstance(node, ast.BoolOp):
        symbol = _SYMBOLS[type(node.op)]
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield text.symbol(left, symbol, right), "or" if symbol == "and" else "and"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield text.span(node), f"bool({text.of(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield text.span(node), str(not node.value)


def _off_by_one(node: ast.AST, text: _Text) -> Found:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield text.span(node), str(node.value + 1)
        if node.value > 0:
            yield text.span(node), str(node.value - 1)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "range":
        end = node.args[1] if len(node.args) > 1 else node.args[0]
        if not isinstance(end, ast.Constant):
            yield text.span(end), f"({text.of(end)}) - 1"
            yield text.span(end), f"({text.of(end)}) + 1"


def _slices(node: ast.AST, text: _Text) -> Found:
    if not isinstance(node, ast.Slice):
        return
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield text.span(bound), f"({text.of(bound)}) + 1"
    start, end = text.span(node)
    if node.lower is None:
        yield (start, start), "1"
    if node.upper is None and node.step is None:
        yield (end, end), "-1"


def _returns(node: ast.AST, text: _Text) -> Found:
    if not isinstance(node, ast.Return) or node.value is None:
        return
    value = node.value
    if isinstance(value, ast.BinOp):
        yield text.span(value), text.of(value.left)
        yield text.span(value), text.of(value.right)
    elif isinstance(value, ast.Call) and value.args and isinstance(value.func, ast.Name):
        yield text.span(value), text.of(value.args[0])
    elif isinstance(value, ast.Compare | ast.BoolOp):
        yield text.span(value), f"not ({text.of(value)})"
    elif isinstance(value, ast.Tuple) and len(value.elts) == 2:
        first, second = value.elts
        yield text.span(value), f"({text.of(second)}, {text.of(first)})"


def _branches(node: ast.AST, text: _Text) -> Found:
    if isinstance(node, ast.If | ast.IfExp):
        yield text.span(node.test), f"not ({text.of(node.test)})"
        yield text.span(node.test), "False"
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield text.span(test), f"not ({text.of(test)})"
    elif isinstance(node, ast.Break | ast.Continue):
        yield text.span(node), "pass"


def _calls(node: ast.AST, text: _Text) -> Found:
    if not isinstance(node, ast.Call):
        return
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in CALLS:
        end = text.span(function)[1]
        yield (end - len(name), end), CALLS[name]
    elif name == "sorted" and not node.keywords:
        yield text.span(node), f"list({text.of(node.args[0])})"


OPERATORS: dict[str, Callable[[ast.AST, _Text], Found]] = {
    "comparison": _comparisons,
    "arithmetic": _arithmetic,
    "boolean": _booleans,
    "off_by_one": _off_by_one,
    "slice": _slices,
    "return": _returns,
    "branch": _branches,
    "call": _calls,
}


def edits(source: str, name: str) -> list[Edit]:
    """Every edit of the body of function `name`, sorted, each giving another valid program."""
    text, function = _Text(source), _function(source, name)
    found = set()
    for node in _inside(function):
        for operator, find in OPERATORS.items():
            found |= {Edit(*span, operator, new) for span, new in find(node, text)}
        found |= {Edit(*span, "variable", new) for span, new in _variables(node, text, function)}
    before = ast.dump(ast.parse(source))
    return sorted(edit for edit in found if _is_another(edit.apply(source), before))


def _function(source: str, name: str) -> ast.FunctionDef:
    """The last function of that name: some prompts define helpers above it."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if function.name == name][-1]


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of its body, without docstrings.

    What stands in an f-string is left out: Python versions place it differently.
    """
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not isinstance(node, ast.JoinedStr):
            yield node
            waiting += ast.iter_child_nodes(node)


def _variables(node: ast.AST, text: _Text, function: ast.FunctionDef) -> Found:
    """Another of the function's own names in the place of one that is read."""
    names = {argument.arg for argument in function.args.args}
    names |= {
        each.id
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        for other in sorted(names - {node.id}):
            yield text.span(node), other


def _is_another(source: str, before: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != before
    except (SyntaxError, ValueError):
        return False
