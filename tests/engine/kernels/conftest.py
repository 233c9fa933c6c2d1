from __future__ import annotations

import pytest
import torch

from engine.kernels import cpu
from engine.kernels.cpu import build
from engine.kernels.cpu.ops import NativeKernels

# The second build takes the code that other processors run.
BUILDS = {"native": (), "portable": ("-DSLUICE_PORTABLE",)}


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
    return NativeKernels(build.load(build.FLAGS + BUILDS[request.param]))


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    if not cpu.available():
        pytest.skip("no C++ compiler")
    return NativeKernels()
