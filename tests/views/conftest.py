"""The events written by hand that the tests of the analyses use."""

from analysis.conftest import conversation, span, tables

__all__ = ["conversation", "span", "tables"]
