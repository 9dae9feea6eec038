"""Kernels compiled for other processors against the local ones: ARM's under an emulator.

The same calls run on the same memory, in this process and in a small program (replay.c).
"""

import ctypes
import fcntl
import functools
import platform
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.linear.integers import INT4, INT8, Integers
from specdec.kernels.native import linear
from specdec.kernels.native.blocks import PARTS
from specdec.kernels.native.compiled import compiled, find_compiler, flags_for, source
from specdec.kernels.native.instruction_sets import c_kernels
from specdec.kernels.native.signatures import NUMBERS, SIGNATURES, SUFFIX
from specdec.kernels.native.targets import CompileTarget, features, named
from specdec.models.gguf.storage_types import TYPES
from tests.kernels.sums import by_matrix_units
from tests.kernels.test_integers import OTHERS, of_file, published
from tests.selection import EXHAUSTIVE
from tests.tolerances import KERNEL

DRIVER = Path(__file__).with_name("replay.c")
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
EXPECTED = {
    "x86-64": ("128-bit vectors", "32 bits", False),
    "neon": ("NEON", "32 bits", False),
    "neon-dot": ("NEON", "dot products", False),
    "neon-bf16": ("NEON", "dot products", True),
    "neon-i8mm": ("NEON", "matrix units", True),
}

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")


@dataclass(slots=True)
class Calls:
    """Calls of C kernels whose tensors all lie in one memory image."""

    image: bytearray = field(default_factory=bytearray)
    words: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    results: list[tuple[int, Tensor]] = field(default_factory=list)

    def put(self, x: Tensor) -> int:
        """Copy a tensor into the image, and return its offset."""
        at = len(self.image)
        data = x.contiguous().view(torch.uint8).numpy().tobytes()
        self.image += data + bytes(-len(data) % 64)
        return at

    def call(self, name: str, *arguments: Tensor | float | None, results: tuple[int, ...]) -> None:
        """Add a call; `results` are the numbers of the arguments to compare afterwards."""
        self.words.append(NUMBERS[name])
        for number, (kind, value) in enumerate(zip(SIGNATURES[name], arguments, strict=True)):
            if isinstance(value, Tensor):
                self.addresses.append(len(self.words))
                at = self.put(value)
                if number in results:
                    self.results.append((at, value))
                self.words.append(at)
            elif kind == "f":
                self.words.append(ctypes.c_uint32.from_buffer(ctypes.c_float(value or 0.0)).value)
            else:
                self.words.append(int(value or 0))

    def found(self, image: Tensor) -> list[Tensor]:
        """Return the results in an image."""
        return [
            image[at : at + like.nbytes].clone().view(like.dtype).view(like.shape)
            for at, like in self.results
        ]

    def here(self) -> list[Tensor]:
        """Make the calls with this process's kernels."""
        library = compiled()
        assert library is not None
        image = torch.frombuffer(self.image, dtype=torch.uint8).clone()
        words = torch.tensor(self.words)
        words[self.addresses] += image.data_ptr()
        end = ctypes.c_void_p(words.data_ptr() + words.nbytes)
        library.replay(ctypes.c_void_p(words.data_ptr()), end)
        return self.found(image)

    def there(self, command: list[str], folder: Path) -> tuple[list[Tensor], str]:
        """Make the calls in a separate program, which reports its compile target."""
        counts = np.array([len(self.image), len(self.words), len(self.addresses)])
        numbers = (np.array(part, dtype=np.int64).tobytes() for part in (self.words, self.addresses))
        (folder / "calls").write_bytes(counts.tobytes() + bytes(self.image) + b"".join(numbers))
        command = [*command, str(folder / "calls"), str(folder / "image")]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        image = torch.from_numpy(np.fromfile(folder / "image", dtype=np.uint8))
        return self.found(image), said.strip()


