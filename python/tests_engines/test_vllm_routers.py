"""The requests of proxies and routers, unchanged, between two engines."""

import json
from pathlib import Path

import pytest
from push_engines import finish, run_until, transfers, waiting
from scheduled_engine import BLOCK
from transfer_engines import end_leases, prompt, pulled, step_until

pytest_plugins = ["transfer_engines"]

ROUTERS = Path(__file__).parents[2] / "testdata" / "routers"
DIRECT = sorted(
    path.stem
    for path in ROUTERS.glob("*.json")
    if json.loads(path.read_text()).get("way", "direct") == "direct"
)
NODE = sorted({path.stem for path in ROUTERS.glob("*.json")} - set(DIRECT))


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines."""
    return start_scheduled


class Router:
    """A router that makes the requests of one fixture."""

    def __init__(self, name, source=None):
        """Read the fixture; `source` is the prefill engine."""
        self.facts = json.loads((ROUTERS / f"{name}.json").read_text())
        self._host, _, port = transfers(source).address.rpartition(":") if source else ("", "", 0)
        self._port = int(port)
        self._serial = 0

    def prefill_params(self):
        """Return the parameters of the next prefill."""
        self._serial += 1
        return self._filled(self.facts["prefill"].get("kv_transfer_params"))

    def decode_params(self, answer):
        """Return the parameters of the decode, from an answer of the prefill engine."""
        copied = self.facts["decode"]["copied"]
        taken = answer if copied == "all" else {name: answer[name] for name in copied}
        own = self.facts["decode"].get("kv_transfer_params")
        params = {**(taken or {}), **(self._filled(own) or {})}
        is_float = self.facts.get("numbers") == "float"
        return json.loads(json.dumps(params), parse_int=float if is_float else None) or None

    def _filled(self, params):
        if isinstance(params, dict):
            return {name: self._filled(value) for name, value in params.items()}
        places = {"$TRANSFER": f"xfer-{self._serial}", "$HOST": self._host, "$PORT": self._port}
        return places.get(params, params) if isinstance(params, str) else params


def prefilled(engine, asked, params):
    """Compute a prompt; return the parameters of the response, as they travel in JSON."""
    name = engine.add(asked, new=1, hints=params)
    step_until(engine, lambda: name in engine.facts.finished)
    engine.step()
    return json.loads(json.dumps(engine.facts.params[name]))


@pytest.mark.parametrize("name", DIRECT)
def test_a_router_with_two_engines(start, name):
    source, target = start(), start()
    router = Router(name, source)
    answer = None
    for number in range(3):
        asked = prompt(4 * BLOCK + 3, name, number)
        params = router.prefill_params()
        if answer is not None and router.facts.get("at_once"):
            target.add(asked, hints=router.decode_params(answer))
            step_until(target, lambda: bool(waiting(source)))
            source.add(asked, new=1, hints=params)
            run_until((source, target), lambda: not target.scheduler.has_requests())
        else:
            answer = prefilled(source, asked, params)
            if router.facts.get("at_once"):
                # The first requests of such a router go one after the other, with the answer.
                target.add(asked, hints=answer)
            else:
                target.add(asked, hints=router.decode_params(answer))
        finish(source, target)
        assert pulled(target) == 5
        assert target.facts.loads_failed == 0


@pytest.mark.parametrize("name", DIRECT)
def test_a_router_whose_prefill_engine_is_gone(start, name):
    source, target = start(), start()
    router = Router(name, source)
    asked = prompt(4 * BLOCK + 3, "gone", name)
    answer = prefilled(source, asked, router.prefill_params())
    end_leases(source)
    transfers(source).close()
    target.add(asked, hints=router.decode_params(answer))
    finish(target)
    assert pulled(target) == 0


@pytest.mark.parametrize("name", [*NODE, "vllm-toy-proxy", "llm-d-nixlv2"])
@pytest.mark.parametrize("has_files", [False, True])
def test_a_router_with_a_shared_node(start, serve, tmp_path, name, has_files):
    """The ways through the host's DRAM, and through a node with files."""
    files = ["--files", str(tmp_path), "--files-capacity", "64MiB"] if has_files else []
    node = serve("--dram", "64MiB", *files)
    way = {"cascade.transfer": "node", "cascade.node": f"unix:{node.socket}", "cascade.dram": None}
    source, target = start(way), start(way)
    router = Router(name)
    asked = prompt(5 * BLOCK + 3, "node", name)
    answer = prefilled(source, asked, router.prefill_params())
    # The blocks are in the node before the prefill answers, and no page is kept.
    assert not source.scheduler.has_requests()
    target.add(asked, hints=router.decode_params(answer))
    target.run()
    target.check()
    assert target.take_figures()["labels"]["loaded_blocks"] == {"dram": 5}


def test_blocks_of_a_prefill_outlive_their_node(start, serve, tmp_path):
    """Through a node with files: the node restarts between prefill and decode."""
    node = serve("--dram", "64MiB", "--files", str(tmp_path / "f"), "--files-capacity", "64MiB")
    way = {"cascade.transfer": "node", "cascade.node": f"unix:{node.socket}", "cascade.dram": None}
    source = start(way)
    asked = prompt(5 * BLOCK + 3, "restart")
    router = Router("vllm-toy-proxy")
    answer = prefilled(source, asked, router.prefill_params())
    assert node.stop() == 0, node.log()
    node.start()
    target = start(way)
    target.add(asked, hints=router.decode_params(answer))
    target.run()
    target.check()
    loaded = target.take_figures()["labels"]["loaded_blocks"]
    assert sum(loaded.values()) == 5, loaded
