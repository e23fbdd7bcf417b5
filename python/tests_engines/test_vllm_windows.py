"""Sliding windows: the pages that a window needs arrive, at any window and any length of a prompt.

vLLM's own scheduler allocates and frees the pages, in `scheduled_engine.py`; a step reads what
attention would read. Regression: a prompt that was found whole lacked a token of its window,
because its last token is computed again. From the store this was wrong where `window - 1` is a
multiple of a block, and between engines at one prompt length in a block: log probabilities were off
by up to 6.5.
"""

import pytest
from push_engines import push
from scheduled_engine import PLAIN
from transfer_engines import (
    TO_PREFILL,
    decode,
    leases_of,
    prefill,
    prompt,
    pulled,
    step_until,
    step_until_idle,
)
from vllm_compat import needs_groups

pytest_plugins = ["transfer_engines"]
pytestmark = needs_groups

BLOCK = 4
WINDOWS = range(1, 3 * BLOCK + 1)
LENGTHS = range(1, 6 * BLOCK + 1)
NEW = BLOCK + 2
"""Tokens of an answer: its last ones see nothing of the prompt in the shortest windows."""
STEP = 8
"""Most tokens of a step, so that long prompts are computed in several ones."""
FEW = (2, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK)
"""Some windows, with all that end at the first token of a block."""
HYBRID = [(None, window) for window in WINDOWS]
"""The windows of an engine's groups of layers, `None` for full attention."""
FEW_GROUPS = [*((None, window) for window in FEW), *((window,) for window in FEW)]
GROUPS = [*HYBRID, *((window,) for window in FEW), (None, 2, BLOCK + 1, 2 * BLOCK + 3)]


@pytest.fixture
def start(start_scheduled):
    """Return a function that starts engines whose layers have sliding windows."""

    def begin(windows, **options):
        options = {"block": BLOCK, "step_tokens": STEP, **options}
        return start_scheduled(windows=windows, **options)

    return begin


def loaded(engine):
    """Return how many blocks the engine has loaded since the last call."""
    return sum(engine.take_figures().get("labels", {}).get("loaded_blocks", {}).values())


def failed(engine):
    """Return how many loads have failed, as a whole or in part."""
    return engine.facts.requests_failed + engine.facts.loads_failed


@pytest.mark.parametrize("windows", GROUPS, ids=str)
def test_from_the_store(start, windows):
    engine = start(windows)
    for tokens in LENGTHS:
        asked = prompt(tokens, "store")
        engine.ask(asked, new=1)
        assert loaded(engine) == 0
        engine.ask(asked, new=NEW)
        assert loaded(engine) == tokens // BLOCK, tokens
    assert failed(engine) == 0


@pytest.mark.parametrize("windows", FEW_GROUPS, ids=str)
def test_from_the_store_behind_a_prefix_in_the_engines_own_cache(start, windows):
    engine = start(windows, has_prefix_cache=True)
    for tokens in LENGTHS:
        asked = prompt(tokens, "own")
        engine.ask(asked, new=1)
        for own in range(BLOCK, tokens, BLOCK):
            engine.reset_prefix_cache()
            engine.ask(asked[:own], new=1)
            engine.ask(asked, new=NEW)
            # Again: all of it may be in the engine's own cache now.
            engine.ask(asked, new=NEW)
    assert failed(engine) == 0


@pytest.mark.parametrize("windows", GROUPS, ids=str)
def test_a_found_prefix_that_ends_in_a_prompt(start, windows):
    engine = start(windows)
    first = prompt(LENGTHS[-1], "prefix")
    engine.ask(first, new=1)
    for shared in range(len(first) + 1):
        asked = first[:shared] + prompt(BLOCK + 1, "other", shared)
        loaded(engine)
        engine.ask(asked, new=NEW)
        assert loaded(engine) == shared // BLOCK, shared
    assert failed(engine) == 0


