"""Access to memory by address, and bit operations, for native code: operations that numba cannot express.

Addresses and bits are int64 throughout (numba promotes int64 with uint64 to float), shifted as if unsigned. The machine
is little-endian, as are all that numba supports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from gpuload.backends.native import parts

if TYPE_CHECKING:
    from collections.abc import Callable

LINE = 64
"""Bytes of a cache line."""

I32, I64 = ir.IntType(32), ir.IntType(64)
_BYTES16 = ir.VectorType(ir.IntType(8), 16)
_BYTES64 = ir.VectorType(ir.IntType(8), LINE)

inline = parts.native(error_model="numpy", forceinline=True)
native = parts.native(error_model="numpy")


def _loader(n_bits: int) -> Any:
    """Return an intrinsic that reads an unsigned number at any address."""

    @intrinsic
    def load(_typing: Any, address: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(n_bits).as_pointer())
            return builder.zext(builder.load(pointer, align=1), I64)

        return types.int64(types.int64), codegen

    return load


def _storer(n_bits: int) -> Any:
    """Return an intrinsic that writes the low bits of a number at any address."""

    @intrinsic
    def store(_typing: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(n_bits).as_pointer())
            builder.store(builder.trunc(args[1], ir.IntType(n_bits)), pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


def _arithmetic(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Return an intrinsic of a number and a bit count, of which the low six bits matter."""

    @intrinsic
    def apply(_typing: Any, value: Any, n: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return emit(builder, args[0], builder.and_(args[1], ir.Constant(I64, 63)))

        return types.int64(types.int64, types.int64), codegen

    return apply


load8, load16, load32, load64 = (_loader(n_bits) for n_bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_storer(n_bits) for n_bits in (8, 16, 32, 64))
shift_right = _arithmetic(lambda builder, value, n: builder.lshr(value, n))
shift_left = _arithmetic(lambda builder, value, n: builder.shl(value, n))
low_bits = _arithmetic(
    lambda builder, value, n: builder.and_(value, builder.not_(builder.shl(ir.Constant(I64, -1), n)))
)


@native
def get_item(at: int, size: int) -> int:
    """Return the unsigned integer of 1, 2, 4 or 8 bytes at an address."""
    if size == 8:
        return load64(at)
    if size == 4:
        return load32(at)
    return load16(at) if size == 2 else load8(at)


@native
def put_item(at: int, size: int, value: int) -> None:
    """Write the low 1, 2, 4 or 8 bytes of a number at an address."""
    if size == 8:
        store64(at, value)
    elif size == 4:
        store32(at, value)
    elif size == 2:
        store16(at, value)
    else:
        store8(at, value)


@intrinsic
def reverse(_typing: Any, value: Any) -> Any:
    """Reverse all 64 bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitreverse(args[0])

    return types.int64(types.int64), codegen


@intrinsic
def count_ones(_typing: Any, value: Any) -> Any:
    """Return how many of the 64 bits are 1."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen


@intrinsic
def opaque(_typing: Any, value: Any) -> Any:
    """Return the value, hidden from the optimizer, so that a loop that counts with it is left as written."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [args[0]], True)

    return types.int64(types.int64), codegen


@intrinsic
def count_up(_typing: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, which other threads may count up too; return what it was."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), ir.Constant(I64, 1), "seq_cst")

    return types.int64(types.int64), codegen


@intrinsic
def copy16(_typing: Any, to: Any, at: Any) -> Any:
    """Copy 16 bytes, all read before any is written."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[1], _BYTES16.as_pointer()), align=1)
        builder.store(value, builder.inttoptr(args[0], _BYTES16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def shuffle16(_typing: Any, to: Any, at: Any, order: Any) -> Any:
    """Copy 16 bytes permuted by the 16 indices at `order`, all read before any is written."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value, order = (builder.load(builder.inttoptr(address, _BYTES16.as_pointer()), align=1) for address in args[1:])
        triple, _, features = context.codegen().magic_tuple()
        name = (
            "llvm.x86.ssse3.pshuf.b.128"
            if "+ssse3" in features
            else "llvm.aarch64.neon.tbl1.v16i8"
            if triple.startswith(("aarch64", "arm64"))
            else None
        )
        if name is not None:
            signature = ir.FunctionType(_BYTES16, [_BYTES16, _BYTES16])
            value = builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [value, order])
        else:
            lanes = [ir.Constant(I32, k) for k in range(16)]
            picked = [builder.extract_element(value, builder.extract_element(order, lane)) for lane in lanes]
            for lane, element in zip(lanes, picked, strict=True):
                value = builder.insert_element(value, element, lane)
        builder.store(value, builder.inttoptr(args[0], _BYTES16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def store_pair(_typing: Any, to: Any, low: Any, high: Any) -> Any:
    """Write two 64-bit numbers as one store of 128 bits, so a later load of any part does not wait for the cache."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pair = ir.VectorType(I64, 2)
        value = ir.Constant(pair, None)
        for lane, number in enumerate(args[1:]):
            value = builder.insert_element(value, number, ir.Constant(I32, lane))
        builder.store(value, builder.inttoptr(args[0], pair.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def copy_bytes(_typing: Any, to: Any, at: Any, n: Any) -> Any:
    """Copy n >= 0 bytes from one address to another; the ranges must not overlap."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, place, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def store_lines(_typing: Any, to: Any, at: Any, n: Any) -> Any:
    """Copy n bytes, in whole cache lines, to a line-aligned address with non-temporal stores, bypassing the caches."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        hint = builder.module.add_metadata([ir.Constant(I32, 1)])
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), args[2], ir.Constant(I64, LINE)) as (k, _):
            place, source = (builder.inttoptr(builder.add(a, k), _BYTES64.as_pointer()) for a in args[:2])
            builder.store(builder.load(source, align=1), place, align=LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def drain_stores(_typing: Any) -> Any:
    """Make all earlier stores, including non-temporal ones, visible to other threads before any later store."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        triple, _, _ = context.codegen().magic_tuple()
        if triple.startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def array_at(_typing: Any, address: Any, n: Any, dtype: Any) -> Any:
    """Return n elements at an address as an array. As `numba.carray`, which is compiled for each dtype."""
    array = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = context.get_data_type(array.dtype)
        itemsize = ir.Constant(I64, context.get_abi_sizeof(kind))
        data = builder.inttoptr(args[0], kind.as_pointer())
        made = context.make_array(array)(context, builder)
        populate_array(made, data, shape=(args[1],), strides=(itemsize,), itemsize=itemsize, meminfo=None)
        return made._getvalue()  # noqa: SLF001 - as numba's own intrinsics do

    return array(types.int64, types.int64, dtype), codegen


def _bitcast(of: Any, to: Any, kind: ir.Type) -> Any:
    """Return an intrinsic that returns the bits of a number as a number of another type."""

    @intrinsic
    def cast(_typing: Any, value: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], kind)

        return to(of), codegen

    return cast


float_bits = _bitcast(types.float32, types.uint32, I32)
double_bits = _bitcast(types.float64, types.int64, I64)
double_of = _bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def half_bits(_typing: Any, value: Any) -> Any:
    """Return the bits of a float32 rounded to float16 (to nearest, ties to even), as uint16."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def borrowed(_typing: Any, array: Any) -> Any:
    """Return an array without reference counting, to pass to functions that a kernel calls once per item.

    numba counts references with atomic operations wherever an array is an argument, which may take longer than the
    item. The kernel's caller keeps the arrays alive, so a kernel must never return a borrowed array.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lent = context.make_array(signature.args[0])(context, builder, args[0])
        for owner in ("meminfo", "parent"):
            setattr(lent, owner, cgutils.get_null_value(getattr(lent, owner).type))
        return lent._getvalue()  # noqa: SLF001 - as numba's own intrinsics do

    return array(array), codegen
