"""The tests' own server: one that died is started again, once. Needs no vLLM."""

import pytest
from vllm_server import Keeper, Server


class FakeServer(Server):
    """Dies when told."""

    died = stopped = False

    def __init__(self, log):
        super().__init__("http://127.0.0.1:9/v1", "judge", log=log)

    def stop(self):
        self.stopped = True


def test_a_server_that_died_is_started_once_more(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("many lines\n" * 100 + "out of memory\n")
    keeper = Keeper(lambda: FakeServer(log))
    first = keeper.server()
    assert keeper.server() is first
    first.died = True
    second = keeper.server()
    assert second is not first and first.stopped
    assert keeper.server() is second
    second.died = True
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match=r"died 2 times(.|\n)*out of memory"):
            keeper.server()
    keeper.stop()
    assert second.stopped
