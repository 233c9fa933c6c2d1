from __future__ import annotations

import pytest
import torch

from engine.kernels import cpu
from engine.kernels.cpu import build
from engine.kernels.cpu.ops import NativeKernels

# The other builds take the code that other processors run; matrix tiles are then emulated.
BUILDS = {"native": (), "portable": ("-DSLUICE_PORTABLE",), "tiles": ("-DSLUICE_EMULATE_TILES",)}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=BUILDS)
def kernels(request) -> NativeKernels:
    if not cpu.available():
        pytest.skip("no C++ compiler")
    tiles = True if request.param == "tiles" else None
    return NativeKernels(build.load(build.FLAGS + BUILDS[request.param]), tiles)


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    if not cpu.available():
        pytest.skip("no C++ compiler")
    return NativeKernels()
