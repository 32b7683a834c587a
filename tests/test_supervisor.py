"""What all workers are told holds for processes that die at the worst moment and come back."""

import asyncio

import pytest

from k3rl.errors import EngineError
from k3rl.supervisor import Supervisor, WorkerLost
from tests.builders import open_bench, until


class Process:
    """A handle over a process that a test kills: it plays until it is stopped or dead."""

    def __init__(self, name="p"):
        self.name, self.lives, self.said = name, [], []
        self.stand_up()

    def stand_up(self):
        self.is_dead, self.is_playing = asyncio.Event(), False
        self.is_stopped = asyncio.Event()
        self.dies_after = None

    async def run(self, worker_id):
        self.lives.append((worker_id, self.is_playing))
        ends = [asyncio.create_task(event.wait()) for event in (self.is_dead, self.is_stopped)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self.is_dead.is_set():
            raise WorkerLost("killed")

    async def tell(self, verb):
        if self.is_dead.is_set():
            raise WorkerLost("killed")
        self.said.append(verb)
        self.is_playing = verb == "resume"
        if self.dies_after == verb:
            self.is_dead.set()
        elif verb == "stop":
            self.is_stopped.set()

    async def pause(self):
        await self.tell("pause")

    async def resume(self):
        await self.tell("resume")

    async def stop(self):
        await self.tell("stop")

    async def revive(self):
        self.stand_up()


def supervised(tmp_path, body, max_restarts=3):
    async def go():
        async with open_bench(tmp_path) as bench:
            process = Process()
            supervisor = Supervisor([process], bench.store, max_restarts)
            supervisor.start()
            try:
                await asyncio.wait_for(body(supervisor, process), 20)
            finally:
                await supervisor.aclose()

    asyncio.run(go())


async def lives(process, count):
    async def there():
        return len(process.lives) >= count

    await until(there)


def test_a_worker_starts_paused_and_plays_when_told(tmp_path):
    async def body(supervisor, process):
        await lives(process, 1)
        assert process.lives[0][1] is False
        await supervisor.play()
        assert process.is_playing
        await supervisor.stop()

    supervised(tmp_path, body)


def test_one_that_dies_while_playing_plays_again_under_a_new_id(tmp_path):
    async def body(supervisor, process):
        await supervisor.play()
        await lives(process, 1)
        process.is_dead.set()
        await lives(process, 2)
        assert process.lives[1][1] is True
        assert process.lives[0][0] != process.lives[1][0]
        assert supervisor.num_restarts == 1
        await supervisor.stop()

    supervised(tmp_path, body)


@pytest.mark.parametrize("is_killed_by_pause", [True, False])
def test_a_pause_holds_for_the_process_that_comes_after(is_killed_by_pause, tmp_path):
    async def body(supervisor, process):
        await supervisor.play()
        await lives(process, 1)
        if is_killed_by_pause:
            process.dies_after = "pause"
        await supervisor.pause()
        process.is_dead.set()
        await lives(process, 2)
        assert process.lives[1][1] is False
        await supervisor.stop()

    supervised(tmp_path, body)


def test_one_that_dies_of_being_stopped_is_not_revived_and_not_waited_for(tmp_path):
    async def body(supervisor, process):
        await supervisor.play()
        await lives(process, 1)
        process.dies_after = "stop"
        await supervisor.stop()
        assert len(process.lives) == 1
        assert supervisor.num_restarts == 0

    supervised(tmp_path, body)


def test_too_many_deaths_end_the_guarded_work(tmp_path):
    async def body(supervisor, process):
        await supervisor.play()

        async def kill_on():
            while True:
                process.is_dead.set()
                await asyncio.sleep(0.001)

        with pytest.raises(EngineError, match=r"lost 3 times.* p: killed"):
            await supervisor.guard(kill_on())

    supervised(tmp_path, body, max_restarts=2)
