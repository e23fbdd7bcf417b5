"""Statistics are exact and have the fields of their types."""

import json
from typing import get_type_hints

from cascadekv import stats

MIB = 1 << 20


def test_the_types_have_the_fields_of_stats(two_tiers, keys_of):
    two_tiers.put(keys_of(range(1)), [b"block"])
    seen = two_tiers.stats()
    assert set(seen) == set(get_type_hints(stats.Stats))
    assert set(seen["pool"]) == set(get_type_hints(stats.PoolStats))
    assert set(seen["stages"]["files"]) == set(get_type_hints(stats.StageStats))
    assert set(seen["health"]["files"]) == set(get_type_hints(stats.StageHealth))
    assert set(seen["hits_by_tier"]["dram"]) == set(get_type_hints(stats.TierHits))
    for figure in seen["shadows"]:
        assert set(figure) == set(get_type_hints(stats.ShadowFigure))
        assert set(figure["recent"]) == set(get_type_hints(stats.ShadowRates))
    assert seen["shadows"]
    assert json.loads(json.dumps(seen)) == seen


def test_hits_and_misses_add_up_to_gets(store, keys_of, bytes_of):
    keys = keys_of(range(60))
    before = store.stats()
    store.put(keys, [bytes_of(key, MIB // 2) for key in keys], chain=False)
    store.view(keys)
    store.get(keys, bytearray(60 * MIB // 2))
    store.get(keys[:3], bytearray(3))
    seen = store.stats()
    assert seen["gets"] - before["gets"] == 123
    assert seen["hits"] + seen["misses"] + seen["get_failures"] == seen["gets"]
    assert sum(tier["blocks"] for tier in seen["hits_by_tier"].values()) == seen["hits"]
    put_outcomes = ("stored", "deduplicated", "present", "conflicts", "declined", "put_failures")
    assert sum(seen[name] for name in put_outcomes) == seen["puts"]
    assert seen["puts"] - before["puts"] == 60
    assert seen["dram_bytes"] <= seen["pool"]["capacity_bytes"] == 16 * MIB