@functools.cache
def program(target: CompileTarget, folder: Path) -> list[str]:
    """Compile the kernels and the driver, once for all workers; return the command that runs them."""
    programs = folder.parent
    foreign = target.machine == "aarch64" != platform.machine()
    if foreign and not (shutil.which(CROSS) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {CROSS} and {EMULATOR}")
    if not foreign and (target.machine != platform.machine() or not features().issuperset(target.needs)):
        pytest.skip(f"this processor does not run {target.name}")
    compiler = CROSS if foreign else find_compiler()
    assert compiler is not None
    text, place = programs / f"{target.name}.c", programs / target.name
    flags = flags_for(target, "-fopenmp-simd")
    # Linked statically: an emulator may not find a foreign library.
    command = [
        *compiler.split(),
        *flags,
        *(["-static"] if foreign else []),
        str(text),
        "-o",
        str(place),
        "-lm",
    ]
    with text.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another worker may be compiling
        if not place.exists():
            text.write_text(f'{source()}#include "{DRIVER}"\n')
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    return [*([EMULATOR, "-cpu", "max"] if foreign else []), str(place)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return this worker's folder for calls; the programs, shared by all workers, are next to it."""
    base = tmp_path_factory.getbasetemp()
    own = (base if worker_id == "master" else base.parent) / "targets" / worker_id
    own.mkdir(parents=True, exist_ok=True)
    return own


targets = pytest.mark.parametrize("target", [named(name) for name in EXPECTED], ids=list(EXPECTED))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


def products(dtype: torch.dtype, rows: int, outputs: int, inputs: int, *, turned: bool = False) -> Calls:
    """Multiply; `turned` swaps the entries of each pair.

    In bfloat16, large products at both ends cancel: the rounding of their sum reveals the order.
    """
    x_TD, weight_ND = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1)
    if dtype == torch.bfloat16:
        x_TD[:, 0] = weight_ND[:, 0] = weight_ND[:, -1] = 4096
        x_TD[:, -1] = -4096
    if turned:
        x_TD, weight_ND = (x.unflatten(1, (-1, 2)).flip(2).flatten(1) for x in (x_TD, weight_ND))
    packed = linear.pack(weight_ND, draw(outputs, dtype=dtype, seed=2))
    assert isinstance(packed, linear.Panels)
    calls = Calls()
    calls.call(
        f"linear_{SUFFIX[dtype]}",
        *(x_TD, rows, inputs, inputs, packed.weight, packed.bias_N),
        *(poisoned(rows, outputs, dtype=dtype), outputs, outputs),
        results=(6,),
    )
    return calls


def whole_matrices(bits: int, dtype: torch.dtype, outputs: int, inputs: int) -> list[Integers]:
    """Draw a matrix in each layout: quantized here, published ones with zero points, and GGUF formats."""
    shape, scales = (outputs, inputs), (torch.float16, torch.bfloat16)
    files = [of_file(own, kind, dtype, shape) for own, kind in OTHERS if own == bits]
    if bits == 6:
        return files
    own = (INT8 if bits == 8 else INT4).quantise(draw(outputs, inputs, dtype=dtype, seed=1))
    return [own, *(published(bits, 64, True, kind, dtype, shape) for kind in scales), *files]


def add_whole_product(calls: Calls, matrix: Integers, rows: int) -> None:
    (outputs, inputs), dtype, packed = matrix.shape, matrix.dtype, linear.lay_whole(matrix)
    calls.call(
        f"linear_integer_{SUFFIX[dtype]}",
        *(draw(rows, inputs, dtype=dtype), rows, inputs, inputs, matrix.bits, packed.kind),
        *(packed.weight, packed.scale, None, poisoned(rows, outputs, dtype=dtype), outputs, outputs),
        results=(9,),
    )


SIZES = [(1, 33, 72), (3, 70, 104), (6, 16, 40), (9, 130, 200)]
"""Rows, outputs and inputs that do not fill matrix units' tiles."""
WHOLE_SIZES = [*SIZES, (2, 18, 33), (8, 17, 96), (21, 33, 160)]


@EXHAUSTIVE
@targets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_have_the_same_bits(target: CompileTarget, dtype: torch.dtype, folder: Path) -> None:
    """In float32 only with fused multiply-add, as on all but the oldest processors."""
    command, found = program(target, folder), c_kernels()
    vectors, integers, pairs = EXPECTED[target.name]
    assert found is not None
    for sizes in SIZES:
        (there,), said = products(dtype, *sizes).there(command, folder)
        assert said == f"{vectors}, {integers}, bfloat16 units {pairs:d}"
        (here,) = products(dtype, *sizes).here()
        if dtype == torch.bfloat16 or target.name != "x86-64":
            assert torch.equal(there, here)
            (other,) = products(dtype, *sizes, turned=True).here()
            assert not torch.equal(there, other), "the order of sums leaves no trace"
        torch.testing.assert_close(there, here, rtol=KERNEL[dtype], atol=KERNEL[dtype])


@targets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_integer_products_are_bit_identical(
    target: CompileTarget, bits: int, dtype: torch.dtype, folder: Path
) -> None:
    command, calls = program(target, folder), Calls()
    for rows, *shape in WHOLE_SIZES:
        for matrix in whole_matrices(bits, dtype, *shape):
            add_whole_product(calls, matrix, rows)
    for there, here in zip(calls.there(command, folder)[0], calls.here(), strict=True):
        if target.name != "x86-64":
            assert torch.equal(there, here)
        limit = KERNEL[dtype] * max(1.0, float(here.abs().max()))
        torch.testing.assert_close(there, here, rtol=KERNEL[dtype], atol=limit)


@targets
def test_blocks_and_layouts_have_the_same_bits(target: CompileTarget, folder: Path) -> None:
    command, calls = program(target, folder), Calls()
    for kind in (own for own in TYPES.values() if own.block_size > 1):
        data = torch.randint(
            0, 0x7C, (3 * kind.block_bytes,), dtype=torch.uint8
        )  # no NaN: its bits may differ
        parts = {"number": poisoned(3 * kind.block_size, dtype=torch.int8), "scale": poisoned(3, 16)}
        parts |= {"offset": poisoned(3, 16)} if kind.bits and kind.offsets else {}
        book = kind.vectors
        book_CN = None if book is None else torch.from_numpy(book)
        for part, out in {**parts, "wide": poisoned(3 * kind.block_size)}.items():
            outs = (out if own == part else None for own in PARTS)
            calls.call(
                "unpack_blocks", *kind.layout, data, 3, *outs, book_CN, results=(8 + PARTS.index(part),)
            )
    for bits in (4, 6, 8):
        number_ND = torch.randint(-8, 8, (18, 70), dtype=torch.int8)
        laid, halves = poisoned(2, 3, bits, 64, dtype=torch.uint8), poisoned(2, 2, 2, 16, dtype=torch.int16)
        scale_NG = torch.randint(0, 999, (18, 2), dtype=torch.int16)
        calls.call(
            "lay_integers",
            *(number_ND, 18, 70, bits, laid, scale_NG, scale_NG + 1, 2, 2, 1, halves),
            results=(4, 10),
        )
    for there, here in zip(calls.there(command, folder)[0], calls.here(), strict=True):
        assert torch.equal(there, here) and not (here == 77).all()


@targets
@pytest.mark.parametrize("with_beta", [True, False])
def test_a_recurrence_is_the_same(target: CompileTarget, with_beta: bool, folder: Path) -> None:
    """A window without drafts, and one with two draft branches that keep their own states."""
    command = program(target, folder)
    rows, width, groups, heads, key, value = 2, 3, 2, 4, 24, 40
    tokens = rows * width
    calls = Calls()
    above = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.uint8).repeat(rows, 1, 1)
    for branches, slots in ((None, None), (above, torch.arange(2, 2 + tokens))):
        states = draw(2 + tokens, heads, key, value, seed=6)
        calls.call(
            "scan_window",
            *(key**-0.5 * draw(tokens, groups, key, seed=seed) for seed in (0, 1)),
            *(draw(tokens, heads, value, seed=2), -draw(tokens, heads, seed=3).abs()),
            draw(tokens, heads, seed=4).sigmoid() if with_beta else None,
            *(poisoned(tokens, heads, value), rows, width, groups, heads, key, value, 0),
            *(states, states.stride(0), torch.tensor([1, 0]), torch.zeros(8, dtype=torch.int64)),
            *(None, None, None, None, 0, None, None, slots, branches),
            results=(5, 13),
        )
    for there, here in zip(calls.there(command, folder)[0], calls.here(), strict=True):
        torch.testing.assert_close(there, here, rtol=KERNEL[torch.float32], atol=KERNEL[torch.float32])


