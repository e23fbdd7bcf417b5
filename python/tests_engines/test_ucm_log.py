"""The lines of UCM's log, at UCM's events."""

import logging
import re

import pytest
from scheduled_engine import BLOCK, LAYERS
from transfer_engines import prompt

pytest_plugins = ["transfer_engines"]

LINE = re.compile(
    r"\[UC\]\[D\] (Cache|Posix) task\((\d+),(\w+),(\d+),(\d+)\) "
    r"(dispatching|finished, cost [\d.]+ms)\. \[\d+,\d+\]"
)


class Log(logging.Handler):
    """The messages of Cascade. vLLM's loggers do not hand them on."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        """Keep a message."""
        self.messages.append(record.getMessage())

    def tasks(self, state):
        """Return the tasks that were logged in a state: store, operation, blocks and bytes."""
        lines = [each for each in self.messages if "[UC][D]" in each]
        found = [LINE.fullmatch(each) for each in lines]
        assert all(found), lines
        return [
            (each[1], each[3], int(each[4]), int(each[5]))
            for each in found
            if each[6].startswith(state)
        ]


@pytest.fixture
def log(start_scheduled, monkeypatch):
    """Return the log of engines that are started after this."""
    monkeypatch.setenv("UC_LOGGER_LEVEL", "debug")
    # It sets the levels of all loggers.
    start_scheduled({"cascade.transfer": "off"}).ask(prompt(2, "the first engine"))
    logger, kept = logging.getLogger("vllm.cascade"), Log()
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(kept)
    logger.setLevel(before)


@pytest.mark.parametrize("is_layerwise", [False, True])
def test_tasks_of_loads_saves_and_files(start_scheduled, log, tmp_path, eventually, is_layerwise):
    """With `use_layerwise`, UCM's default, loads were not logged, and writes to files never."""
    files = {"cascade.files": str(tmp_path / "files"), "cascade.files_capacity": "64MiB"}
    way = {"cascade.load": "sync", "cascade.layerwise": is_layerwise, "cascade.transfer": "off"}
    engine = start_scheduled({**files, **way})
    asked = prompt(4 * BLOCK + 3, "tasks")
    engine.ask(asked)
    block = 2 * 2 * 16 * 2 * BLOCK * len(LAYERS)
    assert log.tasks("dispatching")[0] == ("Cache", "DUMP", 4, 4 * block)
    written = ("Posix", "Cache2Backend", 4, 4 * block)
    eventually(lambda: written in log.tasks("finished"))
    assert written in log.tasks("dispatching")
    before = len(log.tasks("finished"))
    engine.ask(asked)
    layers = len(LAYERS) if is_layerwise else 1
    loads = [each for each in log.tasks("finished")[before:] if each[1] == "LOAD"]
    assert loads == [("Cache", "LOAD", 4, 4 * block // layers)] * layers
    # A restarted engine reads from files.
    engine.stop()
    before = len(log.tasks("finished"))
    start_scheduled({**files, **way, "cascade.load": "auto"}).ask(asked)
    assert ("Posix", "Backend2Cache", 4, 4 * block) in log.tasks("finished")[before:]


def test_what_the_hit_ratio_lets_be_loaded_is_logged(start_scheduled, log):
    """12 hits were logged where 6 blocks were loaded. UCM logs both."""
    engine = start_scheduled({"cascade.hit_ratio": 0.5, "cascade.transfer": "off"}, pages=32)
    asked = prompt(12 * BLOCK + 1, "ratio")
    engine.ask(asked)
    log.messages.clear()
    engine.ask(asked)
    assert [line.partition("request_id: ")[::2] for line in log.messages if "hbm" in line] == [
        ("", "request-2, total_blocks_num: 12, hit hbm: 0, hit external: 12"),
        (
            "Hijacked By MockConnector,",
            "request-2, total_blocks_num: 12, hit hbm: 0, hit external: 6",
        ),
    ]
