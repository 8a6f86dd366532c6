from __future__ import annotations

import sys

import pytest

from pfedgate.engine.workers import steady


def test_nothing_is_changed_where_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert steady.__wrapped__() is False


def test_nothing_is_changed_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert steady.__wrapped__() is False


def test_asking_twice_is_asking_once() -> None:
    assert steady() is steady()
