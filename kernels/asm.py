"""Instructions as functions of a kernel: `op(mnemonic, operands)` makes one Numba device intrinsic.

    add = op("add.rn.f32", "f = f, f")                        c = ptx.add(a, b)
    ldg4 = op("ld.global.v4.u32", "{rrrr} = [g]")             a, b, c, d = ptx.ldg4(x, i)

Results stand left of the equals sign. An operand is a word made of these letters, anything else is
text of the instruction:

| letter | in the kernel                          | in PTX                                |
|--------|----------------------------------------|---------------------------------------|
| r, i   | 32-bit integer, unsigned or signed     | .b32 register                         |
| l      | 64-bit integer                         | .b64 register                         |
| h      | 16 bits, for example of a bfloat16     | .b16 register                         |
| f      | float32                                | .f32 register                         |
| g      | two arguments: pointer or array, index | global address of that element        |
| s      | byte address in shared memory          | .b32 register                         |
| n      | constant expression                    | immediate                             |
| p      | int32, 0 or 1; the one result          | predicate                             |

Integers are cast to the operand's width. Whatever addresses memory, reads a special register (%) or
has no result is kept in order and never dropped; whatever synchronises lanes is never moved into or
out of a branch.
"""

import inspect
import re
from itertools import count

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.core.errors import NumbaTypeError
from numba.cuda.extending import intrinsic

I32, I64 = ir.IntType(32), ir.IntType(64)
REGISTERS = {  # letter: (type in the kernel, LLVM type, constraint)
    "r": (types.uint32, I32, "r"),
    "i": (types.int32, I32, "r"),
    "l": (types.uint64, I64, "l"),
    "h": (types.uint16, ir.IntType(16), "h"),
    "f": (types.float32, ir.FloatType(), "f"),
    "g": (types.uint64, I64, "l"),
    "s": (types.uint32, I32, "r"),
    "n": (types.int32, I32, "n"),
    "p": (types.int32, I32, "r"),
}
OPERANDS = re.compile(r"\b[rilhfgsnp]+\b")
LANES_MEET = (".sync", "bar.", "barrier.")
PER_LANE = ("shfl", "vote", "match", "activemask")  # no memory, and yet not a function of operands
SHARED_SPACE = 3  # NVVM's number


def op(mnemonic: str, operands: str = ""):
    """The intrinsic that issues `mnemonic` with `operands`, written as in the table above."""
    results, sources = operands.split("=") if "=" in operands else ("", operands)
    outputs, inputs = ("".join(OPERANDS.findall(side)) for side in (results, sources))
    text = results.strip() + ", " * bool(results) + sources.strip()
    ordered = bool(set("[%") & set(text)) or not outputs or mnemonic.startswith(PER_LANE)
    meets = any(word in mnemonic for word in LANES_MEET)

    def typed(context, *given):
        _check(mnemonic, inputs, given)
        kinds = [REGISTERS[letter][0] for letter in outputs]
        result = types.void if not kinds else kinds[0] if len(kinds) == 1 else types.Tuple(kinds)

        def lower(context, builder, signature, values):
            body = f"{mnemonic} {_numbered(text)};"
            if outputs == "p":
                body = body.replace("$0", "q", 1)
                body = f"{{ .reg .pred q; {body} selp.b32 $0, 1, 0, q; }}"
            call = _assembly(body, outputs, inputs, ordered)
            registers = _lower_inputs(context, builder, inputs, signature.args, values)
            value = builder.call(call, registers, attrs=("convergent",) if meets else ())
            if not outputs:
                return context.get_dummy_value()
            if len(outputs) == 1:
                return value
            parts = [builder.extract_value(value, i) for i in range(len(outputs))]
            return context.make_tuple(builder, signature.return_type, parts)

        return result(*given), lower

    typed.__name__ = re.sub(r"\W", "_", mnemonic)
    # Numba asks for a fixed number of parameters.
    names = ["context"] + [f"x{i}" for i in range(len(inputs) + inputs.count("g"))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    made = intrinsic(typed)
    made.declaration = (mnemonic, operands)
    return made


def _split(inputs: str, given) -> list[tuple]:
    """One tuple of arguments an operand: two for a global address, else one."""
    rest = iter(given)
    return [(next(rest), next(rest)) if letter == "g" else (next(rest),) for letter in inputs]


def _check(mnemonic: str, inputs: str, given) -> None:
    for letter, kinds in zip(inputs, _split(inputs, given), strict=True):
        if letter == "g" and not isinstance(kinds[0], types.CPointer | types.Array):
            raise NumbaTypeError(f"{mnemonic}: {kinds[0]} is neither a pointer nor an array")
        if letter == "f" and kinds[0] != types.float32:
            raise NumbaTypeError(f"{mnemonic}: {kinds[0]} where float32 is meant")
        if letter in "rilhsn" and not isinstance(kinds[0], types.Integer | types.Boolean):
            raise NumbaTypeError(f"{mnemonic}: {kinds[0]} where an integer is meant")


def _lower_inputs(context, builder, inputs: str, kinds, values) -> list:
    registers = []
    for letter, kind, value in zip(
        inputs, _split(inputs, kinds), _split(inputs, values), strict=True
    ):
        if letter == "g":
            element = _element(context, builder, *kind, *value)
            registers.append(builder.ptrtoint(element, I64))
        else:
            registers.append(context.cast(builder, value[0], kind[0], REGISTERS[letter][0]))
    return registers


def _numbered(text: str) -> str:
    """Every operand letter replaced by its number: {rr} = [g] as {$0,$1}, [$2]."""
    numbers = count()
    return OPERANDS.sub(lambda word: ",".join(f"${next(numbers)}" for _ in word[0]), text)


def _assembly(body: str, outputs: str, inputs: str, ordered: bool) -> ir.InlineAsm:
    kinds = [REGISTERS[letter][1] for letter in outputs]
    result = (
        ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    )
    constraints = [f"={REGISTERS[letter][2]}" for letter in outputs]
    constraints += [REGISTERS[letter][2] for letter in inputs]
    constraints += ["~{memory}"] * ordered
    function = ir.FunctionType(result, [REGISTERS[letter][1] for letter in inputs])
    return ir.InlineAsm(function, body, ",".join(constraints), side_effect=ordered)


def _element(context, builder, base_kind, index_kind, base, index):
    """Pointer to element `index`, counted in 64 bits whatever the width of the index."""
    if isinstance(base_kind, types.Array):
        base = cgutils.create_struct_proxy(base_kind)(context, builder, base).data
    return builder.gep(base, [context.cast(builder, index, index_kind, types.int64)])


@intrinsic
def at(context, x, index):
    """Pointer to element `index` of a pointer or of an array taken as flat."""
    if not isinstance(x, types.CPointer | types.Array):
        raise NumbaTypeError(f"at: {x} is neither a pointer nor an array")

    def lower(context, builder, signature, values):
        return _element(context, builder, *signature.args, *values)

    return types.CPointer(x.dtype)(x, index), lower


@intrinsic
def shared_address(context, array):
    """Byte address of a shared array, for the operands `s`."""

    def lower(context, builder, signature, values):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, values[0]).data
        shared = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED_SPACE))
        return builder.ptrtoint(shared, I32)

    return types.int32(array), lower
