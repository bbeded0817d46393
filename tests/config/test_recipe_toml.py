"""What the TOML writer promises: the standard reader gives back the same data."""

from __future__ import annotations

import tomllib
from datetime import UTC

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspan.config import toml

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.datetimes(timezones=st.just(UTC)),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6), max_leaves=20
)


@given(st.dictionaries(keys, values, max_size=6))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_reads_back_as_written(data):
    assert tomllib.loads(toml.dumps(data)) == data


def test_arrays_of_tables_get_headers_so_that_recipes_stay_readable():
    assert '[[rewards]]\nuse = "a"' in toml.dumps({"rewards": [{"use": "a"}, {"use": "b"}]})


def test_none_is_refused_and_not_written_as_something_else():
    with pytest.raises(TypeError, match="cannot hold None"):
        toml.dumps({"a": None})
