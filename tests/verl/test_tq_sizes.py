"""Bytes of real TensorDicts: nested tensors, arrays, text and whatever verl puts into the queue."""

import pytest

from verl_profiler.probes.batch_sizes import Size, size_of, tensors_of


@pytest.fixture
def tensordict():
    return pytest.importorskip("tensordict")


def test_one_field(tensordict):
    """Exactly, as long as all rows are looked at."""
    import torch

    def nested(*lengths, layout=torch.jagged):
        return torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=layout)

    def stack(*values):
        return tensordict.NonTensorStack(*values)

    for value, size in (
        (torch.zeros(3, 5, dtype=torch.int64), Size(120, 0)),
        (torch.zeros(3, 8, dtype=torch.bfloat16), Size(48, 0)),
        (nested(1, 2, 3), Size(24, 0)),
        (nested(1, 2, 3, layout=torch.strided), Size(24, 0)),
        (stack("ab", "cd", "efg"), Size(0, 7)),
        (stack("数", "", "x"), Size(0, 4)),
        (stack({"gt": "12"}, {"gt": "3"}, {"gt": ""}), Size(0, 9)),
        (stack([1, 2.0], None, (True,)), Size(0, 24)),
        (stack({"image": torch.zeros(10)}, {}, {}), Size(0, 45)),
        (tensordict.NonTensorData("shared", batch_size=[3]), Size(0, 6)),
        (tensordict.TensorDict({"x": torch.zeros(3, 2)}, batch_size=[3]), Size(24, 0)),
    ):
        data = tensordict.TensorDict({"field": value}, batch_size=[3])
        assert size == size_of(data), value
        # Events have the bytes of tensors, and how many fields are none: the same ones.
        assert (size.tensors, int(size.others > 0)) == tensors_of(data), value
    # verl hands out views of larger batches.
    data = tensordict.TensorDict({"x": torch.zeros(100, 10)}, batch_size=[100])
    assert 400 == size_of(data[:10]).total


@pytest.mark.parametrize("rows", [17, 1000])
def test_many_rows_are_estimated_from_a_few(tensordict, rows):
    """Right for rows of one length, near for growing ones."""

    def text_of(*lengths):
        rows = tensordict.NonTensorStack(*("x" * length for length in lengths))
        return size_of(tensordict.TensorDict({"t": rows}, batch_size=[len(lengths)])).total

    assert 40 * rows == text_of(*[40] * rows)
    assert text_of(*range(rows)) == pytest.approx(rows * (rows - 1) / 2, rel=0.02)


def test_values_that_cannot_be_measured_count_nothing(tensordict):
    """And raise nothing."""

    class Odd:
        @property
        def nbytes(self):
            raise RuntimeError("no size")

    rows = tensordict.NonTensorStack(Odd(), Odd())

    assert size_of(tensordict.TensorDict({"x": rows}, batch_size=[2])).total >= 0
