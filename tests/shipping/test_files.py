"""What a node's disk has arrives on the driver's, byte by byte, in pieces, without Ray."""

import gzip
import os
import random

import pytest
from shipping.copies import local, write

from verl_profiler.events.shipping import process_of, travels
from verl_profiler.nodes.files import disk_of, listing, read
from verl_profiler.nodes.receiver import Receiver
from verl_profiler.recording.process_header import claim_name


@pytest.fixture
def node(tmp_path):
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "driver").mkdir()
    return tmp_path / "driver"


def receiver_of(run, processes=None):
    def claim(known, process):
        known[process] = claim_name(run, process, known.values())
        return known[process]

    return Receiver(run, claim, processes)


def ship(node, receiver, limit=lambda: 1 << 20, meanwhile=lambda: None):
    """Take all that there is; return the sizes of the pieces of each call."""
    calls = []

    def reading(wanted):
        pieces = read(node, wanted, limit())
        calls.append([len(piece.data or b"") for piece in pieces])
        meanwhile()
        return pieces

    receiver.take(listing(node)[1], reading, complete=True)
    return calls


def test_only_files_of_a_run_travel():
    """Not what is hidden, partial, made by readers, or gathered by captures."""
    wanted = [
        "step_1/worker_0.jsonl",
        "step_1/worker_0.jsonl.gz",
        "processes/worker_0.json",
        "open/worker_0.json",
        "evidence/1/worker_0.json",
        "nsight/journal/actor_0.jsonl",
    ]
    others = [
        *("run.json", ".disk", ".cache/events-1/part.json", "step_1/.worker_0.jsonl.packing"),
        *("processes/worker_0.json.part", "nsight/raw/a.json", "nsight/actor_0.step1.json"),
        "step_1/notes.txt",
    ]
    assert wanted == [name for name in (*wanted, *others) if travels(name)]
    assert "tq_storage_n.local_7" == process_of("step_1/tq_storage_n.local_7.jsonl.gz")


def test_a_file_that_grows_is_sent_by_whole_lines_from_where_it_ended(node, driver):
    """The torn line comes once its end is there; a second round sends nothing."""
    receiver = receiver_of(driver)
    write(node, "processes/worker_1.json", "{}")
    write(node, "step_1/worker_1.jsonl", "one\ntwo\nthr")

    ship(node, receiver)
    assert b"one\ntwo\n" == local(driver)["step_1/worker_1.jsonl"]
    assert [] == ship(node, receiver)

    write(node, "step_1/worker_1.jsonl", "ee\nfour\n", "ab")
    ship(node, receiver)
    assert local(node) == local(driver)


def test_pieces_are_bounded_and_a_long_line_comes_whole(node, driver):
    """As does a compressed file."""
    limit = 7
    receiver = receiver_of(driver)
    write(node, "processes/worker_1.json", '{"a": 1}')
    write(node, "step_1/worker_1.jsonl", "a" * 500 + "\n" + "b\n" * 300)
    packed = gzip.compress(random.Random(0).randbytes(900))
    write(node, "step_0/worker_1.jsonl.gz", packed)

    for sizes in ship(node, receiver, lambda: limit):
        # A line is never cut.
        assert sum(sizes[:-1]) < limit
        assert sizes[-1] <= max(limit, 501, len(packed))

    assert local(node) == local(driver)


def test_what_a_process_removed_is_removed_and_nothing_else(node, driver):
    """Open calls that ended; not the old steps that somebody deleted to make room on the node."""
    receiver = receiver_of(driver)
    write(node, "processes/worker_1.json", "{}")
    write(node, "open/worker_1.json", "{}")
    write(node, "step_1/worker_1.jsonl", "one\n")
    ship(node, receiver)
    (node / "open/worker_1.json").unlink()
    (node / "step_1/worker_1.jsonl").unlink()

    ship(node, receiver)

    assert {"processes/worker_1.json", "step_1/worker_1.jsonl"} == {*local(driver)}
    # Its process makes it again.
    write(node, "step_1/worker_1.jsonl", "two\n")
    ship(node, receiver)
    assert b"one\ntwo\n" == local(driver)["step_1/worker_1.jsonl"]
    # Somebody removed the copy: what is there now comes whole, after one failed round.
    write(node, "step_1/worker_1.jsonl", "three\n", "ab")
    (driver / "step_1/worker_1.jsonl").unlink()
    with pytest.raises(OSError, match="has 0 bytes"):
        ship(node, receiver)
    ship(node, receiver)
    assert local(node) == local(driver)


def test_shipping_goes_on_where_a_killed_driver_ended(node, driver):
    """Also in the middle of a line; nothing is sent twice."""
    cut = 6
    lines = b"one\ntwo\nthree\n"
    write(node, "processes/worker_1.json", "{}")
    write(node, "step_1/worker_1.jsonl", lines)
    write(node, "step_0/worker_1.jsonl.gz", gzip.compress(b"zero\n"))
    first = receiver_of(driver)
    ship(node, first)
    os.truncate(driver / "step_1/worker_1.jsonl", cut)

    second = receiver_of(driver, first.processes)
    ship(node, second)

    assert local(node) == local(driver)
    assert second.size_bytes == len(lines) - cut + len(b"{}")


def test_random_histories_end_equal(node, driver):
    """Processes append, compress and replace at any moment, also in the middle of a shipment."""
    for seed in range(12):
        chance = random.Random(seed)
        run, there = driver / str(seed), node / str(seed)
        run.mkdir()
        receiver = receiver_of(run)
        history = {}

        def happens(chance=chance, there=there, history=history):
            name = f"worker_{chance.randrange(3)}"
            write(there, f"processes/{name}.json", f"{{{chance.random()}}}")
            step = f"step_{chance.randrange(3)}"
            plain = there / step / f"{name}.jsonl"
            packed = plain.with_name(f"{plain.name}.gz")
            if plain.exists() and not packed.exists() and chance.random() < 0.3:
                packed.write_bytes(gzip.compress(plain.read_bytes()))
                plain.unlink()
            text = "".join(f"{chance.random()}\n" for _ in range(chance.randrange(1, 9)))
            write(there, f"{step}/{name}.jsonl", text, "ab")
            history.setdefault(f"{step}/{name}", []).append(text)

        for _ in range(20):
            happens()
            ship(
                there,
                receiver,
                lambda chance=chance: chance.choice([5, 40, 4000]),
                lambda chance=chance, happens=happens: chance.random() < 0.3 and happens(),
            )
            if chance.random() < 0.2:
                receiver = receiver_of(run, receiver.processes)
        for _ in range(3):
            ship(there, receiver)

        assert local(there) == local(run), seed
        for name, texts in history.items():
            packed = run / f"{name}.jsonl.gz"
            found = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
            plain = run / f"{name}.jsonl"
            found += plain.read_bytes() if plain.exists() else b""
            assert "".join(texts).encode() == found


def test_the_disk_has_one_name_for_all(tmp_path):
    """The first one chooses it; a folder that is not there has none."""
    assert disk_of(tmp_path / "none") is None
    name = disk_of(tmp_path)
    assert name
    assert name == disk_of(tmp_path)
    assert [".disk"] == [path.name for path in tmp_path.iterdir()]
