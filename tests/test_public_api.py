"""Every export explains itself in help()."""

import inspect

import pytest

import tpuswarm


@pytest.mark.parametrize("name", tpuswarm.__all__)
def test_export_and_its_methods_have_docstrings(name):
    export = getattr(tpuswarm, name)
    members = vars(export).items() if inspect.isclass(export) else []
    methods = {
        key: getattr(value, "__func__", value)
        for key, value in members
        if not key.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    }
    assert inspect.getdoc(export)
    assert [key for key, method in methods.items() if not method.__doc__] == []
