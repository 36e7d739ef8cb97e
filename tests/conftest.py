from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import FAMILIES, loom_of

if TYPE_CHECKING:
    from kvloom.loom import Loom

torch.set_num_threads(1)  # tiny models; two test workers on two cores


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family_loom(request: pytest.FixtureRequest) -> Loom:
    """A Loom over each supported family's tiny model."""
    return loom_of(request.param)


@pytest.fixture(scope="session")
def llama_loom() -> Loom:
    return loom_of("llama")
