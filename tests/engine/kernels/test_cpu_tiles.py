"""Matrix tiles, emulated where the processor has none, against the register tiles; and when they are not used."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import pytest
import torch

from engine.cpp_build import BuildError
from engine.kernels import cpu
from engine.kernels.cpu import build
from engine.kernels.cpu.float_packing import pack_floats
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.cpu.packing import pack_codes
from engine.kernels.cpu.tiles import usable

SHAPES = [(1, 32), (31, 64), (70, 96), (96, 576)]
ROWS = [16, 17, 31, 32, 33, 48, 140]


@pytest.fixture(scope="session")
def pair() -> tuple[NativeKernels, NativeKernels]:
    """(with tiles, without)"""
    if not cpu.available():
        pytest.skip("no C++ compiler")
    lib = build.load((*build.FLAGS, "-DSLUICE_EMULATE_TILES"))
    return NativeKernels(lib, tiles=True), NativeKernels(lib, tiles=False)


@pytest.mark.parametrize("kind", ["centered", "minima", "wide"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights_give_the_same_bits(pair, shape, bits, kind):
    tiled, plain = pair
    out, features = shape
    codes = torch.randint(0, 2**bits, (out, features), dtype=torch.uint8)
    d = (torch.rand(out, features // 32) * 0.01 + 1e-3).half().float()
    m = -(2.0 ** (bits - 1)) * d if kind == "centered" else -torch.rand_like(d)
    if kind == "wide":
        d = d * 1.0001
    packed, bias = pack_codes(codes, d, m, bits), torch.randn(out)
    for rows in ROWS:
        x = torch.randn(rows, features) * torch.logspace(-3, 3, features)
        assert torch.equal(tiled.packed_linear(x, packed, bias), plain.packed_linear(x, packed, bias))


def test_the_largest_sums_stay_exact(pair):
    """Of codes and activations at the ends of their ranges."""
    tiled, plain = pair
    d = torch.full((32, 3), 0.5)
    for code in (0, 255):
        for m in (torch.zeros_like(d), -128 * d):
            packed = pack_codes(torch.full((32, 96), code, dtype=torch.uint8), d, m, 8)
            x = torch.full((20, 96), -1.0)
            x[::2] = 1.0
            x[1, ::3] = 0.998
            assert torch.equal(tiled.packed_linear(x, packed), plain.packed_linear(x, packed))


@pytest.mark.parametrize("threads", [1, 3])
def test_few_and_many_rows_give_the_same_bits(pair, threads):
    torch.set_num_threads(threads)
    tiled, _ = pair
    codes = torch.randint(0, 16, (130, 576), dtype=torch.uint8)
    packed = pack_codes(codes, torch.rand(130, 18), torch.randn(130, 18), 4)
    floats = pack_floats(torch.randn(130, 576).bfloat16())
    x = torch.randn(150, 576)
    for run in (lambda x: tiled.packed_linear(x, packed), lambda x: tiled.float_linear(x, floats, rounded=True)):
        whole = run(x)
        for rows in ([0], [5, 6], range(100, 120), range(127, 150)):
            assert torch.equal(run(x[list(rows)]), whole[list(rows)])


@pytest.mark.parametrize("shape", [(1, 1), (31, 64), (33, 75), (96, 576)], ids=str)
def test_float_weights_differ_by_the_order_of_sums_alone(pair, shape):
    tiled, plain = pair
    weight = torch.randn(shape).bfloat16()
    packed, bias = pack_floats(weight), torch.randn(shape[0])
    for rows in (1, *ROWS):
        x = torch.randn(rows, shape[1])
        size = 2.0**-22 * (shape[1] + 8) * (x.abs() @ weight.float().abs().T + bias.abs())
        got, want = (k.float_linear(x, packed, bias, rounded=True) for k in pair)
        assert ((got - want).abs() <= size).all()
        assert torch.equal(tiled.float_linear(x, packed, bias), plain.float_linear(x, packed, bias))


class Library:
    """As a library built for a processor with tiles: what the kernel answers, and where the check lies."""

    def __init__(self, answer: int, path: str = "/no/such/library.so") -> None:
        self._name = path
        self.sluice_tiles_allow: Callable[[], int] = lambda: answer


@pytest.mark.parametrize(("answer", "lines"), [(1, 1), (2, 0), (0, 1)])
def test_unused_where_they_are_not_or_cannot_be_tried(caplog, answer, lines):
    lib = Library(answer)
    with caplog.at_level(logging.WARNING, "engine.kernels.cpu.tiles"):
        assert not usable(lib)
        assert not usable(lib)
    assert len(caplog.records) == lines


@pytest.mark.parametrize(
    ("body", "works"), [("return 0;", True), ("return 3;", False), ("__builtin_trap();", False)], ids=str
)
def test_a_process_tries_them_first(tmp_path, monkeypatch, caplog, body, works):
    (tmp_path / "check.cpp").write_text(f'extern "C" long sluice_tiles_check() {{ {body} }}\n')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        lib: ctypes.CDLL = build.load(build.FLAGS)
    except BuildError as error:
        pytest.skip(str(error))
    with caplog.at_level(logging.WARNING, "engine.kernels.cpu.tiles"):
        assert usable(Library(0, lib._name)) is works
    assert len(caplog.records) == (0 if works else 1)
