"""Every export explains itself in help()."""

import inspect

import pytest

import tpuswarm


@pytest.mark.parametrize("name", tpuswarm.__all__)
def test_export_and_its_methods_have_docstrings(name):
    export = getattr(tpuswarm, name)
    methods = [
        key
        for key, value in (vars(export).items() if inspect.isclass(export) else ())
        if not key.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]
    assert inspect.getdoc(export)
    assert [key for key in methods if not inspect.getdoc(getattr(export, key))] == []
