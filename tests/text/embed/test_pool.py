"""Several encoders behind one: order, workers that die, errors, and nothing left behind. The encoders here are fakes."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import until

from anytorch.errors import DeviceError, DeviceLost, ModelError, OutOfMemory, UsageError
from anytorch.text.embed import pool_worker
from anytorch.text.embed.pool import PoolEncoder, PoolJob
from anytorch.text.embed.pool_worker import Blocks

# Workers import it by name: it lies in a folder that they, like everything the parent sees, have on their path.
FAKES = """
import os, signal, time
import numpy as np
from anytorch.errors import ModelError


class Encoder:
    width, padded = 8, False

    def __init__(self, wait_s=0.0, die_on=-1, raise_on=-1, most_tokens=1 << 30, fail="", once=""):
        if fail:
            raise ModelError(fail, hint="look at the model") if fail != "die" else SystemExit(3)
        self.wait_s, self.die_on, self.raise_on, self.most_tokens, self.once = wait_s, die_on, raise_on, most_tokens, once

    def run(self, ids, starts):
        time.sleep(self.wait_s)
        print("a library that prints")
        if self.die_on in ids and not (self.once and os.path.exists(self.once)):
            if self.once:
                open(self.once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.raise_on in ids and not (self.once and os.path.exists(self.once)):
            if self.once:
                open(self.once, "w").close()
            raise ValueError(f"token {self.raise_on} is not to be had")
        if len(ids) > self.most_tokens:
            raise MemoryError(f"{len(ids)} tokens")
        rows = [np.full(8, ids[a:b].sum(), np.float32) + np.arange(8) for a, b in zip(starts[:-1], starts[1:])]
        return np.stack(rows).astype(np.float32)

    def describe(self):
        return {"kernels": "fake", "process": os.getpid()}

    def close(self):
        pass
"""


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PoolEncoder]]:
    """`make_pool({…}, {…})` → a pool with one fake worker for each dictionary of its arguments."""
    (tmp_path / "pool_fakes.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[PoolEncoder] = []

    def make(*arguments: dict[str, Any]) -> PoolEncoder:
        jobs = [PoolJob(f"fake:{place}", given, factory="pool_fakes:Encoder") for place, given in enumerate(arguments)]
        made.append(PoolEncoder(jobs))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def batch(*texts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([token for text in texts for token in text], np.int32)
    return ids, np.cumsum([0, *(len(text) for text in texts)]).astype(np.int32)


def expected(*texts: list[int]) -> np.ndarray:
    return np.stack([np.full(8, sum(text), np.float32) + np.arange(8, dtype=np.float32) for text in texts])


def is_running(process: int) -> bool:
    """A process that has ended and waits for its parent to ask is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def shares_of(pool: PoolEncoder) -> list[int]:
    return [worker["batches"] for worker in pool.describe()["workers"]]


def all_at_work(pool: PoolEncoder) -> list[int]:
    """Wait until every worker has computed something: processes start in their own time. How many batches each had."""
    until(lambda: pool.submit(*batch([1])).result() is not None and all(shares_of(pool)))
    return shares_of(pool)


# --- work ------------------------------------------------------------------------------------------------------------


def test_batches_of_all_sizes_come_back_to_whoever_sent_them(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"wait_s": 0.5}, {})
    before = all_at_work(pool)
    texts = [[[number, k] * (1 + number % 7) for k in range(1 + number % 5)] for number in range(40)]
    pending = [pool.submit(*batch(*some)) for some in texts]
    for some, task in zip(texts, pending, strict=True):
        np.testing.assert_array_equal(task.result(), expected(*some))
    shares = [now - then for now, then in zip(shares_of(pool), before, strict=True)]
    assert sum(shares) == 40 and shares[0] < shares[1], "the faster one takes more"
    assert pool.width == 8 and pool.padded is False and pool.in_flight == 4


def test_one_batch_is_shared_out(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"wait_s": 0.05}, {"wait_s": 0.05})
    texts = [[number] * 100 for number in range(20)]
    all_at_work(pool)

    def every_worker_had_a_part() -> bool:
        before = shares_of(pool)
        np.testing.assert_array_equal(pool.run(*batch(*texts)), expected(*texts))
        return all(now > then for now, then in zip(shares_of(pool), before, strict=True))

    until(every_worker_had_a_part)  # at once, unless the machine gives one of them no time just then


