"""Markers of the kernel tests."""


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU of compute capability 9.0; skipped elsewhere")
