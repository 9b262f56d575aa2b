"""What a test needs is said by where it lies: tests/e2e runs the real stack, tests/gpu needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
E2E_TIMEOUT_S = 600
"""An end-to-end test starts engines in several processes; the default of pyproject.toml is for the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        suite = item.path.relative_to(TESTS).parts[0]
        if suite in ("e2e", "gpu"):
            item.add_marker(suite)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
