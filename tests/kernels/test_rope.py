import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.rope import rope_table, rotate
from shoal.kernels.rope_values import rope_values


def test_table_values_are_representable_in_bf16() -> None:
    table = rope_table(300, 16, 1e6)
    assert table.shape == (300, 8, 2)
    assert table.dtype == torch.float32
    assert torch.equal(table, table.bfloat16().float())


def test_tables_are_the_cosine_and_sine_of_the_position() -> None:
    table = rope_table(50, 8, 10000.0)
    angle = torch.arange(50)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(table, torch.stack((angle.cos(), angle.sin()), dim=-1), rtol=0, atol=2**-8)


def test_a_longer_table_starts_with_the_shorter_one() -> None:
    assert torch.equal(rope_table(5000, 64, 1e4)[:77], rope_table(77, 64, 1e4))


def test_values_without_torch_differ_in_the_last_bit_of_a_few_entries_at_most() -> None:
    table, values = rope_table(2048, 64, 1e4), torch.from_numpy(rope_values(2048, 64, 1e4))
    assert (table != values).float().mean() < 1e-4
    assert torch.allclose(table, values, rtol=2**-7, atol=1e-6)


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 3, 16)
    assert torch.equal(rotate(x, rope_table(1, 16, 1e4)), x)


def test_adjacent_pairs_are_rotated_as_complex_numbers() -> None:
    x, table = torch.randn(5, 2, 8), rope_table(5, 8, 1e4)
    rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(table)[:, None]
    torch.testing.assert_close(rotate(x, table), torch.view_as_real(rotated).flatten(-2))


def test_every_head_of_a_position_is_rotated_by_the_same_angle() -> None:
    x, table = torch.randn(4, 1, 8), rope_table(4, 8, 1e4)
    torch.testing.assert_close(rotate(x.expand(4, 3, 8), table), rotate(x, table).expand(4, 3, 8))


@settings(deadline=None, max_examples=25)
@given(position=st.integers(0, 4000))
def test_a_rotation_preserves_norms_up_to_the_rounding_of_the_table(position: int) -> None:
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(position))
    rotated = rotate(x, rope_table(4001, 32, 1e6)[position : position + 1])
    assert abs(float(rotated.norm() / x.norm()) - 1) < 2**-7


def test_the_dtype_of_the_input_is_kept_and_the_arithmetic_is_fp32() -> None:
    x, table = torch.randn(3, 2, 8).bfloat16(), rope_table(3, 8, 1e4)
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())