def test_an_answer_belongs_to_the_caller(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({})
    first = pool.submit(*batch([1])).result()
    pool.submit(*batch([2])).result()
    np.testing.assert_array_equal(first, expected([1]))
    first[:] = 0  # and may be written to


def test_vectors_can_be_written_where_they_belong(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({}, {})
    out = np.zeros((5, 8), np.float32)
    places = np.array([4, 0, 2])
    pool.submit(*batch([1], [2, 2], [3]), out, places).result()
    np.testing.assert_array_equal(out[places], expected([1], [2, 2], [3]))
    assert not out[[1, 3]].any() and pool.normalize is False


# --- workers that die ------------------------------------------------------------------------------------------------


def test_a_killed_workers_batches_are_computed_by_the_others(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"wait_s": 0.05}, {"wait_s": 0.05})
    pending = [pool.submit(*batch([number])) for number in range(20)]
    pending[1].result()
    victim = pool.process_ids[0]
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    for number, task in enumerate(pending):
        np.testing.assert_array_equal(task.result(), expected([number]))
    until(lambda: pool.process_ids[0] not in (None, victim), "it to be started once more")
    assert "status -9" in pool.describe()["pool_notes"][0]


def kill_first(pool: PoolEncoder) -> None:
    until(lambda: pool.describe()["workers"][0]["alive"] and pool.process_ids[0] is not None)
    victim = pool.process_ids[0]
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    until(lambda: pool.process_ids[0] != victim)


def test_a_worker_that_dies_twice_without_finishing_anything_is_given_up(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({}, {})
    kill_first(pool)
    kill_first(pool)
    until(lambda: not pool.describe()["workers"][0]["alive"] and pool.process_ids[0] is None)
    np.testing.assert_array_equal(pool.submit(*batch([5])).result(), expected([5]))
    assert pool.describe()["workers"][0]["starts"] == 2


def test_a_worker_that_works_between_its_deaths_is_started_each_time(make_pool: Callable[..., PoolEncoder]) -> None:
    """A pool of a service lives for months: what happened last week is no reason to do without a device."""
    pool = make_pool({})
    for number in range(3):
        np.testing.assert_array_equal(pool.submit(*batch([number])).result(), expected([number]))
        kill_first(pool)
    np.testing.assert_array_equal(pool.submit(*batch([7])).result(), expected([7]))
    assert pool.describe()["workers"][0]["starts"] == 4


def test_all_workers_killed_at_once(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"wait_s": 0.05}, {"wait_s": 0.05})
    pending = [pool.submit(*batch([number])) for number in range(10)]
    pending[0].result()
    with pool._change:  # else what the first had begun may be given to the second before that is killed, too
        for process in pool.process_ids:
            assert process is not None
            os.kill(process, signal.SIGKILL)
        until(lambda: pool.process_ids == [None, None])
    for number, task in enumerate(pending):
        np.testing.assert_array_equal(task.result(), expected([number]))


def test_a_batch_that_kills_whoever_computes_it_is_given_up(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"die_on": 13}, {"die_on": 13})
    bad = pool.submit(*batch([13]))
    good = [pool.submit(*batch([number])) for number in range(6)]
    with pytest.raises(DeviceLost, match="ended with status -9"):
        bad.result()
    for number, task in enumerate(good):
        np.testing.assert_array_equal(task.result(), expected([number]))


def test_when_no_worker_is_left_everyone_hears_of_it(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"die_on": 13})
    with pool._change:  # all are there before the worker has died for the last time
        pending = [pool.submit(*batch([13])) for _ in range(5)]
    for task in pending:
        with pytest.raises(DeviceLost):
            task.result()
    with pytest.raises(DeviceLost, match="all workers have ended"):
        pool.submit(*batch([1]))


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_comes_with_the_workers_own_message(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"raise_on": 7}, {"raise_on": 7})
    with pytest.raises(DeviceError, match=r"worker \d \(fake:\d\): ValueError: token 7 is not to be had"):
        pool.submit(*batch([7])).result()
    np.testing.assert_array_equal(pool.submit(*batch([8])).result(), expected([8]))
    assert all(worker["alive"] and worker["starts"] == 1 for worker in pool.describe()["workers"])


def test_what_fails_on_one_is_tried_on_another(make_pool: Callable[..., PoolEncoder], tmp_path: Path) -> None:
    once = str(tmp_path / "failed-once")
    pool = make_pool({"raise_on": 7, "once": once}, {"raise_on": 7, "once": once})
    np.testing.assert_array_equal(pool.submit(*batch([7])).result(), expected([7]))


def test_out_of_memory_is_for_the_caller_to_act_on(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"most_tokens": 4}, {"most_tokens": 4})
    with pytest.raises(OutOfMemory, match="5 tokens"):
        pool.submit(*batch([1, 2, 3, 4, 5])).result()
    np.testing.assert_array_equal(pool.submit(*batch([1, 2])).result(), expected([1, 2]))


def test_no_worker_can_start(make_pool: Callable[..., PoolEncoder]) -> None:
    with pytest.raises(ModelError, match="the weights are torn") as caught:
        make_pool({"fail": "the weights are torn"}, {"fail": "the weights are torn"})
    assert caught.value.hint == "look at the model"
    with pytest.raises(DeviceError, match=r"SystemExit: 3"):
        make_pool({"fail": "die"})


def test_one_of_two_cannot_start(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"fail": "no such card"}, {})
    np.testing.assert_array_equal(pool.submit(*batch([1])).result(), expected([1]))
    assert any("no such card" in note for note in pool.describe()["pool_notes"])
    assert pool.in_flight == 2


