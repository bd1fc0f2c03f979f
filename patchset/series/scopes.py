"""What the functions of a Python file read, bind and call, so that a file before and after an edit can be compared."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

from .known import canonical

Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=256)
def parse(data: bytes) -> ast.Module:
    """Syntax tree of a file.

    Raises:
        SyntaxError: it is no Python.
    """
    return ast.parse(data)


@lru_cache(maxsize=256)
def functions(data: bytes) -> dict[str, Function]:
    """Qualified name -> definition of every function; of several with one name the last."""
    found: dict[str, Function] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = child
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                walk(child, f"{prefix}{child.name}.")
            else:
                walk(child, prefix)

    walk(parse(data), "")
    return found


def parameters(function: Function) -> list[str]:
    """Names of all parameters."""
    said = function.args
    several = [said.vararg, said.kwarg]
    return [a.arg for a in [*said.posonlyargs, *said.args, *said.kwonlyargs, *(a for a in several if a is not None)]]


def read_parameters(function: Function) -> set[str]:
    """Parameters that the body reads."""
    loads = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)
             if isinstance(node.ctx, ast.Load)}  # fmt: skip
    return loads.intersection(parameters(function))


def calls(function: Function) -> Iterator[tuple[str, ast.Call]]:
    """(canonical text, call) of every call in a function's own body, nested functions aside."""
    for node in _own(function.body):
        if isinstance(node, ast.Call):
            yield canonical(node), node


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _own(ast.iter_child_nodes(node))


def maybe_unbound(function: Function) -> dict[str, int]:
    """Locals that some path reads before it binds them -> line of the first such read."""
    return _Flow(function).loose


class _Flow:
    """Walks every path through a function once, with the names that are bound for certain."""

    def __init__(self, function: Function) -> None:
        self.loose: dict[str, int] = {}
        outer = {name for node in _own(function.body) if isinstance(node, ast.Global | ast.Nonlocal)
                 for name in node.names}  # fmt: skip
        self._locals = set(_bound(function.body)) - outer
        self._block(function.body, set(parameters(function)))

    def _block(self, body: Iterable[ast.stmt], bound: set[str]) -> set[str] | None:
        """Names that are bound after a block; None where no path gets there."""
        now: set[str] | None = set(bound)
        for statement in body:
            if now is None:
                return None
            now = self._statement(statement, now)
        return now

    def _statement(self, node: ast.stmt, bound: set[str]) -> set[str] | None:
        if isinstance(node, ast.If):
            self._reads(node.test, bound)
            return _both(self._block(node.body, bound), self._block(node.orelse, bound))
        if isinstance(node, ast.For | ast.AsyncFor):
            self._reads(node.iter, bound)
            self._block(node.body, bound | set(_targets(node.target)))
            return _both(bound, self._block(node.orelse, bound))
        if isinstance(node, ast.While):
            self._reads(node.test, bound)
            self._block(node.body, bound)
            return _both(bound, self._block(node.orelse, bound))
        if isinstance(node, ast.Try):
            after = self._block([*node.body, *node.orelse], bound)
            for handler in node.handlers:
                after = _both(after, self._block(handler.body, bound | ({handler.name} if handler.name else set())))
            last = self._block(node.finalbody, bound)
            return None if after is None or last is None else after | last
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._reads(item.context_expr, bound)
                bound |= set(_targets(item.optional_vars)) if item.optional_vars else set()
            return self._block(node.body, bound)
        if isinstance(node, ast.Match):
            self._reads(node.subject, bound)
            after = set(bound)
            for case in node.cases:
                after = _both(after, self._block(case.body, bound | set(_captures(case.pattern)))) or set()
            return after
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return bound | {node.name}
        for part in _in_order(node):
            self._reads(part, bound)
        if isinstance(node, ast.Delete):
            return bound - {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
            return None
        return bound | set(_bound([node]))

    def _reads(self, node: ast.AST, bound: set[str]) -> None:
        inner = [part for part in ast.walk(node) if isinstance(part, ast.comprehension | ast.NamedExpr)]
        hidden = {name for part in inner for name in _targets(part.target)}
        for part in _eager(node):
            if not isinstance(part, ast.Name) or not isinstance(part.ctx, ast.Load):
                continue
            if part.id in self._locals - bound - hidden:
                self.loose.setdefault(part.id, part.lineno)


def _in_order(node: ast.stmt) -> list[ast.AST]:
    """Parts of a simple statement that it evaluates."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return [ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target), node.value]
    if isinstance(node, ast.AnnAssign):  # a local's annotation is not evaluated
        return [part for part in (node.target, node.value) if part is not None]
    return list(ast.iter_child_nodes(node))


def _eager(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is evaluated with it; the bodies of lambdas are not."""
    yield node
    for child in [] if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node):
        yield from _eager(child)


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _targets(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


def _captures(pattern: ast.AST) -> Iterator[str]:
    for part in ast.walk(pattern):
        name = getattr(part, "name", None) or getattr(part, "rest", None)
        if isinstance(name, str):
            yield name


def _bound(body: Iterable[ast.AST]) -> Iterator[str]:
    """Names that statements bind anywhere in them, nested functions aside."""
    for node in _own(body):
        if isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.pattern):
            yield from _captures(node)
