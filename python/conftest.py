"""What tests and the examples in docstrings share."""

import pytest


@pytest.fixture(autouse=True)
def folder_of_examples(doctest_namespace, tmp_path):
    doctest_namespace["tmp"] = tmp_path
