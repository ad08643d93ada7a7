# SPDX-License-Identifier: Apache-2.0
"""Objects of vLLM's classes, and of users' subclasses of them, get a mixin of torpor; their classes do not."""

import abc

import pytest

from torpor.vllm.mixed_in import mix_in, mix_in_behind


class Stock:
    def sleep(self):
        return ["stock"]


class Mixin:
    def sleep(self):
        return ["torpor", *super().sleep()]


class Own(Stock):
    def __init__(self):
        self.kept = 1

    def sleep(self):
        return ["user", *super().sleep()]


def test_a_mixin_goes_before_the_class_of_an_object():
    one, other = Own(), Own()
    mix_in(one, Mixin)
    mix_in(one, Mixin)
    assert one.sleep() == ["torpor", "user", "stock"] and other.sleep() == ["user", "stock"]
    assert isinstance(one, Own) and type(one).__name__ == "Own" and one.kept == 1


def test_a_users_subclass_keeps_the_first_word_over_its_methods():
    one, plain = Own(), Stock()
    for each in (one, one, plain):
        mix_in_behind(each, Mixin, Stock)
    assert one.sleep() == ["user", "torpor", "stock"] and plain.sleep() == ["torpor", "stock"]
    assert Own().sleep() == ["user", "stock"] and Stock().sleep() == ["stock"]


def test_a_mixin_of_an_abstract_class_derives_from_it():
    class Client(abc.ABC):  # noqa: B024
        def sleep(self):
            return ["client"]

    class InFront(Client):
        def sleep(self):
            return ["torpor", *super().sleep()]

    class Async(Client):
        def sleep(self):
            return ["async", *super().sleep()]

    one = Async()
    mix_in(one, InFront)
    assert one.sleep() == ["torpor", "async", "client"]
    with pytest.raises(TypeError, match="layout"):
        mix_in(Async(), Mixin)
