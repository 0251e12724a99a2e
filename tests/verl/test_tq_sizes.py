"""Bytes of real TensorDicts: nested tensors, arrays, text and whatever verl puts into the queue."""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
tensordict = pytest.importorskip("tensordict")

from verl_profiler.transfer_queue.sizes import Size, size_of  # noqa: E402


def nested(*lengths, layout=torch.jagged):
    return torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=layout)


def stack(*values):
    return tensordict.NonTensorStack(*values)


@pytest.mark.parametrize(
    ("value", "size"),
    [
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
    ],
    ids=str,
)
def test_one_field(value, size):
    """Exactly, as long as all rows are looked at."""
    data = tensordict.TensorDict({"field": value}, batch_size=[3])

    assert size == size_of(data)


def test_a_slice_counts_its_own_rows_only():
    """verl hands out views of larger batches."""
    data = tensordict.TensorDict({"x": torch.zeros(100, 10)}, batch_size=[100])

    assert 400 == size_of(data[:10]).total


@pytest.mark.parametrize("rows", [17, 1000])
def test_many_rows_are_estimated_from_a_few(rows):
    """Right for rows of one length, near for growing ones."""
    even = tensordict.TensorDict({"t": stack(*["x" * 40] * rows)}, batch_size=[rows])
    growing = tensordict.TensorDict(
        {"t": stack(*["x" * n for n in range(rows)])}, batch_size=[rows]
    )

    assert 40 * rows == size_of(even).total
    assert size_of(growing).total == pytest.approx(rows * (rows - 1) / 2, rel=0.02)


def test_values_that_cannot_be_measured_count_nothing():
    """And raise nothing."""

    class Odd:
        @property
        def nbytes(self):
            raise RuntimeError("no size")

    data = tensordict.TensorDict({"x": stack(Odd(), Odd())}, batch_size=[2])

    assert size_of(data).total >= 0
