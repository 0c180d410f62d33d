"""A rule file made flat: names evaluated, `under` prefixes joined, groups of `fuse` widened, defs expanded to steps.

What comes out is a list of bound rules in the order of the text, with patterns over whole names and steps that are ops.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define as mutable
from attrs import evolve, field, frozen

from quantrules.diagnostics import Diagnostic, QuantrulesError, RuleError, define
from quantrules.lang import ast
from quantrules.lang.evaluate import Env, evaluate, free_names
from quantrules.lang.mistakes import nearest
from quantrules.names import HOLE
from quantrules.ops.base import REGISTRY, REQUIRED, Op, is_dtype
from quantrules.types import DTYPE_BITS

TWICE = define("QR101", "A name is defined twice")
PARAM = define("QR102", "A parameter is unknown or has a value that is not allowed")
NO_OP = define("QR103", "A step is neither an op nor a def")
ARGUMENT = define("QR104", "An argument does not fit its op")
NO_CASE = define("QR105", "No def of this name holds")
CYCLE = define("QR106", "A def uses itself")
FUSE = define("QR107", "It cannot be told which fused module a rule makes")
SHADOWS = define("QR108", "A capture has the name of a let or param")
UNLIKE = define("QR113", "Patterns of one rule do not have the same wildcards")
ADJACENT = define("QR112", "Two wildcards without text between them")
MOST_STEPS = 1000
LATER = "same at bitcast view transpose rearrange pad unpad slice add mul neg exp log layout".split()  # of the language, not of this version
NOT_YET = define("QR109", "A construct that this version does not bind")


@frozen(eq=False)
class Source:
    pattern: ast.Pattern
    type: ast.TypeExpr | None


@frozen(eq=False)
class BoundStep:
    """An op and its arguments by parameter name, evaluated."""

    op: Op
    args: Mapping[str, Any]
    span: Any


@frozen(eq=False)
class BoundRule:
    """One rule with everything that the text alone settles. `index` is its place among the rules of the file."""

    index: int
    rule: ast.Rule
    sources: tuple[Source, ...]
    steps: tuple[BoundStep, ...]
    targets: tuple[ast.Pattern, ...]  # () : the source, or (drop) none
    excepts: tuple[ast.Pattern, ...]
    section: str

    @property
    def matches(self) -> str:
        return self.steps[0].op.matches

    @property
    def repeated(self) -> set[str]:
        """Names of captures and axes that the targets write, in integer expressions too."""
        return {name for t in self.targets for name in names_read(t)}

    def __str__(self) -> str:
        return " ".join(self.rule.span.source.split())


@mutable
class Scope:
    """What a rule file defines, once it is walked."""

    env: Env
    formats: Mapping[str, Any]
    defs: dict[str, list[ast.Def]] = field(factory=dict)
    lists: dict[str, ast.Alternation | ast.Members] = field(factory=dict)
    fuses: list[ast.Fuse] = field(factory=list)
    renames: list[ast.Rename] = field(factory=list)
    edits: list[ast.ConfigEdit] = field(factory=list)
    rules: list[BoundRule] = field(factory=list)
    params: dict[str, Any] = field(factory=dict)
    errors: list[Diagnostic] = field(factory=list)  # and notes

    @property
    def failed(self) -> bool:
        return any(d.severity == "error" for d in self.errors)


def flatten(file: ast.File, config: Mapping, formats: Mapping, given: Mapping[str, Any]) -> Scope:
    """Walk a file. All errors of all statements are collected in `Scope.errors`."""
    words = frozenset([*formats, *DTYPE_BITS])
    scope = Scope(Env({}, config, words), formats)
    pending: list[tuple[ast.Rule, tuple[ast.Pattern, ast.Pattern] | None]] = []  # a rule and its prefixes
    for statement, prefix in _walk(file.statements, None):
        with_errors(scope, _define, scope, statement, prefix, given, pending)
    declared = [s.name for s, _ in _walk(file.statements, None) if isinstance(s, ast.Param)]
    for name in sorted(set(given) - set(declared)):
        help = nearest(name, declared) if declared else "the rule file has no params"
        scope.errors.append(Diagnostic(PARAM, f"-D {name} is given, and no param has that name", help=help))
    for rule, prefix in pending:
        with_errors(scope, _bind_rule, scope, rule, prefix)
    return scope


def with_errors(scope, function, *args):
    try:
        return function(*args)
    except QuantrulesError as error:
        scope.errors += error.diagnostics


def _walk(statements, prefix) -> Iterator[tuple[ast.Statement, Any]]:
    for statement in statements:
        if isinstance(statement, ast.Include):
            yield from _walk(statement.body, prefix)
        elif isinstance(statement, ast.Under):
            target = statement.target if statement.target is not None else statement.prefix
            inner = (statement.prefix, target)
            if prefix:
                inner = (joined(prefix[0], statement.prefix), joined(prefix[1], target))
            yield from _walk(statement.body, inner)
        else:
            yield statement, prefix


def _define(scope: Scope, statement, prefix, given, pending) -> None:
    match statement:
        case ast.Rule():
            pending.append((statement, prefix))
        case ast.Param():
            _define_param(scope, statement, given)
        case ast.Let():
            _unused(scope, statement)
            if isinstance(statement.value, (ast.Alternation, ast.Members)):
                scope.lists[statement.name] = statement.value
            else:
                scope.env = scope.env.extend({statement.name: evaluate(statement.value, scope.env)})
        case ast.Def():
            format = scope.formats.get(statement.name)
            if statement.name in REGISTRY or is_dtype(statement.name) or format and not format.is_dense:
                raise RuleError(
                    Diagnostic(
                        TWICE, f"`{statement.name}` is the name of an op, a dtype or a format", statement.span, help="give the def another name"
                    )
                )
            scope.defs.setdefault(statement.name, []).append(statement)
        case ast.Fuse():
            scope.fuses.append(statement)
        case ast.Rename():
            scope.renames.append(_bind_rename(scope, statement, prefix))
        case ast.ConfigEdit():
            scope.edits.append(statement)
        case ast.Tie():
            raise RuleError(Diagnostic(NOT_YET, "`tie` is not bound by this version", statement.span, help="write a rule for each of the tied keys"))
        case ast.SchemaKey():
            raise RuleError(
                Diagnostic(
                    NOT_YET,
                    "a key of a schema is not checked by this version",
                    statement.span,
                    help="`PATTERN : TYPE → OPS` asserts a type in a rule",
                )
            )
        case ast.Side():
            scope.errors.append(
                Diagnostic(NOT_YET, f"`{statement.side} {statement.name}` is not checked by this version", statement.span, severity="note")
            )


def _unused(scope: Scope, statement) -> None:
    if statement.name in scope.env.names or statement.name in scope.lists:
        raise RuleError(Diagnostic(TWICE, f"`{statement.name}` is defined already", statement.span, help="names are defined once"))


def _define_param(scope: Scope, statement: ast.Param, given: Mapping[str, Any]) -> None:
    if statement.name in scope.params:  # the first `param` of a name beats later ones
        return
    _unused(scope, statement)
    choices = [evaluate(c, scope.env) for c in statement.choices]
    value = given.get(statement.name, choices[0])
    if isinstance(value, str) and not isinstance(choices[0], str):
        value = _as_literal(value, choices[0])
    free = len(choices) == 1 and type(value) is type(choices[0])
    wrong = value not in choices and not free
    scope.params[statement.name] = choices[0] if wrong else value
    scope.env = scope.env.extend({statement.name: scope.params[statement.name]})
    if wrong:
        allowed = "true or false" if len(choices) == 1 and isinstance(choices[0], bool) else " | ".join(dict.fromkeys(map(json.dumps, choices)))
        raise RuleError(Diagnostic(PARAM, f"-D {statement.name}={value}: it is one of {allowed}", statement.span, "allowed here"))


def _as_literal(text: str, like: Any) -> Any:
    if isinstance(like, bool):
        return {"true": True, "false": False}.get(text, text)
    try:
        return int(text) if isinstance(like, int) else float(text) if isinstance(like, float) else text
    except ValueError:
        return text


# ---------------------------------------------------------------------------------------------------------- patterns


def joined(prefix: ast.Pattern, pattern: ast.Pattern) -> ast.Pattern:
    return evolve(pattern, nodes=merged((*prefix.nodes, ast.Lit("."), *pattern.nodes)))


def merged(nodes) -> tuple:
    """Literals side by side become one, so that each wildcard is followed by all the text that follows it."""
    merged: list = []
    for node in nodes:
        if merged and isinstance(node, ast.Lit) and isinstance(merged[-1], ast.Lit):
            merged[-1] = ast.Lit(merged[-1].text + node.text, span=merged[-1].span)
        else:
            merged.append(node)
    return tuple(merged)


def _resolved(scope: Scope, pattern: ast.Pattern) -> ast.Pattern:
    """References to lists of a `let` become the lists."""
    nodes = []
    for node in pattern.nodes:
        if isinstance(node, ast.Reference):
            if node.let not in scope.lists:
                raise RuleError(Diagnostic(NO_OP, f"no `let` list is called {node.let}", node.span, help=nearest(node.let, scope.lists)))
            node = evolve(scope.lists[node.let], name=node.name, span=node.span)
        elif isinstance(node, ast.Lit) and HOLE in node.text:
            raise RuleError(Diagnostic(NO_OP, "a name holds no NUL character", node.span))
        nodes.append(node)
    return evolve(pattern, nodes=merged(nodes))


def as_target(pattern: ast.Pattern) -> ast.Pattern:
    """The target of a rule that writes none: each wildcard of the source is repeated."""
    nodes, unnamed = [], 0
    for node in pattern.nodes:
        if isinstance(node, ast.Alternation):
            unnamed += 1
            node = ast.Capture(node.name or f"|{unnamed}", span=node.span)
        nodes.append(node)
    return evolve(pattern, nodes=tuple(nodes))


def _bind_rename(scope: Scope, statement: ast.Rename, prefix) -> ast.Rename:
    sides = (statement.left, statement.right)
    left, right = (_resolved(scope, joined(p, s) if prefix else s) for p, s in zip(prefix or sides, sides))
    _check_apart(left)
    listed = next((n for p in (left, right) for n in p.nodes if isinstance(n, ast.Members)), None)
    if listed:
        raise RuleError(
            Diagnostic(
                NO_OP,
                "a rename takes names one by one, and braces with `,` gather them",
                listed.span,
                help="write an alternation, as in `rename {x:a=c|b=d}.* → {x}.*`",
            )
        )
    return evolve(statement, left=left, right=right)


def _check_apart(pattern: ast.Pattern) -> None:
    wild = (ast.Star, ast.Capture, ast.IntForm)
    if any(isinstance(left, wild) and isinstance(right, wild) for left, right in zip(pattern.nodes, pattern.nodes[1:])):
        raise RuleError(
            Diagnostic(
                ADJACENT, "where one wildcard ends and the next begins cannot be told", pattern.span, help="write the text that stands between them"
            )
        )


def wildcards(pattern: ast.Pattern) -> set[str]:
    return {n.name for n in pattern.nodes if getattr(n, "name", "")}


def names_read(pattern: ast.Pattern) -> set[str]:
    """Names of the wildcards of a pattern, and those that its integer forms use."""
    return wildcards(pattern).union(*(free_names(n.value) for n in pattern.nodes if isinstance(n, ast.IntForm)))


# ------------------------------------------------------------------------------------------------------------- rules


def _bind_rule(scope: Scope, rule: ast.Rule, prefix) -> None:
    sources = []
    for source in rule.sources:
        if source.pattern.file is not None or source.pattern.source:
            raise RuleError(Diagnostic(NOT_YET, "`@ FILE` and `source:` are not bound by this version", source.span))
        pattern = _resolved(scope, source.pattern)
        _check_apart(pattern)
        sources.append(Source(pattern, source.type))
    _check_same_wildcards(scope, sources)
    filled = next((m for s in sources for n in s.pattern.nodes if isinstance(n, ast.Members) for m in n.items if m.fill), None)
    if filled:
        raise RuleError(Diagnostic(NOT_YET, "`?=zeros` is not bound by this version", filled.span, help="`?` lets the unit go without the member"))
    targets = [_resolved(scope, t) for t in rule.targets]
    steps = tuple(itertools.islice(_steps(scope, rule.pipeline, scope.env, ()), MOST_STEPS + 1))
    if len(steps) > MOST_STEPS:
        raise RuleError(Diagnostic(CYCLE, f"the defs of this rule expand to more than {MOST_STEPS} steps", rule.span))
    if steps[-1].op.name == "drop" and (targets or len(steps) > 1):
        raise RuleError(Diagnostic(ARGUMENT, "`drop` stands alone and has no target", rule.span, help="write `PATTERN → drop`"))
    if any(s.op.name == "cat" for s in steps) and not any(isinstance(n, ast.Members) for s in sources for n in s.pattern.nodes):
        sources = _widened(scope, rule, sources, targets)
    if not targets and steps[0].op.name != "drop":
        joins = [s.op.name for s in steps if s.op.name in ("cat", "split")][-1:] == ["cat"]
        targets = [joins and _fused(scope, rule, sources[0].pattern) or as_target(sources[0].pattern)]
    if prefix:
        prefix = tuple(_resolved(scope, p) for p in prefix)
        _check_apart(prefix[0])
        sources = [evolve(s, pattern=joined(prefix[0], s.pattern)) for s in sources]
        targets = [joined(prefix[1], t) for t in targets]
    shadowed = {n for s in sources for n in wildcards(s.pattern)} & (set(scope.env.names) | set(scope.lists))
    if shadowed:
        raise RuleError(
            Diagnostic(SHADOWS, f"the capture {sorted(shadowed)[0]} has the name of a let or param", rule.span, help="rename the capture")
        )
    excepts = tuple(joined(prefix[0], e) if prefix else e for e in (_resolved(scope, e) for e in rule.excepts))
    scope.rules.append(BoundRule(len(scope.rules), rule, tuple(sources), steps, tuple(targets), excepts, rule.section))


def _check_same_wildcards(scope: Scope, sources: list[Source]) -> None:
    """Of `P, Q → …`: what tells units apart must stand in each pattern."""

    def wild(pattern: ast.Pattern):
        nodes = [n for n in pattern.nodes if not isinstance(n, ast.Lit)]
        lists = [(n.name, tuple(m.text for m in n.items)) for n in nodes if isinstance(n, ast.Members)]
        return (
            names_read(pattern) - set(scope.env.names),
            [type(n) for n in nodes if isinstance(n, (ast.Star, ast.Alternation)) and not n.name],
            lists,
        )

    for source in sources[1:]:
        if wild(source.pattern) != wild(sources[0].pattern):
            raise RuleError(
                Diagnostic(
                    UNLIKE,
                    "the patterns of one rule have the same captures, stars and lists",
                    source.pattern.span,
                    "this one has others",
                    related=((sources[0].pattern.span, "than this one"),),
                )
            )


def _widened(scope: Scope, rule: ast.Rule, sources: list[Source], targets: list[ast.Pattern]):
    """A rule with `cat` whose pattern ends in a member of a `fuse` stands for the whole group."""
    last = sources[0].pattern.nodes[-1] if len(sources) == 1 else None
    if not isinstance(last, ast.Lit):
        return sources
    head, dot, leaf = last.text.rpartition(".")
    ends = {f.name for f in scope.fuses if any(m.text == leaf for m in f.members)}
    if targets:
        tail = targets[0].nodes[-1]
        made = tail.text.rpartition(".")[2] if isinstance(tail, ast.Lit) else ""
        ends &= {made}
    if not ends:
        return sources
    if len(ends) > 1:
        raise RuleError(
            Diagnostic(FUSE, f"`{leaf}` is a member of {' and of '.join(sorted(ends))}", rule.span, help="write the members in braces, or a target")
        )
    fuse = next(f for f in scope.fuses if f.name in ends and any(m.text == leaf for m in f.members))
    start = (*sources[0].pattern.nodes[:-1], *([ast.Lit(head + dot)] if dot else []))
    return [evolve(sources[0], pattern=evolve(sources[0].pattern, nodes=(*start, ast.Members("", fuse.members, span=last.span))))]


def _fused(scope: Scope, rule: ast.Rule, pattern: ast.Pattern) -> ast.Pattern | None:
    """The target that `fuse` gives a pattern which ends in the members of a group, in their order."""
    *start, last = pattern.nodes
    listed = [m.text for m in last.items] if isinstance(last, ast.Members) else []
    names = sorted({f.name for f in scope.fuses if [m.text for m in f.members] == listed})
    if len(names) > 1:
        raise RuleError(Diagnostic(FUSE, f"{', '.join(listed)} are the members of {' and of '.join(names)}", rule.span, help="write a target"))
    return evolve(pattern, nodes=merged((*start, ast.Lit(names[0])))) if names else None


# ------------------------------------------------------------------------------------------------------------- steps


def _steps(scope: Scope, pipeline: ast.Pipeline, env: Env, inside: tuple[str, ...]) -> Iterator[BoundStep]:
    for call in pipeline.steps:
        if call.name in scope.defs:
            yield from _expand_def(scope, call, env, inside)
        elif call.name in REGISTRY:
            op = REGISTRY[call.name]
            yield from _bound(op, bind_args(scope, op, call, env), call.span)
        else:
            help = nearest(call.name, [*scope.defs, *REGISTRY])
            if call.name in LATER:
                raise RuleError(Diagnostic(NOT_YET, f"the op `{call.name}` is not there yet", call.span, "of a later version"))
            if call.name in scope.formats:
                help = f"`quant({call.name})` makes that format, `unpack({call.name})` requires it"
            elif is_dtype(call.name):
                help = f"`cast({call.name})` makes that dtype"
            raise RuleError(Diagnostic(NO_OP, f"`{call.name}` is neither an op nor a def", call.span, "not known", help=help))


def _bound(op: Op, args: dict, span) -> Iterator[BoundStep]:
    expanded = op.expand(args)
    if expanded is None:
        yield BoundStep(op, args, span)
        return
    for name, inner in expanded:
        other = REGISTRY[name]
        yield from _bound(other, {p.name: inner.get(p.name, p.default) for p in other.params}, span)


def _expand_def(scope: Scope, call: ast.Call, env: Env, inside: tuple[str, ...]) -> Iterator[BoundStep]:
    if call.name in inside:
        raise RuleError(Diagnostic(CYCLE, f"`{call.name}` uses itself", call.span))
    for candidate in scope.defs[call.name]:
        if len(call.args) != len(candidate.params) or any(a.name for a in call.args):
            raise RuleError(
                Diagnostic(ARGUMENT, f"`{call.name}` takes ({', '.join(candidate.params)})", call.span, related=((candidate.span, "defined here"),))
            )
        local = env.extend({p: _def_argument(scope, a, env) for p, a in zip(candidate.params, call.args)})
        if candidate.when is None or evaluate(candidate.when, local):
            yield from _steps(scope, candidate.pipeline, local, (*inside, call.name))
            return
    raise RuleError(
        Diagnostic(
            NO_CASE,
            f"no `def {call.name}` has a condition that holds",
            call.span,
            related=tuple((d.when.span, "false") for d in scope.defs[call.name]),
            help="add a def without `when`, as the last",
        )
    )


def _def_argument(scope: Scope, argument: ast.Argument, env: Env):
    value = argument.value
    if isinstance(value, ast.Name) and value.name not in env.names and (is_dtype(value.name) or value.name in scope.formats):
        return value.name
    return evaluate(value, env)


def bind_args(scope: Scope, op: Op, call: ast.Call, env: Env) -> dict[str, Any]:
    """Arguments by parameter: names first, then each positional one goes to the first free parameter that takes it."""
    args: dict[str, Any] = {}
    extra: dict[str, int] = {}
    for argument in call.args:
        sizes = next((p for p in op.params if p.kind == "sizes"), None)
        if argument.name and any(p.name == argument.name for p in op.params):
            param = next(p for p in op.params if p.name == argument.name)
            args[param.name] = _argument(scope, op, param, argument, env, must=True)
        elif argument.name and sizes:
            extra[argument.name] = evaluate(argument.value, env)
        elif argument.name:
            raise _bad(op, argument, f"`{op.name}` has no parameter {argument.name}", nearest(argument.name, [p.name for p in op.params]))
        else:
            _positional(scope, op, argument, env, args)
    if extra:
        args[next(p.name for p in op.params if p.kind == "sizes")] = extra
    for param in op.params:
        if param.name not in args:
            if param.default is REQUIRED:
                words = [a for a in call.args if not a.name and isinstance(a.value, ast.Name)]
                if param.kind == "format" and words:
                    raise _bad(op, words[0], f"no format is called `{words[0].value.name}`", nearest(words[0].value.name, scope.formats))
                raise RuleError(
                    Diagnostic(
                        ARGUMENT,
                        f"`{op.name}` lacks its {param.name}: {param.help}",
                        call.span,
                        "missing",
                        help=f"for example `{op.example}`" if op.example else "",
                    )
                )
            args[param.name] = param.default
    return args


def _positional(scope, op, argument, env, args) -> None:
    for param in op.params:
        if param.name not in args:
            value = _argument(scope, op, param, argument, env, must=False)
            if value is not None:
                args[param.name] = value
                return
    takes = "; ".join(f"{p.name}: {p.help}" for p in op.params) or "no arguments"
    raise _bad(op, argument, f"`{argument.span.source if argument.span else '?'}` is no argument of `{op.name}`", f"it takes {takes}")


def _bad(op, argument, message, help="") -> RuleError:
    return RuleError(Diagnostic(ARGUMENT, message, argument.span, help=help))


def _argument(scope: Scope, op: Op, param, argument: ast.Argument, env: Env, must: bool) -> Any:
    """The value of an argument for a parameter of its kind, or None (an error where it `must` fit)."""
    value = argument.value
    word = value.name if isinstance(value, ast.Name) else None
    if word is not None and isinstance(env.names.get(word), str):
        word = env.names[word]
    result = None
    if param.kind == "dtype":
        result = word if word and is_dtype(word) else None
    elif param.kind == "format":
        result = word if word in scope.formats else None
    elif param.kind in ("axis", "word", "spelling"):
        result = word if word and (not param.choices or word in param.choices) else None
        if param.kind == "axis" and word and (is_dtype(word) or word in env.names):
            result = None
    elif word is None or word in env.names:
        evaluated = None if isinstance(value, ast.Pipeline) else evaluate(value, env)
        kinds = {"int": int, "ints": list, "sizes": list, "text": str, "number": (int, float)}
        if isinstance(evaluated, kinds[param.kind]) and not isinstance(evaluated, bool):
            result = evaluated
    if result is None and must:
        known = {"dtype": "a dtype such as bf16", "format": "one of " + ", ".join(scope.formats)}
        expected = " | ".join(param.choices) or known.get(param.kind, f"a {param.kind}")
        raise _bad(op, argument, f"{param.name} of `{op.name}` is {expected}")
    return result
