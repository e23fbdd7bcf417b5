"""KV layouts on a (fake) GPU: layer by layer, and with all layers of a block in one run."""

from types import SimpleNamespace

import cascadekv
import numpy as np
import pytest
from cascadekv import Gpu
from cascadekv.connectors.vllm import CascadeConnector, engine_config, identity
from cascadekv.connectors.vllm.layout import Region
from cascadekv.connectors.vllm.memory import GpuPages
from fake_gpu import FakeGpu, library
from test_vllm_gpu import LIMIT_S
from test_vllm_hbm import FIRST_GPU
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm_caches import PAGES, SPACE, Model, workers_of

MODEL = Model(heads=4)
SAVED = [7, 3, 11, 1]
LOADED = [2, 9, 4, 10]


class GpuRank:
    """One rank whose KV, as vLLM allocates it, is in the memory of the fake GPU."""

    def __init__(self, fake, layout, *, is_filled=True, model=MODEL):
        """Allocate the cache by vLLM's code, and copy its bytes to the GPU."""
        (self.rank,) = workers_of(model, 1, layout=layout, is_filled=is_filled)
        self.fake, self.stream = fake, fake.stream()
        self.array = fake.array(self.rank.buffer.numel())
        fake.write(self.array, 0, self.rank.buffer.numpy().tobytes(), self.stream)
        (self.held,) = self.rank.held
        self.gpu = Gpu(0)
        self.memory = GpuPages(self.gpu, self.array, self.held.regions, PAGES, lambda: self.stream)

    def keys(self):
        """Return the keys of a request."""
        return self.rank.keys(len(SAVED)).keys(self.held.part.name, 0, len(SAVED))

    def save(self, store):
        """Save a request; returns the number of copies."""
        before = self.copies()
        size = self.memory.block_bytes
        with store.prepare(self.keys(), size, namespace=SPACE, timeout=LIMIT_S) as prepared:
            self.memory.save(prepared, SAVED)
            assert all(result.ok for result in prepared.seal(timeout=LIMIT_S))
        return self.copies() - before

    def load(self, store, *, is_within):
        """Load the request to other pages; returns the number of copies."""
        before, order = self.copies(), self.memory.order()
        with store.view(self.keys(), timeout=LIMIT_S) as views:
            given = [(views, LOADED)]
            copied = self.memory.start_loads(given, order, is_within=is_within).copied
        assert copied == [True] * len(LOADED)
        order.wait()
        data = self.fake.read(self.array, 0, self.array.size, self.stream)
        self.rank.buffer.numpy()[:] = np.frombuffer(data, np.uint8)
        return self.copies() - before

    def copies(self):
        """Return the copies of the GPU so far."""
        report = self.gpu.report()
        names = ("loaded_copies", "saved_copies", "within_copies")
        return sum(int(report[name]) for name in names)


@pytest.fixture(scope="module")
def fake():
    return FakeGpu()


@pytest.fixture(params=["dram", "hbm"])
def store(request, fake, serve):  # noqa: ARG001 # the driver is chosen before a node is used
    if request.param == "dram":
        with cascadekv.Store(dram="16MiB", huge_pages=False) as opened:
            yield opened
    else:
        node = serve("--gpu", FIRST_GPU, "--hbm", "16MiB", cuda_library=str(library()))
        with cascadekv.connect(node.socket, gpu=Gpu(0)) as opened:
            yield opened


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LBNHC", "BLNHC"])
def test_loaded_pages_equal_saved_ones_in_every_layout(fake, store, layout, request):
    source = GpuRank(fake, layout)
    target = GpuRank(fake, layout, is_filled=False)
    saved = source.save(store)
    loaded = target.load(store, is_within="hbm" in request.node.name)
    for layer in range(len(MODEL.layers)):
        for page, other in zip(SAVED, LOADED, strict=True):
            wanted = source.rank.page(layer, page)
            assert wanted.any()
            assert np.array_equal(target.rank.page(layer, other), wanted)
        for page in set(range(PAGES)) - set(LOADED):
            assert not target.rank.page(layer, page).any(), "another page was written"
    # A block whose layers follow each other is one copy.
    copies = 1 if layout.startswith("B") else len(MODEL.layers)
    assert (saved, loaded) == (copies * len(SAVED), copies * len(LOADED))


def test_padding_between_layers_is_not_copied(fake, store):
    model = Model(heads=4, padding=96)
    source = GpuRank(fake, "BLHNC", model=model)
    assert source.save(store) == len(model.layers) * len(SAVED)
    gaps = [
        second.offset - first.offset - first.page_bytes
        for first, second in zip(source.held.regions, source.held.regions[1:], strict=False)
    ]
    assert gaps == [96] * (len(model.layers) - 1)
    assert all(isinstance(region, Region) for region in source.held.regions)


def test_layouts_have_different_fingerprints(monkeypatch):
    model = SimpleNamespace(
        dtype="float16",
        use_mla=False,
        get_total_num_hidden_layers=lambda: 3,
        get_total_num_kv_heads=lambda: 4,
        get_head_size=lambda: 8,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
    )
    monkeypatch.setattr(identity, "_isa", lambda _config: "test")
    monkeypatch.setattr(identity, "settings_of", lambda _config: {})
    fields = {
        layout: identity.manifest_of(config, workers_of(MODEL, 1, layout=layout)[0].config, "name")
        for layout in ("LBHNC", "BLHNC")
    }
    first, second = fields.values()
    assert {name for name in first if first[name] != second[name]} == {"layout"}
    # Their blocks have different keys, and so never meet.
    spaces = [cascadekv.Namespace(cascadekv.Manifest(each)) for each in fields.values()]
    assert spaces[0].key_of_id("block") != spaces[1].key_of_id("block")


def resolved(settings, supported):
    """Return the layout that vLLM chooses with the connector."""
    transfer = SimpleNamespace(
        kv_connector="CascadeConnector",
        kv_connector_module_path="cascadekv.connectors.vllm",
        kv_connector_extra_config=settings,
        engine_id="test",
    )
    cache = SimpleNamespace(kv_cache_layout=None)
    config = SimpleNamespace(cache_config=cache, kv_transfer_config=transfer)
    return resolve_kv_cache_layout(config, [supported]).name


def test_the_connector_asks_for_a_layout_only_if_it_is_set(monkeypatch):
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    every = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]
    assert resolved({}, every) == "LBNHC"
    assert resolved({"cascade.kv_layout": "BLHNC"}, every) == "BLHNC"
    # Kernels that cannot: vLLM says so, and keeps its own choice.
    assert resolved({"cascade.kv_layout": "BLHNC"}, ["LBHNC"]) == "LBHNC"
    config = SimpleNamespace(kv_transfer_config=None)
    assert CascadeConnector.get_required_kvcache_layout(config) is None
    assert engine_config.wanted_layout(config) is None
