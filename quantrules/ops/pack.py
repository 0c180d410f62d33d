"""pack: write a value in a spelling."""

from __future__ import annotations

from attrs import evolve

from quantrules.diagnostics import define
from quantrules.ops.base import Context, Need, Op, Param, Refused, Value, register
from quantrules.ops.codecs import codec_of, decode_numbers
from quantrules.ops.lift import SEVERAL_SCALES, WRONG_ARGUMENT, check_parts
from quantrules.ops.torch_views import flat, torch_dtype
from quantrules.types import FLOATS, PartType, Spelling, Type, part_type

NO_PLACE = define("QR205", "A spelling has no place for a part, or for its dtype")
NOT_KEPT = define("QR215", "A scale cannot be written in the dtype or the direction of a spelling")


@register
class Pack(Op):
    name = "pack"
    summary = "a value's parts in a spelling"
    help = """Takes a value of any format and gives its parts the names, shapes and dtypes of a spelling, its own unless
named. Codes and block scales stay byte for byte; a global scale turns from multiplying to dividing as 1/x in f32 (one ulp;
powers of two exactly); ue8m0 bytes and f32 powers of two turn into each other by value (`scale=`). `pack(bare)` and
`pack(weight)` name dense values, which pass a quantised format's spelling as they are. Refused: more global scales than the
spelling holds (`align` before the `cat`), a part or a dtype that the spelling has no place for."""
    params = (
        Param("spelling", "spelling", None, "its own unless given"),
        Param("scale", "dtype", None, "of block scales, where the spelling allows several"),
    )
    example = "*.experts.{E}.up_proj → unpack | pack(SPELLING) → *.experts.{E}.w3"

    def infer(self, x, args, context):
        return x.map(lambda t: _made(t, args.get("spelling"), args.get("scale"), context))

    def label(self, step):
        kinds = {k for t, m in zip(step.takes.items, step.made.items, strict=True) for k in _kinds(t, m)}
        return "lossy" if "inverse" in kinds else "exact in a range" if "number" in kinds else "exact"

    def identity(self, step):
        return all(k == "bytes" for t, m in zip(step.takes.items, step.made.items, strict=True) for k in _kinds(t, m))

    def needs(self, step):
        """Numbers that turn into others must be numbers; bytes are copied as they are."""
        found = []
        for i, (t, made) in enumerate(zip(step.takes.items, step.made.items, strict=True)):
            turned = tuple(p.role for p, kind in zip(made.parts, _kinds(t, made), strict=True) if kind != "bytes" and p.role in ("scale", "global"))
            found += [Need("scales", (i,), turned, step.span)] * bool(turned)
        return tuple(found)

    def reference(self, step, x, state, out):
        for source, target in zip(x, out, strict=True):
            if target is None:
                continue
            kinds = dict(zip((p.role for p in target.type.parts), _kinds(source.type, target.type), strict=True))
            for role, kind in kinds.items():
                if kind == "bytes":
                    flat(target.parts[role]).copy_(flat(source.parts[role]))
                else:
                    _numbers(source, target, role, kind)

    def inverse(self, step):
        spellings = {t.spelling.name: t for t in step.takes.items}
        return (("pack", {"spelling": spellings.popitem()[0]}),) if len(spellings) == 1 else None


def _made(t: Type, name: str | None, scale: str | None, context: Context) -> Type:
    check_parts(t)
    if t.spans:
        reason = f"{t} has {len(t.spans)} global scales; a spelling holds one"
        raise Refused(SEVERAL_SCALES, reason, "write `align` before the `cat`")
    spelling = t.spelling if name is None else t.format.spelling(name)
    if spelling is None:
        known = {s.name for f in context.formats.values() for s in f.spellings}
        if t.is_dense and name in known:
            return t
        reason = f"{t.format.name} has no spelling {name}; it has {', '.join(s.name for s in t.format.spellings)}"
        raise Refused(WRONG_ARGUMENT, reason, argument="spelling")
    for role in sorted({p.role for p in spelling.parts if not p.optional} ^ {p.role for p in t.parts}):
        if t.part(role) and not spelling.part(role):
            reason = f"the spelling {spelling.name} has no place for the {role} of {t}"
            raise Refused(NO_PLACE, reason, "`drop` it by a rule of its own where it is optional")
        if not t.part(role):
            raise Refused(NO_PLACE, f"{t} has no {role}, which the spelling {spelling.name} requires")
    parts = tuple(
        _part(t, spelling, spec.role, scale if spec.role == "scale" else None) for spec in spelling.parts if t.part(spec.role)
    )
    return evolve(t, spelling=spelling, parts=parts)


def _part(t: Type, spelling: Spelling, role: str, wanted: str | None) -> PartType:
    """What a part becomes: its dtype in its own spelling, in another the first one with the same bytes, else the same numbers."""
    spec, dtype = spelling.part(role), t.part(role).dtype
    codec = codec_of(t.format, role, dtype)
    own = [dtype] if not spec.dtypes or spelling == t.spelling and dtype in spec.dtypes else []
    allowed = [wanted] if wanted else [*own, *spec.dtypes]
    if wanted and spec.dtypes and wanted not in spec.dtypes:
        reason = f"the {role} of the spelling {spelling.name} is {' or '.join(spec.dtypes)}, not {wanted}"
        raise Refused(WRONG_ARGUMENT, reason, argument="scale")
    same = [d for d in allowed if d == dtype or _bits(codec_of(t.format, role, d)) == _bits(codec)]
    numbers = [d for d in allowed if role != "codes" and {d, codec} <= {*FLOATS, "f8_e8m0"}]
    if not same and not numbers:
        reason = f"the {role} of {t} is {dtype}; the spelling {spelling.name} takes {' or '.join(spec.dtypes)}"
        raise Refused(NO_PLACE, reason, "`requant` makes new scales", argument="scale" if wanted else "")
    return part_type(t.format, spec, t.shape, (same or numbers)[0])


def _bits(codec: str) -> str:
    """Bytes of codes mean the same whether they are called signed, unsigned or packed floats."""
    return "u8" if codec in ("i8", "f4") else codec


def _kinds(t: Type, made: Type) -> list[str]:
    """How each part of `made` comes from the one of `t`: bytes, number or inverse."""
    kinds = []
    for p in made.parts:
        old, new = codec_of(t.format, p.role, t.part(p.role).dtype), codec_of(t.format, p.role, p.dtype)
        turned = t.spelling.part(p.role).inverse != made.spelling.part(p.role).inverse
        kinds.append("inverse" if turned else "bytes" if _bits(old) == _bits(new) else "number")
    return kinds


def _numbers(source: Value, target: Value, role: str, kind: str) -> None:
    import torch

    old, new = source.type.part(role), target.type.part(role)
    was = decode_numbers(source.tensor(role).reshape(-1), codec_of(source.type.format, role, old.dtype))
    made = 1 / was if kind == "inverse" else was
    stored = made.to(torch_dtype(codec_of(target.type.format, role, new.dtype)))
    bad = ~torch.isfinite(stored.float()) | (stored.float() != made if kind == "number" else False)
    if bad.any():
        number, lacks = float(was[bad.nonzero()[0]]), "inverse" if kind == "inverse" else new.dtype
        raise Refused(NOT_KEPT, f"{source.name or 'value'}: the {role} {number} has no {lacks}")
    flat(target.parts[role]).copy_(stored.view(torch.uint8))
