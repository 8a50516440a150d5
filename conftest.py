"""Puts the repository root on sys.path, and keeps every test offline, on one thread and away from the user's settings."""
import pytest
import torch

torch.set_num_threads(1)
collect_ignore = [".ci"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No hub, no key: a test that needs either fails instead of reaching out."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