@targets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_the_same(target: CompileTarget, dtype: torch.dtype, folder: Path) -> None:
    """Chains and trees after committed tokens, with head dims that fill no whole registers; also latent."""
    command, calls = program(target, folder), Calls()
    rows, width, heads, kv_heads, dim, block, blocks = 2, 3, 6, 2, 40, 16, 3
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.uint8).repeat(rows, 1, 1)
    angle_TR = draw(rows * width, 10, seed=3)
    for above, wide, window in ((None, 0, 0), (tree, 0, 4), (tree, 1, 2), (None, 1, 20)):
        calls.call(
            f"self_attention_{SUFFIX[dtype]}",
            *(draw(rows * width, (2 * heads + 2 * kv_heads) * dim, dtype=dtype), rows, width),
            *(heads, kv_heads, dim, dim, 1, draw(dim, seed=1), None, 0, 1e-6),
            *(angle_TR.cos(), angle_TR.sin(), 10, wide),
            *(draw(rows * blocks, 2, block, kv_heads, dim, dtype=dtype, seed=2),),
            *(2 * block * kv_heads * dim, block * kv_heads * dim, kv_heads * dim, dim, block),
            *(torch.arange(rows * blocks).flip(0), blocks, torch.tensor([37, 5]), above, dim**-0.5),
            *(window, poisoned(rows * width, heads * dim, dtype=dtype)),
            results=(16, 28),
        )
        calls.call(
            f"self_attention_{SUFFIX[dtype]}",
            *(draw(rows * width, (heads + 1) * dim, dtype=dtype, seed=4), rows, width),
            *(heads, 1, dim, dim - 7, 0, None, None, 0, 0.0, None, None, 0, wide),
            *(draw(rows * blocks, 1, block, 1, dim, dtype=dtype, seed=5), block * dim, 0, dim, dim, block),
            *(torch.arange(rows * blocks).flip(0), blocks, torch.tensor([37, 5]), above, dim**-0.5),
            *(window, poisoned(rows * width, heads * (dim - 7), dtype=dtype)),
            results=(16, 28),
        )
    for there, here in zip(calls.there(command, folder)[0], calls.here(), strict=True):
        torch.testing.assert_close(there, here, rtol=KERNEL[dtype], atol=KERNEL[dtype])


