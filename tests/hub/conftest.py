import pytest
from huggingface_hub import constants

from tests.fixtures.small_hub import small_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub on loopback, which the hub's client in this process asks, with a cache of its own."""
    with small_hub() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "home" / "token"),
            "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": 10_000,  # what is kept of a broken answer comes in whole chunks
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
