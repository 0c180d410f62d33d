"""quant: dense values to a format with block scales."""

from __future__ import annotations

from quantrules.diagnostics import define
from quantrules.ops.base import Op, Param, Refused, Value, register
from quantrules.ops.blocks import cube, decoded, factor, raw, require_finite, slices, spread
from quantrules.ops.codecs import LARGEST, POWER_RULES, SMALLEST, TINY, codec_of, encode_codes, power_of_two, round_to
from quantrules.ops.lift import NO_SCALES, WRONG_ARGUMENT, WRONG_DIMENSION, find_format, whole_blocks
from quantrules.types import FLOATS, Format, Spelling, Type, divisible, make_type, rows_of

FLOOR = """least magnitude that a block's scale is made for, where there is no global scale: 1e-4 for blocks of several rows, as
engines do, which zeroes smaller ones; 0 keeps them"""
NOT_MADE = define("QR212", "quant cannot make this format")


@register
class Quant(Op):
    name = "quant"
    summary = "a dense value in a quantised format"
    help = """f[N, K] → format[N, K]. Scales come first and are rounded to their dtype before codes are made with them;
codes round half to even and saturate. Blocks never cross the slices of a leading dimension, and each slice has a global scale
of its own. A format with a global scale takes it from the largest magnitude of the whole value (a pass of its own) and fits
block scales under it, not below the smallest number of their dtype; without one, a block scale is its largest magnitude over
the largest code. ue8m0 scales are powers of two by `rule`. A block of zeros gets scale 0 where a zero exists. An activation
scale that came with the value is kept where the format has a place, and none is invented. Refused: packed values (`requant`),
integers, columns that are not whole groups, NaN and infinities with their index."""
    params = (
        Param("format", "format", help="the format to make"),
        Param("spelling", "spelling", None, "the first one that keeps the name of the dense tensor unless given"),
        Param("scale", "dtype", None, "of block scales, where the format allows several; the first unless given"),
        Param("rule", "word", "ceil", "of ue8m0 scales: ceil never saturates, even and floor are smaller", POWER_RULES),
        Param("floor", "number", None, FLOOR),
    )
    example = "*.q_proj → unpack | quant(FORMAT, scale=f8_e8m0)"
    surveys = True

    def infer(self, x, args, context):
        format = find_format(args["format"], context)
        if format is None or format.is_dense:
            quantised = ", ".join(sorted(n for n, f in context.formats.items() if not f.is_dense))
            reason = f"{format.name if format else args['format']} is not a quantised format"
            raise Refused(WRONG_ARGUMENT, reason, f"one of {quantised}", argument="format")
        if args.get("rule", "ceil") not in POWER_RULES:
            raise Refused(WRONG_ARGUMENT, f"no scale rule {args['rule']}", f"one of {', '.join(POWER_RULES)}", argument="rule")
        return x.map(lambda t: self._made(t, format, args))

    def _made(self, t: Type, format: Format, args) -> Type:
        if not t.is_dense:
            raise Refused(NO_SCALES, f"{t} is quantised already", f"`requant({format.name})`, or `dequant` first")
        if t.dtype not in FLOATS:
            raise Refused(NO_SCALES, f"{t} is not floating point", "`cast` it, or `keep` it")
        if len(t.shape) < 2:
            reason = f"{t} has {len(t.shape)} dimensions; blocks need rows and columns"
            raise Refused(WRONG_DIMENSION, reason, "`keep` it, or match weights only")
        spelling = self._spelling(format, args.get("spelling"), t)
        scale, dtype = spelling.part("scale"), args.get("scale") or spelling.part("scale").dtypes[0]
        if dtype not in scale.dtypes:
            reason = f"block scales of {format.name} in the spelling {spelling.name} are {' or '.join(scale.dtypes)}, not {dtype}"
            raise Refused(WRONG_ARGUMENT, reason, argument="scale")
        roles = [p.role for p in spelling.parts if not p.optional or p.role == "act" and t.part("act")]
        made = make_type(format, spelling, t.shape, {"scale": dtype}, roles)
        if format.block[0] == 1 or not divisible(t.shape[-1], format.element.per):
            whole_blocks(made, "columns", t.shape[-1], t, "does not fill its last one")
        return made

    @staticmethod
    def _spelling(format: Format, name: str | None, t: Type) -> Spelling:
        suffix = t.spelling.parts[0].suffix
        same = [s for s in format.spellings if s.dense == suffix]
        spelling = format.spelling(name) if name else (same or format.spellings)[0]
        if spelling is None:
            reason = f"{format.name} has no spelling {name}; it has {', '.join(s.name for s in format.spellings)}"
            raise Refused(WRONG_ARGUMENT, reason, argument="spelling")
        required = {p.role for p in spelling.parts if not p.optional}
        grid = [(g.letter, g.divisor) for g in spelling.part("scale").grid or ()] if spelling.part("scale") else []
        blocks = len(format.block) == 2 and grid == [("N", format.block[0]), ("K", format.block[1])]
        if not required <= {"codes", "scale", "global"} or not blocks or format.element.codec not in LARGEST:
            reason = f"quant does not make {format.name} in the spelling {spelling.name}"
            help = "it makes formats of codes, one scale for each block, and at most one global scale"
            raise Refused(NOT_MADE, reason, help, argument="format")
        return spelling

    def label(self, step):
        return "lossy"

    def needs_survey(self, step):
        return any(t.part("global") for t in step.made.items)

    def survey(self, step, x, state):
        """{item: f32[outer], the largest magnitude of each slice}"""
        import torch

        state = dict(state or {})
        for i, value in enumerate(x):
            if value is None:
                continue
            whole = step.takes.items[i]
            outer, n, _ = rows_of(whole.shape)
            numbers = decoded(value)
            amax = numbers.abs().reshape(len(numbers), -1).amax(1) if numbers.numel() else torch.zeros(len(numbers))
            if not torch.isfinite(amax).all():
                require_finite(value, whole, numbers)
            total = state[i].clone() if i in state else torch.zeros(outer)
            total[slices(value, n)] = torch.maximum(total[slices(value, n)], amax.cpu())
            state[i] = total
        return state

    def reference(self, step, x, state, out):
        for i, (source, target) in enumerate(zip(x, out, strict=True)):
            if target is None:
                continue
            whole, numbers = step.takes.items[i], decoded(source)
            require_finite(source, whole, numbers)
            if target.type.part("global"):
                amax = state[i][slices(target, rows_of(whole.shape)[1])].to(numbers.device)
                cube(target, "global").copy_(global_scale(target.type, amax).reshape(-1, 1, 1))
            if target.type.part("act"):
                act, turned = cube(source, "act"), {v.type.spelling.part("act").inverse for v in (source, target)}
                cube(target, "act").copy_(1 / act if len(turned) > 1 else act)
            floor = step.args.get("floor")
            least = (1e-4 if target.type.format.block[0] > 1 else 0.0) if floor is None else float(floor)
            fill(target, numbers, step.args.get("rule") or "ceil", least)

    def inverse(self, step):
        dtypes = {t.dtype for t in step.takes.items}
        return (("dequant", {"dtype": dtypes.pop()}),) if len(dtypes) == 1 else None


