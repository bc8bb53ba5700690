import pytest


@pytest.fixture(autouse=True)
def own_folders(request, monkeypatch):
    """Tests on made-up data keep to their own folder, whatever the environment says."""
    if "tmp_path" in request.fixturenames:
        cache = request.getfixturevalue("tmp_path_factory").mktemp("cache")
        monkeypatch.setenv("PROXREPLAY_CACHE", str(cache))
        monkeypatch.delenv("PROXREPLAY_DATA", raising=False)