@targets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_activations_are_the_same(target: CompileTarget, dtype: torch.dtype, folder: Path) -> None:
    command, suffix = program(target, folder), SUFFIX[dtype]
    calls = Calls()
    x, out = draw(5, 70, dtype=dtype), poisoned(5, 70, dtype=dtype)
    calls.call(f"rms_norm_{suffix}", x, 5, 1, 70, 70, 0, draw(70, seed=1), 0, 1e-6, out, results=(9,))
    calls.call(f"swiglu_{suffix}", x, 5, 35, 70, 0.5, poisoned(5, 35, dtype=dtype), results=(5,))
    calls.call(f"geglu_{suffix}", x, 5, 35, 70, poisoned(5, 35, dtype=dtype), results=(4,))
    calls.call(f"sigmoid_{suffix}", x, 5, 70, 70, out, results=(4,))
    calls.call(f"l2_normalise_{suffix}", x, 5, 2, 35, 70, 0.5, poisoned(5, 70), results=(6,))
    for there, here in zip(calls.there(command, folder)[0], calls.here(), strict=True):
        torch.testing.assert_close(there, here, rtol=KERNEL[dtype], atol=KERNEL[dtype])


@targets
def test_noise_and_ranking_are_the_same(target: CompileTarget, folder: Path) -> None:
    command, calls = program(target, folder), Calls()
    seeds, positions = torch.tensor([0, -3, 2**62]), torch.tensor([0, 5, 1 << 40])
    calls.call("gumbel", seeds, positions, 3, 515, poisoned(3, 515), results=(4,))
    tokens, shares = poisoned(3, 4, dtype=torch.int64), poisoned(3, 4)
    calls.call("topk", draw(3, 515).round(), 3, 515, 4, tokens, shares, results=(4, 5))
    (noise, best, share), (noise_here, best_here, share_here) = (
        calls.there(command, folder)[0],
        calls.here(),
    )
    torch.testing.assert_close(noise, noise_here, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(share, share_here, rtol=2e-6, atol=1e-7)
    assert torch.equal(best, best_here)


AMX = named("amx")


def emulated(name: str, *flags: str, on: str = "avx512-vnni") -> CompileTarget:
    """Replace the compiler's AMX intrinsics by an emulation in C."""
    without = named(on)
    header = ("-include", str(DRIVER.with_name("amx.h")))
    return replace(without, name=name, flags=(*without.flags, *header, *flags))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(1, 2), (15, 40), (33, 65), (70, 320)], ids=str)