def test_a_worker_that_cannot_even_be_imported(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No module named 'no_such_module'"):
        PoolEncoder([PoolJob("fake", {}, factory="no_such_module:build")])


# --- ends ------------------------------------------------------------------------------------------------------------


def test_closing_ends_everything(make_pool: Callable[..., PoolEncoder]) -> None:
    pool = make_pool({"wait_s": 0.2}, {"wait_s": 0.2})
    pending = [pool.submit(*batch([number])) for number in range(50)]  # far more than are done meanwhile
    processes = [process for process in pool.process_ids if process is not None]
    assert len(processes) == 2 and pool.folder.is_dir()
    pool.close()
    pool.close()
    assert not pool.folder.exists() and not any(is_running(process) for process in processes)
    with pytest.raises(UsageError, match="closed"):
        pending[-1].result()
    with pytest.raises(UsageError, match="closed"):
        pool.submit(*batch([1]))


@pytest.mark.parametrize("end", ["closed", "all workers have ended"])
def test_a_batch_is_refused_that_is_ready_only_after_the_end(
    make_pool: Callable[..., PoolEncoder], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its caller would wait for ever: nobody looks at what waits any more."""
    pool = make_pool({"die_on": 13})
    views = pool_worker.Block.views

    def late(self: pool_worker.Block, *sizes: int) -> Any:
        if not done:
            done.append(1)
            if end == "closed":
                pool.close()
            else:
                with pytest.raises(DeviceLost):
                    pool.submit(*batch([13])).result()
        return views(self, *sizes)

    done: list[int] = []
    monkeypatch.setattr(pool_worker.Block, "views", late)
    with pytest.raises((UsageError, DeviceLost), match=end):
        pool.submit(*batch([1]))


def test_a_forgotten_pool_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool_fakes.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = PoolEncoder([PoolJob("fake", {}, factory="pool_fakes:Encoder")])
    np.testing.assert_array_equal(pool.submit(*batch([3])).result(), expected([3]))
    (process,), folder = pool.process_ids, pool.folder
    assert process is not None
    del pool

    def gone() -> bool:
        gc.collect()
        return not is_running(process) and not folder.exists()

    until(gone)


SCRIPT = """
import signal, sys, time
import numpy as np
from anytorch.text.embed.pool import PoolEncoder, PoolJob
pool = PoolEncoder([PoolJob("fake", {"wait_s": 0.1}, factory="pool_fakes:Encoder") for _ in range(2)])
print(pool.folder, *pool.process_ids, flush=True)
pending = [pool.submit(np.array([1], np.int32), np.array([0, 1], np.int32)) for _ in range(1000)]
for task in pending:
    task.result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_nothing_is_left_when_the_program_ends(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "pool_fakes.py").write_text(FAKES)
    program = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    folder, *processes = program.stdout.readline().split()
    try:
        assert Path(folder).is_dir() and all(is_running(int(process)) for process in processes)
        if number is signal.SIGINT:
            os.killpg(program.pid, number)  # as a terminal does: the workers get it, too
        else:
            program.send_signal(number)
        told = program.communicate(timeout=300)[1]
        assert ("KeyboardInterrupt" in told) == (number is signal.SIGINT)
        until(lambda: not Path(folder).exists() and not any(is_running(int(p)) for p in processes))
    finally:
        program.kill()
        program.communicate()


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_are_used_again_and_grow() -> None:
    blocks = Blocks()
    try:
        small = blocks.take(10, 2, 4)
        ids, starts, vectors = small.views(10, 2, 4)
        assert ids.shape == (10,) and starts.shape == (3,) and vectors.shape == (2, 4)
        ids[:], starts[:], vectors[:] = 1, 2, 3
        assert (ids == 1).all() and (starts == 2).all() and (vectors == 3).all(), "they do not overlap"
        del ids, starts, vectors
        blocks.give(small)
        assert blocks.take(5, 1, 4) is small
        blocks.give(small)
        large = blocks.take(1 << 20, 2, 4)
        assert large.nbytes >= 4 << 20 and not small.path.exists()
    finally:
        blocks.close()
    assert not blocks.folder.exists()


def test_no_room_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, nbytes: int) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    blocks = Blocks()
    monkeypatch.setattr(pool_worker, "reserve", full)
    with pytest.raises(OutOfMemory, match=r"no room for \d+ MiB of shared memory") as caught:
        blocks.take(1 << 20, 1, 1)
    assert "shm-size" in caught.value.hint and not list(blocks.folder.iterdir())
    blocks.close()


def test_a_small_shared_memory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's /dev/shm has 64 MB; the temporary folder does instead."""
    monkeypatch.setattr(pool_worker, "SHARED", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blocks = Blocks()
    assert blocks.folder.parent == tmp_path
    blocks.close()


def test_folders_of_dead_pools_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(pool_worker, "SHARED", tmp_path)
    for owner in (ended.pid, os.getpid()):
        (tmp_path / f"{pool_worker.PREFIX}{owner}-x").mkdir()
    (tmp_path / "somebody-else").mkdir()
    pool_worker.sweep()
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {f"{pool_worker.PREFIX}{os.getpid()}-x", "somebody-else"}
