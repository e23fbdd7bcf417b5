"""Supported versions of vLLM: warnings and errors for others, and the lists of their interface."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm_interface
from cascadekv.connectors import vllm_versions
from cascadekv.connectors.vllm.engine_config import log_at_start
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.output import SchedulerOutput
from vllm_compat import block_state

PACKAGE = Path(vllm_versions.__file__).parents[2]
MODULES = ["cascadekv.connectors.vllm", "cascadekv.connectors.vllm_tier"]


@pytest.mark.parametrize("version", ["0.28.1", "0.9.2.post2", "0.0.1"])
def test_a_version_that_is_too_old_is_refused(version):
    with pytest.raises(ImportError, match=rf"vLLM 0\.29 or later; this is {version} in .*vllm"):
        vllm_versions.check_version(version)


@pytest.mark.parametrize("version", ["0.29.0", "0.29.0rc1", "0.32.1+cpu", "0.33.0", "1.0", "dev"])
def test_later_versions_are_not_refused(version):
    vllm_versions.check_version(version)


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [
        ("0.28.0", False),
        ("0.29.0", True),
        ("0.30.1", True),
        ("0.31.0", True),
        ("0.32.0", True),
        ("0.32.1.dev7+gabcdef", True),
        ("0.33.0", False),
        ("1.0.0", False),
        ("dev", False),
    ],
)
def test_an_untested_version_gets_a_warning(version, is_tried):
    said = vllm_versions.untested_warning(version)
    assert (said is None) == is_tried
    assert is_tried or f"not with {version};" in said


@pytest.mark.parametrize("module", MODULES)
def test_importing_with_an_old_vllm_raises_a_clear_error(tmp_path, module):
    # Without the check, the error would be about a name that cannot be imported.
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.28.0"\n')
    places = os.pathsep.join([str(tmp_path), str(PACKAGE)])
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", f"import {module}"],
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: cascadekv.connectors requires vLLM 0.29 or later")
    assert last.endswith(
        f"this is 0.28.0 in {tmp_path / 'vllm'}: update vLLM, or remove the connector from its "
        "configuration"
    )


@pytest.mark.parametrize("is_tried", [True, False])
def test_an_untested_version_is_logged_once(monkeypatch, is_tried):
    if not is_tried:
        monkeypatch.setattr(vllm_versions, "OLDEST", (0, 1))
        monkeypatch.setattr(vllm_versions, "NEWEST", (0, 2))
    transfer = SimpleNamespace(kv_load_failure_policy="recompute", kv_connector_extra_config={})
    logger = logging.getLogger("vllm.cascade")
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        log_at_start(None, transfer, SimpleNamespace(notes=[]))
    finally:
        logger.removeHandler(handler)
    assert said == ([] if is_tried else [f"Cascade: {vllm_versions.untested_warning()}"])


@pytest.mark.parametrize(
    ("state", "tables"),
    [
        (None, None),
        (block_state({"it"}, lambda _: ([1, 2],)), ([1, 2],)),
        (block_state({"another"}, lambda _: ([1, 2],)), None),
        # The format of 0.29.
        (SimpleNamespace(block_ids={"it": ([1, 2],)}), ([1, 2],)),
        (SimpleNamespace(block_ids={"another": ([1, 2],)}), None),
    ],
)
def test_block_tables_are_read_in_every_format(state, tables):
    output = dataclasses.replace(SchedulerOutput.make_empty(), kv_connector_block_state=state)
    assert vllm_versions.block_tables(output, "it") == tables


def test_groups_are_refused_where_failed_loads_cannot_be_reported(monkeypatch):
    monkeypatch.setattr(base, "KVConnectorTransferResults", None, raising=False)
    assert [vllm_versions.unsupported_groups(groups) for groups in (1, 2)] == [None, None]
    assert vllm_versions.unsupported_groups(1, has_windows=True) is None
    # As in 0.29.
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    assert vllm_versions.unsupported_groups(1) is None
    assert "use vLLM 0.30 or later" in vllm_versions.unsupported_groups(2)
    assert "sliding window" in vllm_versions.unsupported_groups(1, has_windows=True)


def test_every_tested_version_has_a_list_of_its_interface():
    (major, first), (_, last) = vllm_versions.OLDEST, vllm_versions.NEWEST
    tried = [f"{major}.{minor}.txt" for minor in range(first, last + 1)]
    assert sorted(path.name for path in vllm_interface.LISTS.iterdir()) == tried
    locks = vllm_interface.LISTS.parents[1] / "requirements"
    older = {f"vllm-{path.removesuffix('.txt')}.lock" for path in tried[:-1]}
    assert older == {path.name for path in locks.glob("vllm-[0-9]*.lock")}


def test_the_interface_equals_its_list():
    """Fails if vLLM's interface differs from its list: review the differences, then update it."""
    place = vllm_interface.LISTS / f"{vllm_interface.version()}.txt"
    known = place.read_text().splitlines() if place.exists() else []
    listed = list(vllm_interface.interface())
    new = [line for line in listed if line not in known]
    gone = [line for line in known if line not in listed]
    assert (new, gone) == ([], []), (
        f"the interface of vLLM {vllm_interface.version()} differs from {place.name}: review each "
        f"line, adapt the connectors and vllm_versions.py, then update the list (see "
        f"{Path(vllm_interface.__file__).name})"
    )
