import pytest

from shoal.errors import counted, device_errors


def test_a_count_has_its_singular_and_plural() -> None:
    assert [counted(number, "voice") for number in (0, 1, 2, 1000)] == [
        "0 voices",
        "1 voice",
        "2 voices",
        "1,000 voices",
    ]
    assert [counted(number, "tensor is", "tensors are") for number in (1, 2)] == ["1 tensor is", "2 tensors are"]


def test_an_error_of_a_device_is_handled_and_an_interrupt_is_not() -> None:
    handled: list[Exception] = []
    with device_errors(handled.append):
        raise KeyError("driver")
    assert [type(each) for each in handled] == [KeyError]
    with pytest.raises(KeyboardInterrupt), device_errors(handled.append):
        raise KeyboardInterrupt
    assert len(handled) == 1


def test_a_handler_of_device_errors_may_raise_the_error_again() -> None:
    def fail(error: Exception) -> None:
        raise RuntimeError("backend graph failed") from error

    with pytest.raises(RuntimeError, match="backend graph failed") as raised, device_errors(fail):
        raise KeyError("driver")
    assert isinstance(raised.value.__cause__, KeyError)
