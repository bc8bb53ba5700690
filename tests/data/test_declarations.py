"""Declaring needs no torch, so that commands which only list things answer at once."""

import subprocess
import sys

import pytest

import proxreplay.data


@pytest.mark.parametrize("module", ["scenarios", "catalog", "transforms", "fetch", "roots"])
def test_declarations_do_not_import_torch(module):
    code = f"import sys, proxreplay.data.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_imported():
    assert all(getattr(proxreplay.data, name) for name in proxreplay.data.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'cifar1000'"):
        _ = proxreplay.data.cifar1000
