"""Which code an edit may take away: `ci/known.lock` holds the digests of every span that a rule was seen to replace.

A digest is of syntax, not of text: formatting, comments, quotes and brackets without meaning make no difference, and
what upstream wrote is not in this repository. A span is the list of its statements in order, nested ones after their
header, so that a fork's own statement inside it can be named.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .. import REPOSITORY

LOCK = REPOSITORY / "ci" / "known.lock"


@dataclass(frozen=True)
class Statement:
    """One statement of a span: its digest, and its first line in the span, counted from 0."""

    digest: str
    line: int


class Form(msgspec.Struct, frozen=True, order=True):
    """One form of a span.

    Attributes:
        statements: digests, in order.
        seen: trees in which the rule met it, the first of them alone.
    """

    statements: list[str]
    seen: str


class Span(msgspec.Struct):
    """What a rule was seen to replace: forms, and digests of the comments in them."""

    forms: list[Form] = []
    comments: list[str] = []


class Known:
    """The known spans of all rules, by `patch/rule`."""

    def __init__(self, spans: dict[str, Span]) -> None:
        self.spans = spans

    @classmethod
    def read(cls, path: Path = LOCK) -> Known:
        """The spans of the lock; none where there is no lock yet."""
        return cls(msgspec.json.decode(path.read_bytes(), type=dict[str, Span]) if path.exists() else {})

    def foreign(self, key: str, span: str) -> list[int] | None:
        """What a span has that no known form has; None where it is one of them.

        Args:
            key: `patch/rule`.
            span: text, its first line indented like its others.

        Returns:
            Lines of the span, counted from 0: of its own statements, or of those beside which a known one is missing.
        """
        statements = syntax(span)
        forms = [form.statements for form in self.spans.get(key, Span()).forms]
        digests = [statement.digest for statement in statements]
        if digests in forms:
            return None
        best: list[int] = [statement.line for statement in statements]
        for form in forms:
            matcher = difflib.SequenceMatcher(a=form, b=digests, autojunk=False)
            lines = set[int]()
            for tag, _, _, start, end in matcher.get_opcodes():
                if tag == "delete" and statements:
                    lines.add(statements[min(start, len(statements) - 1)].line)
                elif tag != "equal":
                    lines |= {statement.line for statement in statements[start:end]}
            if lines and len(lines) < len(best):
                best = sorted(lines)
        return best

    def own_comments(self, key: str, span: str) -> list[str]:
        """Comments of a span that no known form of it has, in order."""
        known = set(self.spans.get(key, Span()).comments)
        return [comment for comment in comments(span) if _digest(comment) not in known]


class Learning(Known):
    """Knows everything, and keeps what it is asked."""

    def __init__(self, seen: str, spans: dict[str, Span]) -> None:
        super().__init__(spans)
        self._seen = seen

    def foreign(self, key: str, span: str) -> list[int] | None:
        digests, kept = [statement.digest for statement in syntax(span)], self.spans.setdefault(key, Span())
        if digests not in [form.statements for form in kept.forms]:
            kept.forms.append(Form(digests, self._seen))
        return None

    def own_comments(self, key: str, span: str) -> list[str]:
        kept = self.spans.setdefault(key, Span())
        kept.comments = sorted({*kept.comments, *map(_digest, comments(span))})
        return []

    def write(self, path: Path = LOCK) -> None:
        """Writes the lock, sorted, so that its diff shows what changed."""
        ordered = {key: span for key, span in sorted(self.spans.items()) if span.forms or span.comments}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered)) + b"\n")


def syntax(span: str) -> list[Statement]:
    """Statements of a span; an argument, a parameter, a comment or any other text is one of its own kind."""
    text = textwrap.dedent(span)
    for before, after in (("", ""), ("(", "\n)"), ("f(", "\n)"), ("def f(", "\n): pass")):
        try:
            module = ast.parse(before + text + after)
        except SyntaxError:
            continue
        if module.body:
            return list(_statements(module.body, ""))
    return [Statement(_digest(text), 0)]


def comments(span: str) -> list[str]:
    """Comments of a span, each with its white space folded."""
    if span.lstrip().startswith("#"):
        return [" ".join(line.split()) for line in span.splitlines() if line.strip()]
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(f"(\n{span}\n)").readline):
            if token.type == tokenize.COMMENT:
                found.append(" ".join(token.string.split()))
    except (tokenize.TokenError, IndentationError):  # a piece of a string or the like: it has no comment of its own
        return []
    return found


def canonical(node: object) -> str:
    """Text of a syntax tree that is the same on every Python: fields in order, without what is empty or only layout."""
    if isinstance(node, ast.AST):
        fields = []
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if value not in (None, []) and name not in ("ctx", "kind", "type_comment"):
                fields.append(f"{name}={canonical(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    return repr(node)


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _statements(body: list[ast.stmt], depth: str) -> Iterator[Statement]:
    """Every statement of a body, a header before what it holds; the digest says how deep it stands, and in what."""
    for node in body:
        blocks = {name: getattr(node, name) for name in _BLOCKS if isinstance(getattr(node, name, None), list)}
        # Python before 3.12 knows no type parameters
        header = {name: value for name, value in ast.iter_fields(node) if name not in (*blocks, "type_params")}
        shallow = f"{type(node).__name__}{sorted((name, canonical(value)) for name, value in header.items())}"
        yield Statement(_digest(depth + shallow), node.lineno - 1)
        for name, block in blocks.items():
            yield from _statements(block, f"{depth}{name}/")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