@pytest.mark.parametrize("windows", GROUPS, ids=str)
def test_read_from_a_prefill_engine(start, windows):
    source, target = start(windows), start(windows)
    for tokens in LENGTHS[BLOCK - 1 :]:
        asked = prompt(tokens, "pull")
        params = prefill(source, asked)
        # It uses all pages that are free.
        source.add(prompt(5 * BLOCK, "others", tokens), new=1)
        source.step()
        decode(target, asked, params, new=NEW)
        assert pulled(target) == -(-(tokens - 1) // BLOCK), tokens
        step_until_idle(source)
    assert failed(target) == 0


@pytest.mark.parametrize("windows", FEW_GROUPS, ids=str)
def test_read_from_a_prefill_engine_behind_an_own_prefix(start, windows):
    source, target = (start(windows, has_prefix_cache=True) for _ in range(2))
    for tokens in LENGTHS[BLOCK - 1 :]:
        asked = prompt(tokens, "pull")
        for own in range(BLOCK, tokens, BLOCK):
            target.reset_prefix_cache()
            # Not from its store.
            target.store().clear()
            target.ask(asked[:own], new=1)
            pulled(target)
            decode(target, asked, prefill(source, asked), new=NEW)
            assert pulled(target) == -(-(tokens - 1) // BLOCK) - own // BLOCK, (tokens, own)
            step_until_idle(source)
    assert failed(target) == 0


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize("windows", GROUPS, ids=str)
def test_written_by_a_prefill_engine(start, windows, decode_first):
    source, target = start(windows), start(windows)
    for tokens in LENGTHS[BLOCK - 1 :]:
        asked = prompt(tokens, "push")
        push(source, target, asked, tokens, decode_first=decode_first, new=NEW)
        assert pulled(target) == -(-(tokens - 1) // BLOCK), tokens
    assert failed(target) == 0


def test_pages_that_are_kept_for_a_decode_engine_are_freed_after_its_lease(start):
    windows = (None, BLOCK + 1)
    source = start(windows, has_prefix_cache=True)
    asked = prompt(3 * BLOCK, "lease")
    params = prefill(source, asked)
    first = (len(asked) - windows[1]) // BLOCK
    assert [bool(page) for page in params["remote_block_ids"][1]] == [
        block >= first for block in range(3)
    ]
    for lease in leases_of(source)._by_request.values():  # noqa: SLF001 # the parts under test
        lease.expires = 0.0
    step_until_idle(source)
    source.reset_prefix_cache()


def test_pages_that_were_freed_before_a_prefill_ended_are_not_offered(start):
    """A prefill that also generates: its window has moved on."""
    windows = (None, BLOCK + 1)
    source, target = start(windows), start(windows)
    for new in range(1, 3 * BLOCK):
        asked = prompt(3 * BLOCK, "generates", new)
        name = source.add(asked, new=new, hints=TO_PREFILL)
        step_until(source, lambda name=name: name in source.facts.finished)
        source.step()
        decode(target, asked, source.facts.params[name])
        # The page is freed when the token after the prompt is computed.
        assert bool(pulled(target)) == (new == 1)
        step_until_idle(source)
    assert failed(target) == 0


def test_without_the_engines_pool_a_page_that_is_freed_is_not_offered(start):
    windows = (None, BLOCK + 1)
    source, target = start(windows), start(windows)
    source.connector._pins._pool = None  # noqa: SLF001 # as with an engine that has none
    for tokens in LENGTHS[2 * BLOCK :]:
        asked = prompt(tokens, "no pool")
        decode(target, asked, prefill(source, asked))
        is_freed = (tokens - windows[1] + 1) % BLOCK == 0
        assert bool(pulled(target)) != is_freed, tokens
        step_until_idle(source)
    assert failed(target) == 0


def test_an_aborted_prefill_keeps_no_pages(start):
    source = start((None, BLOCK + 1))
    for steps in range(6):
        name = source.add(prompt(3 * BLOCK, "aborted", steps), new=6, hints=TO_PREFILL)
        for _ in range(steps):
            source.step()
        source.abort(name)
        step_until_idle(source)


@pytest.mark.parametrize("windows", [(None, 2 * BLOCK + 1), (2 * BLOCK + 1,)], ids=str)
def test_a_block_of_a_window_that_is_lost_before_its_load(start, windows):
    """The engine computes the whole prompt: it has no pages for the blocks before.

    Regression: with windows in all layers, it went on at the lost block.
    """
    engine = start(windows)
    for lost in range(3, 6):
        asked = prompt(6 * BLOCK, "lost", lost)
        engine.ask(asked, new=1)
        names = [part.name for part in engine.connector._scheduler._parts]  # noqa: SLF001
        keys = engine.connector._keys_of(names, PLAIN)  # noqa: SLF001
        keys.extend(asked)

        def lose(names=names, keys=keys, lost=lost):
            if engine.is_loading:
                assert all(engine.store().delete(keys.keys(names[-1], lost, lost + 1)))

        before, engine.between = failed(engine), lose
        engine.ask(asked, new=NEW)
        engine.between = lambda: None
        assert failed(engine) == before + 1
