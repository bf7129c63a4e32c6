"""The error tree: each class survives the trip between processes with all that it carries."""

from __future__ import annotations

import pickle

import pytest

from cluster.common import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.SplitscribeError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickling_keeps_everything(cls: type[errors.SplitscribeError]) -> None:
    error = cls("what happened", param="file", code="some_code", retry_after_s=2.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.param, copy.code, copy.retry_after_s) == (
        "what happened",
        "file",
        "some_code",
        2.5,
    )
    assert str(copy) == "what happened"


def test_the_drawing_names_every_class() -> None:
    assert not [cls for cls in CLASSES if cls.__name__ not in (errors.__doc__ or "")]
