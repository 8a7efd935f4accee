import pytest
from huggingface_hub import constants

from tests.fixtures.small_hub import client_settings, small_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub on loopback, which the hub's client of this process asks."""
    with small_hub() as hub:
        # What is kept of a broken answer comes in whole chunks
        chunks = {"DOWNLOAD_CHUNK_SIZE": 10_000}
        for name, value in (client_settings(hub, tmp_path / "home") | chunks).items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