@EXHAUSTIVE
def test_products_by_amx_have_the_same_bits(bits: int, shape: tuple[int, int], folder: Path) -> None:
    """The emulation aborts on tiles that a processor would refuse."""
    command, calls = program(emulated("amx"), folder), Calls()
    for rows in range(1, 66):
        for matrix in whole_matrices(bits, torch.float32, *shape):
            add_whole_product(calls, matrix, rows)
    there, said = calls.there(command, folder)
    assert said == "AVX-512, matrix units, bfloat16 units 0"
    for found, here in zip(there, calls.here(), strict=True):
        assert torch.equal(found, here)


@pytest.mark.parametrize("shape", [(15, 32), (33, 96), (70, 320), (70, 48)], ids=str)
@EXHAUSTIVE
def test_products_of_bfloat16_by_amx_add_in_its_order(shape: tuple[int, int], folder: Path) -> None:
    command, (outputs, inputs) = program(emulated("amx-pairs", on="avx512-bf16"), folder), shape
    weight_ND, bias_N = (draw(outputs, width, dtype=torch.bfloat16, seed=1) for width in (inputs, 1))
    packed, calls, wanted = linear.pack(weight_ND, bias_N[:, 0]), Calls(), []
    assert isinstance(packed, linear.Panels)
    for rows in (0, 1, 2, 15, 16, 17, 31, 32, 50):
        x_TD = draw(rows, inputs, dtype=torch.bfloat16)
        calls.call(
            "linear_bfloat16",
            *(x_TD, rows, inputs, inputs, packed.weight, packed.bias_N),
            *(poisoned(rows, outputs, dtype=torch.bfloat16), outputs, outputs),
            results=(6,),
        )
        wanted.append((by_matrix_units(x_TD, weight_ND) + bias_N[:, 0].float()).bfloat16())
    there, said = calls.there(command, folder)
    assert said == "AVX-512, matrix units, bfloat16 units 1"
    assert all(map(torch.equal, there, wanted))


@EXHAUSTIVE
def test_vector_kernels_run_if_the_system_refuses_amx(folder: Path) -> None:
    command, calls = program(emulated("amx-refused", "-DREFUSED", "-O1"), folder), Calls()
    for rows in range(1, 18):
        add_whole_product(calls, INT8.quantise(draw(16, 64)), rows)
    there, said = calls.there(command, folder)
    assert said == "AVX-512, VNNI, bfloat16 units 0"
    assert all(map(torch.equal, there, calls.here()))


@EXHAUSTIVE
def test_wrong_tiles_are_noticed_from_nine_rows_on(folder: Path) -> None:
    command, calls = program(emulated("amx-mutant", "-DROW_BYTE=uint8_t", "-O1"), folder), Calls()
    for rows in range(1, 18):
        add_whole_product(calls, INT8.quantise(draw(16, 64)), rows)
    there, _ = calls.there(command, folder)
    alike = [torch.equal(found, here) for found, here in zip(there, calls.here(), strict=True)]
    assert alike == [rows < 9 for rows in range(1, 18)]


@EXHAUSTIVE
def test_the_compiler_emits_the_emulated_amx_instructions(tmp_path: Path) -> None:
    """Assembled but not run, on any processor."""
    found = find_compiler()
    assert found is not None
    compiler, text, assembly = found.split(), tmp_path / "forms.c", tmp_path / "forms.s"
    flags = (*flags_for(AMX, "-fopenmp-simd"), "-O1")
    text.touch()
    if subprocess.run(
        [*compiler, *flags, "-S", str(text), "-o", str(assembly)], capture_output=True
    ).returncode:
        pytest.skip(f"{found} does not compile for {AMX.name}")
    text.write_text(source())
    subprocess.run([*compiler, *flags, "-S", str(text), "-o", str(assembly)], check=True, timeout=120)
    written = assembly.read_text()
    for instruction in ("ldtilecfg", "tileloadd", "tilezero", "tdpbsud", "tilestored", "tilerelease"):
        assert instruction in written
    command = [*compiler, "-c", str(assembly), "-o", str(tmp_path / "forms.o")]
    subprocess.run(command, check=True, timeout=120)
