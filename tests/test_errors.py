from shoal.errors import counted


def test_a_count_has_its_singular_and_plural() -> None:
    assert [counted(number, "voice") for number in (0, 1, 2, 1000)] == [
        "0 voices",
        "1 voice",
        "2 voices",
        "1,000 voices",
    ]
    assert [counted(number, "tensor is", "tensors are") for number in (1, 2)] == ["1 tensor is", "2 tensors are"]
