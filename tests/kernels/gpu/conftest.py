"""Where the Triton kernels' tests run: on the GPU if there is one, else under Triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels' tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
