"""Settings that every test shares.

Out of the way of the installed package: the repository root, which ``python -m pytest`` puts on
``sys.path``, is removed again, so that ``kernels`` is not importable as a top-level module.
Compiled code goes to one folder for the run. Tests are deterministic and use few threads.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# Read when torch is imported. Processes that a test starts inherit it, so they share the
# cache; only the process that made the folder removes it.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fpdt-inductor-")
    atexit.register(
        shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True
    )

import torch  # noqa: E402

if "OMP_NUM_THREADS" not in os.environ:
    # Test processes side by side use one thread each; most of a test is tracing anyway.
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    torch.set_num_threads(1 if parallel else min(2, os.cpu_count() or 1))

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=20,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("deterministic")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No test sees what an earlier one compiled."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def disk_pair(tmp_path: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model that offloads everything to ``tmp_path``, and the same model without."""
    from disk_cases import DISK
    from tiny_models import plain_pair

    import fpdt_compile

    model, reference = plain_pair(layers=2)
    fpdt_compile.optimize(model, offload_dir=tmp_path, **DISK)
    return model, reference
