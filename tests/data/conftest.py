import pytest


@pytest.fixture(autouse=True)
def own_folders(request, monkeypatch):
    """Tests on made-up data keep to their own folder, whatever the environment says."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.delenv("PROXREPLAY_CACHE", raising=False)
        monkeypatch.delenv("PROXREPLAY_DATA", raising=False)
