"""Declaring needs no torch, so that commands which only list things answer at once."""

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import proxreplay.data


@pytest.mark.parametrize("module", ["scenarios", "catalog", "transforms", "fetch", "roots"])
def test_declarations_do_not_import_torch(module):
    code = f"import sys, proxreplay.data.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("package", ["", ".data", ".evaluation", ".models", ".replay"])
def test_every_public_name_is_what_it_says_and_no_module(package):
    found = import_module(f"proxreplay{package}")
    for name in found.__all__:
        for _ in range(2):  # importing a module puts it in the place of a name like its own
            assert not isinstance(getattr(found, name), ModuleType), name


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'cifar1000'"):
        _ = proxreplay.data.cifar1000
