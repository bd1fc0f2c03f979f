"""Follows a call to the functions of the same tree that it may reach, and says whether they take its arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .rewrite import Read
from .scopes import Function, parse

#: Names are followed through so many imports, assignments and returns; more is a circle.
DEEPEST = 12


@dataclass(frozen=True)
class Reached:
    """One function that a call may reach: where it is, and its definition. No definition: it cannot be followed."""

    file: str
    function: Function | None


class Follower:
    """Follows names of Python files of one tree.

    Args:
        read: content of a file of the tree, None where the tree lacks it.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    def reach(self, file: str, scopes: list[Function], expression: ast.expr, depth: int = 0) -> Iterator[Reached]:
        """Functions that an expression may be, as far as names, imports, returns and tables tell.

        Args:
            file: where the expression stands.
            scopes: the functions around it, outermost first.
            expression: what is called.

        Yields:
            Nothing for what another package brings or an object holds.
        """
        if depth > DEEPEST:
            yield Reached(file, None)
        elif isinstance(expression, ast.Name):
            yield from self._name(file, scopes, expression.id, depth)
        elif isinstance(expression, ast.IfExp):
            for branch in (expression.body, expression.orelse):
                yield from self.reach(file, scopes, branch, depth + 1)
        elif isinstance(expression, ast.Subscript):
            for value in self._table(file, scopes, expression.value, depth):
                yield from self.reach(value[0], [], value[1], depth + 1)
        elif isinstance(expression, ast.Call):
            yield from self._returned(file, scopes, expression, depth)
        elif isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            module = self._imported(file, scopes, expression.value.id)
            if module is not None and self._file(".".join(filter(None, module))) is not None:
                target = self._file(".".join(filter(None, module)))
                yield from self._name(target or file, [], expression.attr, depth + 1)

    def _name(self, file: str, scopes: list[Function], name: str, depth: int) -> Iterator[Reached]:
        for number in range(len(scopes), -1, -1):
            body = scopes[number - 1].body if number else self._module(file)
            found = False
            for node in _bindings(body, name):
                found = True
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield Reached(file, node)
                elif isinstance(node, ast.Assign):
                    before = len(scopes[:number])
                    followed = list(self.reach(file, scopes[:before], node.value, depth + 1))
                    yield from followed or [Reached(file, None)]
                elif isinstance(node, ast.ImportFrom):
                    yield from self._import(file, node, name, depth)
            if found:
                return
            if number and name in {a.arg for a in ast.walk(scopes[number - 1].args) if isinstance(a, ast.arg)}:
                yield Reached(file, None)
                return

    def _import(self, file: str, node: ast.ImportFrom, name: str, depth: int) -> Iterator[Reached]:
        target = self._file(_absolute(file, node))
        if target is None:
            return
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                yield from self._name(target, [], alias.name, depth + 1)

    def _returned(self, file: str, scopes: list[Function], call: ast.Call, depth: int) -> Iterator[Reached]:
        if isinstance(call.func, ast.Name | ast.Attribute) and ast.unparse(call.func) in (
            "partial",
            "functools.partial",
        ):
            yield from self.reach(file, scopes, call.args[0], depth + 1)
            return
        for maker in self.reach(file, scopes, call.func, depth + 1):
            if maker.function is None:
                yield maker
                continue
            returns = [node.value for node in ast.walk(maker.function) if isinstance(node, ast.Return) and node.value]
            inner = {
                id(node.value)
                for other in ast.walk(maker.function)
                if isinstance(other, ast.FunctionDef | ast.AsyncFunctionDef) and other is not maker.function
                for node in ast.walk(other)
                if isinstance(node, ast.Return)
            }
            for value in returns:
                if id(value) not in inner:
                    followed = list(self.reach(maker.file, [maker.function], value, depth + 1))
                    yield from followed or [Reached(maker.file, None)]

    def _table(
        self, file: str, scopes: list[Function], expression: ast.expr, depth: int
    ) -> Iterator[tuple[str, ast.expr]]:
        if not isinstance(expression, ast.Name):
            return
        for number in range(len(scopes), -1, -1):
            body = scopes[number - 1].body if number else self._module(file)
            for node in _bindings(body, expression.id):
                value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                if isinstance(value, ast.Dict):
                    yield from ((file, item) for item in value.values)
                elif isinstance(node, ast.ImportFrom) and (target := self._file(_absolute(file, node))):
                    yield from self._table(target, [], expression, depth + 1)

    def _imported(self, file: str, scopes: list[Function], name: str) -> tuple[str, str] | None:
        for body in [*(scope.body for scope in reversed(scopes)), self._module(file)]:
            for node in _bindings(body, name):
                if isinstance(node, ast.ImportFrom):
                    return _absolute(file, node), next(a.name for a in node.names if (a.asname or a.name) == name)
                if isinstance(node, ast.Import):
                    return next(a.name for a in node.names if (a.asname or a.name).split(".")[0] == name), ""
        return None

    def binds(self, module: str, name: str) -> bool | None:
        """Whether a module of the tree binds a name at its top; None for a module of another package."""
        if not module.startswith("verl"):
            return None
        target = self._file(module)
        if target is None:
            return False
        if any(True for _ in _bindings(self._module(target), name)) or self._file(f"{module}.{name}") is not None:
            return True
        # `from x import *` and module-level __getattr__ bind what nobody can see
        return any(
            (isinstance(node, ast.ImportFrom) and node.names[0].name == "*")
            or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
            for node in ast.walk(parse(self._read(target) or b""))
        )

    def _module(self, file: str) -> list[ast.stmt]:
        try:
            return parse(self._read(file) or b"").body
        except SyntaxError:
            return []

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if self._read(name) is not None), None)


def _absolute(file: str, node: ast.ImportFrom) -> str:
    package = file.split("/")[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *filter(None, [node.module])])


def _bindings(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Statements of a body, nested blocks included and nested functions aside, that bind a name."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name).split(".")[0] == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for target in targets for t in ast.walk(target)):
                yield node
        for block in ("body", "orelse", "finalbody"):
            yield from _bindings(getattr(node, block, []), name)
        for handler in getattr(node, "handlers", []):
            yield from _bindings(handler.body, name)


def refusal(function: Function, call: ast.Call, method: bool = False) -> str | None:
    """Why a function would not take a call's arguments; None where it does, or where nobody can tell.

    `*`, `**` and decorators hide what is handed over.

    Args:
        method: its first parameter is given by the object.
    """
    if function.decorator_list:
        return None
    said = function.args
    plain = [a.arg for a in [*said.posonlyargs, *said.args]][1 if method else 0 :]
    by_name = {a.arg for a in [*said.args, *said.kwonlyargs]}
    named = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    unknown = sorted(named - by_name)
    if unknown and said.kwarg is None:
        return f"takes no {', '.join(unknown)}"
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    if len(call.args) > len(plain) and said.vararg is None:
        return f"takes {len(plain)} arguments by position, not {len(call.args)}"
    if twice := sorted(named.intersection(plain[: len(call.args)])):
        return f"gets {', '.join(twice)} twice"
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    optional = set(plain[len(plain) - len(said.defaults) :]) if said.defaults else set()
    optional |= {a.arg for a, default in zip(said.kwonlyargs, said.kw_defaults, strict=True) if default is not None}
    needed = [name for name in [*plain[len(call.args) :], *(a.arg for a in said.kwonlyargs)] if name not in optional]
    if missing := [name for name in needed if name not in named]:
        return f"lacks {', '.join(missing)}"
    return None