def global_scale(type: Type, amax):
    """The global scales with which the largest magnitudes just fit under the largest block scale; 1 where all is zero."""
    import torch

    codec = codec_of(type.format, "scale", type.part("scale").dtype)
    most = LARGEST[type.format.element.codec] * LARGEST[codec]
    scale = (most / amax).clamp(max=1 / TINY) if type.spelling.part("global").inverse else (amax / most).clamp(min=TINY)
    return torch.where(amax == 0, 1.0, scale)


def block_amax(numbers, block):
    """f32 [outer, ⌈rows / bn⌉, ⌈columns / bk⌉] of f32 [outer, rows, columns]; partial blocks count what they have."""
    import torch

    (outer, n, k), (bn, bk) = numbers.shape, block
    padded = torch.nn.functional.pad(numbers.abs(), (0, -k % bk, 0, -n % bn))
    return padded.view(outer, -(-n // bn), bn, -(-k // bk), bk).amax((2, 4))


def fill(target: Value, numbers, rule: str, floor: float) -> None:
    """Write block scales and codes of finite f32 numbers [outer, rows, columns]; the global scale is there already."""
    import torch

    if not numbers.numel():
        return
    t, shared = target.type, target.type.part("global")
    top, dtype = LARGEST[t.format.element.codec], t.part("scale").dtype
    codec, amax = codec_of(t.format, "scale", dtype), block_amax(numbers, t.format.block)
    if shared:
        g = cube(target, "global")
        scale = g * (amax / top) if t.spelling.part("global").inverse else amax / (top * g)
    else:
        scale = amax.clamp(min=floor) / top
    if codec == "f8_e8m0":
        stored = power_of_two(scale if shared else amax.clamp(min=floor), 1.0 if shared else top, rule).to(torch.float8_e8m0fnu)
    elif codec in SMALLEST:
        fits = scale.clamp(SMALLEST[codec], LARGEST[codec])
        stored = torch.where(amax == 0, 0.0, fits).to(torch.float8_e4m3fn)
    else:
        stored = round_to(scale.clamp(min=TINY), codec)
    raw(target, "scale").copy_(stored.view(torch.uint8))
    worth, step = factor(target)
    worth = spread((torch.where(worth == 0, 1.0, worth), step), numbers.shape[-1])
    codes = encode_codes(numbers / worth if shared else numbers * (1 / worth), t.format.element)
    raw(target, "codes").copy_(codes)
